"""The warp of the CUDA backward that adds up gradients from tiles of dS, on the CPU: lanes are fibers.

What it adds for given tiles is compared with sums over all pairs. The rendered lines run as they are, beside small
stand-ins for what the hardware does (``tests/host``).
"""

from __future__ import annotations

import re
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest

from attngen.plan import Plan
from attngen.render import render
from tests.host_compiler import COMPILER, HOST, compile_host
from tests.plan.specs import planned
from tests.render.headers import headers
from tests.sampling import few

#: Four sums at once need an address that is a multiple of 16 bytes.
_ADD_FOUR = (
    'if (reinterpret_cast<uintptr_t>(to) % 16) fail("four sums at such an address"); '
    "to[0] += x.x, to[1] += x.y, to[2] += x.z, to[3] += x.w;"
)
#: An addition to an element where a predicate holds.
_PREDICATED = r'asm volatile\(\s*"\{{\.reg \.pred p; [^;]*; @p red\.[^;]*;\}}"\s*::"l"\(to \+ {}\).*?\);'
#: Stand-ins on the host for the PTX in the header.
PTX = {
    r'asm volatile\("red\.relaxed\.gpu\.global\.add\.f32 .*?\);': "*to += x;",
    r'asm volatile\(\s*"red\.relaxed\.gpu\.global\.add\.v4\.f32 .*?\);': _ADD_FOUR,
    r'asm volatile\(\s*"ld\.shared\.v4\.u32 .*?\);': "eight = *reinterpret_cast<uint4*>(place_of_address(from));",
    r'asm volatile\(\s*"ld\.shared\.v2\.u32 .*?\);': "four = *reinterpret_cast<uint2*>(place_of_address(from));",
    r'asm volatile\("ld\.shared\.u32 .*?\);': "both = *reinterpret_cast<uint32_t*>(place_of_address(from));",
    _PREDICATED.format("run"): "if (ends) to[run] += sum;",
    _PREDICATED.format("entry"): "if (adds) to[entry] += sum;",
}
DECLARED = """variants:
  own:
    score: "{score}"
    tensors:
      table: {{dtype: float32, shape: [h, 41], grad: true}}
      grid: {{dtype: float32, shape: [h, 5, 9], grad: true}}
      row: {{dtype: float32, shape: [b, h, seqlen_q], grad: true}}
      bias: {{dtype: {dtype}, shape: [h, seqlen_q, seqlen_k], grad: true}}
      half: {{dtype: float32, shape: [b, h, seqlen_q, seqlen_k], grad: true}}
      shared: {{dtype: float32, shape: [1, h, seqlen_q, seqlen_k], grad: true}}
"""


@dataclass(frozen=True)
class Step:
    tile: int
    h: int
    b: int
    kv_start: int


