"""Clearing of a bias's gradient by a CUDA backward, on the CPU: lanes are fibers.

Every entry is either cleared once by the warp that rounds dQ, or lies in a tile of which the loader makes a step, whose
dS is stored. The rendered lines of both run as they are.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from random import Random

import pytest

from attngen.families.hopper_backward.structure import HopperBackward
from attngen.render import render
from tests.host_compiler import COMPILER, HOST, compile_host
from tests.plan.specs import planned
from tests.sampling import few

BATCH, HEADS = 2, 4

DECLARED = """variants:
  own:
    mask: "{mask}"
    score: "s + bias[b, h, q, kv]"
    tensors:
      bias: {{dtype: {dtype}, shape: [b, h, seqlen_q, seqlen_k], grad: true}}
      allowed: {{dtype: bool, shape: [seqlen_q, seqlen_k]}}
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(COMPILER is None, reason="needs g++")
@few(
    ("mask", "head_dim", "lengths", "kv_heads", "dtype"),
    [
        ("q_pos >= kv", 128, (700, 904), 2, "bf16"),
        ("q_pos >= kv and q_pos - kv < 150", 64, (1000, 648), 4, "fp32"),  # each consumer finds what sees its keys
        ("q_pos >= kv and (q_pos - kv < 100 or kv < 4) and q_pos < 800", 128, (900, 904), 1, "bf16"),
        ("allowed[q, kv]", 64, (2500, 136), 2, "bf16"),  # by a tile map, of two words
    ],
    always=(3,),
    often=(0, 2),
)
def test_each_entry_is_stored_or_cleared(
    mask: str, head_dim: int, lengths: tuple[int, int], kv_heads: int, dtype: str, tmp_path: Path
) -> None:
    plan = planned(
        "own", passes="backward", backward="{backend: cuda}", dtype="bf16", head_dim=head_dim,
        declared=DECLARED.format(mask=mask, dtype=dtype),
    )  # fmt: skip
    assert isinstance(plan.structure, HopperBackward)
    assert plan.structure.clears
    assert plan.iteration == ("tile_map" if "allowed" in mask else "ranges")
    seqlen_q, seqlen_k = lengths
    q_tiles, kv_tiles = -(-seqlen_q // plan.tile_m), -(-seqlen_k // 128)
    text = render(plan).text
    after = text[text.index("const auto load_step = ") :]
    visits = after[after.index("dout_ring.advance();\n") :].split("};\n", 1)[1]
    visits = visits[: min(visits.index(end) for end in ("        if (lane == 0) {\n", "index = take_in_order"))]
    clears = text[text.index("// Clears the gradient of bias") : text.index("// Rounds dQ")]
    (tmp_path / "visits.inc").write_text(visits)
    (tmp_path / "clears.inc").write_text(clears)
    random, words = Random(mask), -(-q_tiles // 32)
    of_map = []
    for _ in range(BATCH * HEADS * kv_tiles):  # bits of visible tiles, then of those that are partial
        seen, part = ([random.random() < 0.4 for _ in range(q_tiles)] for _ in range(2))
        for bits in (seen, part):
            of_map += [sum(bit << i for i, bit in enumerate(bits[32 * w : 32 * w + 32])) for w in range(words)]
    sizes = {
        "batch": BATCH, "heads": HEADS, "kv_heads": kv_heads, "group": HEADS // kv_heads, "seqlen_q": seqlen_q,
        "max_seqlen_k": seqlen_k, "q_tiles": q_tiles, "kv_tiles": kv_tiles, "cleared_u_bias": 1,
        "extent_u_bias_0": BATCH, "extent_u_bias_1": HEADS, "extent_u_bias_2": seqlen_q,
        "extent_u_bias_3": seqlen_k, "words": words,
        "stride_tile_map_kv": 2 * words, "stride_tile_map_h": 2 * words * kv_tiles,
        "stride_tile_map_b": 2 * words * kv_tiles * HEADS, "map_words": len(of_map),
    }  # fmt: skip
    entries = BATCH * HEADS * seqlen_q * seqlen_k
    lines = [f"constexpr int kBlockM = {plan.tile_m}, kSlotsOfWord = 16;"]
    lines += [f"static const int {name} = {value};" for name, value in sizes.items()]
    lines.append(f"static const int tile_map_ptr[{20 * len(of_map)}] = {{{', '.join(f'int({x}u)' for x in of_map)}}};")
    lines.append(f"alignas(16) static uint{32 if dtype == 'fp32' else 16}_t gradient[{entries}];")
    lines.append("static float* const gradient_u_bias = reinterpret_cast<float*>(gradient);")
    (tmp_path / "given.inc").write_text("\n".join(lines))
    program = tmp_path / "program"
    compile_host(HOST / "cleared.cpp", program, tmp_path)
    done = subprocess.run([program], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    steps, held = done.stdout.split("gradient\n")
    visited = [tuple(map(int, line.split())) for line in steps.splitlines()]
    assert len({*visited}) == len(visited)
    assert 0 < len(visited) < BATCH * HEADS * kv_tiles * q_tiles
    wanted = bytearray(b"0" * entries)
    for b, h, kv_tile, tile in visited:
        start, stop = 128 * kv_tile, min(128 * kv_tile + 128, seqlen_k)
        for q in range(plan.tile_m * tile, min(plan.tile_m * (tile + 1), seqlen_q)):
            first = ((b * HEADS + h) * seqlen_q + q) * seqlen_k
            wanted[first + start : first + stop] = b"1" * (stop - start)
    assert held == wanted.decode()