def place_of(name: str, step: Step, q: int, kv: int, lengths: tuple[int, int], form: str) -> tuple[int, float] | None:
    """Return the entry of a tensor's gradient that a pair adds to, and the derivative; None: outside."""
    seqlen_q, seqlen_k = lengths
    apart = q + seqlen_k - seqlen_q - kv
    match name:
        case "table":
            index = min(max(apart + 20, 0), 40)
            return 41 * step.h + index, 1 / (1 + abs(apart)) if form == "decay" else 2.0
        case "grid":
            inside = q // 64 < 5 and (kv + 8) // 32 < 9
            return ((5 * step.h + q // 64) * 9 + (kv + 8) // 32, 0.5 * (kv // 16)) if inside else None
        case "row":
            return (2 * step.b + step.h) * seqlen_q + q, 1.0
        case "bias" | "shared":
            return (step.h * seqlen_q + q) * seqlen_k + kv, 1.0
    return ((2 * step.b + step.h) * seqlen_q + q) * seqlen_k + kv, 0.5


FORMS = {
    "all": "s + row[b, h, q] + bias[h, q, kv] + 0.5 * half[b, h, q, kv]",
    "clamped": "s + 2.0 * table[h, clamp(q_pos - kv + 20, 0, 40)]",
    "shared": "s + shared[b // 2, h, q, kv]",
    "blocks": "s + 0.5 * grid[h, q // 64, (kv + 8) // 32] * (kv // 16)",
    "decay": "s + table[h, clamp(q_pos - kv + 20, 0, 40)] / (1 + abs(q_pos - kv))",
}


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
@few(
    ("form", "head_dim", "dtype", "layout", "lengths", "stored"),
    [
        ("shared", 32, "bf16", "dense", (80, 136), 0),
        ("clamped", 256, "bf16", "dense", (150, 300), 0),
        ("decay", 256, "fp16", "dense", (150, 300), 0),
        ("blocks", 32, "bf16", "varlen", (149, 301), 0),
        ("all", 64, "fp16", "varlen", (149, 301), 1),
        ("all", 64, "bf16", "dense", (192, 256), 0),
        ("all", 64, "bf16", "dense", (192, 256), 1),
        ("all", 128, "bf16", "dense", (150, 300), 1),
        ("all", 128, "fp16", "dense", (150, 304), 0),
    ],
    always=0,
    often=(0, 1, 2),
)
def test_sums_are_those_of_float64(
    form: str, head_dim: int, dtype: str, layout: str, lengths: tuple[int, int], stored: int, tmp_path: Path
) -> None:
    score = FORMS[form]
    plan = planned(
        "own", passes="backward", backward="{backend: cuda}", head_dim=head_dim, dtype=dtype, layout=layout,
        declared=DECLARED.format(score=score, dtype=dtype),
    )  # fmt: skip
    random = Random(f"{form} {head_dim} {lengths} {stored}")
    seqlen_q, seqlen_k = lengths
    batches = 1 if stored else 2
    keys = 64 if plan.structure.in_cluster else 128
    every = [
        Step(tile, h, b, kv_start)
        for tile in range(-(-seqlen_q // plan.tile_m))
        for h in range(2)
        for b in range(batches)
        for kv_start in ((64,) if plan.structure.in_cluster else range(0, seqlen_k, keys))
    ]
    steps = random.sample(every, len(every))
    pairs = [
        [[random.randint(-8, 8) / 8 if inside(plan, step, lengths, i, j) else 0.0 for j in range(keys)]
         for i in range(plan.tile_m)]
        for step in steps
    ]  # fmt: skip
    names = [name for name in ("table", "grid", "row", "bias", "half", "shared") if f"{name}[" in score]
    sizes = {
        "table": 2 * 41, "grid": 2 * 45, "row": 4 * seqlen_q, "bias": 2 * seqlen_q * seqlen_k,
        "half": 4 * seqlen_q * seqlen_k, "shared": 2 * seqlen_q * seqlen_k,
    }  # fmt: skip
    wanted = {name: [0.0] * sizes[name] for name in names}
    for step, rows in zip(steps, pairs, strict=True):
        for i, row in enumerate(rows):
            for j, x in enumerate(row):
                if x:
                    for name in names:
                        place = place_of(name, step, plan.tile_m * step.tile + i, step.kv_start + j, lengths, form)
                        if place is not None:
                            wanted[name][place[0]] += x * place[1]
    results = run(plan, steps, pairs, lengths, {name: sizes[name] for name in names}, stored, tmp_path)
    for name in names:
        assert results[name] == pytest.approx(wanted[name], abs=1e-4, rel=1e-4), name


def inside(plan: Plan, step: Step, lengths: tuple[int, int], row: int, key: int) -> bool:
    return plan.tile_m * step.tile + row < lengths[0] and step.kv_start + key < lengths[1]


def header_on_host() -> str:
    """Return the header of both kinds of sums with stand-ins for what it asks of the hardware."""
    header = headers()["tensor_gradient.cuh"].replace("#pragma once", "").replace('#include "types.cuh"', "")
    for pattern, instead in PTX.items():
        header = re.sub(pattern, lambda _, instead=instead: instead, header, flags=re.DOTALL)
    assert "asm" not in header
    return header


def run(
    plan: Plan, steps: list[Step], pairs: list[list[list[float]]], lengths: tuple[int, int], sizes: dict[str, int],
    stored: int, folder: Path,
) -> dict[str, list[float]]:  # fmt: skip
    """Compile the role with what it is given, run it, and return the gradients."""
    text = render(plan).text
    begin = text.index("// Adds up gradients of the variant's tensors from tiles of dS")
    role = text[begin : text.index("\n    }\n", begin)]
    (folder / "role.inc").write_text(role)
    (folder / "tensor_gradient.inc").write_text(header_on_host())
    element = plan.operands.ds.cuda
    extents = {"b": 2, "h": 2, "seqlen_q": lengths[0], "seqlen_k": lengths[1]}
    lines = [f"using Element = {element};", f"constexpr int kBlockM = {plan.tile_m}, kSteps = {len(steps)};"]
    lines.append(f"constexpr int kDsKeys = {len(pairs[0][0])};")
    lines.append(f"static int seqlen_q = {lengths[0]}, seqlen_k = {lengths[1]}, own_start = {steps[0].kv_start};")
    for tensor in plan.variant.tensors:
        if tensor.name in sizes:
            lines.append(f"alignas(16) static float gradient_u_{tensor.name}[{sizes[tensor.name]}];")
        for axis, extent in enumerate(tensor.shape):
            lines.append(f"static int extent_u_{tensor.name}_{axis} = {extents.get(extent, extent)};")
    for argument in plan.arguments:
        if argument.name.startswith("stored_"):
            lines.append(f"static int {argument.name} = {stored};")
    rows = ", ".join(
        f"{{{s.tile}, {s.h}, {s.b}, {s.h}, {s.kv_start}, 0, 0, {lengths[0]}, {lengths[1]}}}" for s in steps
    )
    lines.append(f"static DsStep steps[] = {{{rows}}};")
    bits = ", ".join(str(bits_of(x, plan.operands.ds.name)) for rows in pairs for row in rows for x in row)
    lines.append(f"static const uint16_t pairs[] = {{{bits}}};")
    prints = []
    for name, size in sizes.items():
        as_element = stored and name == "bias"
        value = f"to_float(reinterpret_cast<Element*>(gradient_u_{name})[i])" if as_element else f"gradient_u_{name}[i]"
        prints.append(f'for (int i = 0; i < {size}; ++i) std::printf("%.9g ", {value}); std::printf("\\n");')
    lines.append(f"static void print_gradients() {{ {' '.join(prints)} }}")
    (folder / "given.inc").write_text("\n".join(lines))
    compile_host(HOST / "tensor_adder.cpp", folder / "program", folder)
    done = subprocess.run([folder / "program"], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    printed = [[float(x) for x in line.split()] for line in done.stdout.splitlines()]
    return dict(zip(sizes, printed, strict=True))


def bits_of(x: float, dtype: str) -> int:
    """Return a number that 16 bits hold exactly as these bits."""
    if dtype == "fp16":
        return int(struct.unpack("<H", struct.pack("<e", x))[0])
    return int(struct.unpack("<I", struct.pack("<f", x))[0]) >> 16
