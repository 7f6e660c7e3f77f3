"""Plans of the forward by mma.sync: tiles within the budgets of each card, what is refused, and bank conflicts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from attngen.arch import ARCHES
from attngen.dtypes import HEAD_DIMS
from attngen.errors import PlanError
from attngen.families.mma_forward.structure import MmaForward
from attngen.plan import plan
from attngen.plan.candidates import candidates
from tests.plan.specs import kernel_spec, planned
from tests.render.headers import headers
from tests.sampling import sampled

CARDS = ("sm80", "sm86", "sm89", "sm120a")


def mma(variant: str = "causal", arch: str = "sm80", **fields: object):
    return planned(variant, arch=arch, backend=None, **fields)


@sampled(always=8, arch=[*CARDS], head_dim=[*HEAD_DIMS])
def test_tiles_fit_the_card(arch: str, head_dim: int) -> None:
    card = ARCHES[arch]
    for variant in ("full", "relative_bias"):
        made = mma(variant, arch, head_dim=head_dim)
        own = made.structure
        assert isinstance(own, MmaForward)
        assert made.schedule == "mma_forward"
        assert own.shared_bytes <= card.shared_memory
        assert own.blocks * (own.shared_bytes + 1024) <= card.shared_memory + 1024
        assert made.tile_m == 16 * own.row_blocks * made.num_warps
        # a thread has registers for O and a tile of S, and some beside these
        registers = card.registers // (made.threads * own.blocks)
        assert own.row_blocks * (own.columns_v + made.tile_n) // 2 + 32 <= min(registers, 255)
        assert made.launches[-1].shared_bytes == own.shared_bytes


@pytest.mark.parametrize("arch", CARDS)
def test_head_dims_may_differ(arch: str) -> None:
    made = mma(arch=arch, head_dim="{qk: 192, v: 128}")
    assert (made.structure.columns_qk, made.structure.columns_v) == (192, 128)
    assert mma(arch=arch, head_dim="{qk: 40, v: 72}").structure.columns_v == 80


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dtype": "fp32"}, r"dtype: cuda kernels by mma\.sync take bf16, fp16 and fp8_e4m3; found fp32"),
        (
            {"loads": "descriptor"},
            r"loads: cuda kernels by mma\.sync load by cp\.async; found descriptor; allowed: pointer",
        ),
        ({"alignment": "element"}, r"alignment: cp\.async copies 16 bytes, which need alignment 16; found 2"),
        ({"warps": "{consumer: 2}"}, r"warps: cuda kernels by mma\.sync have no roles; give a count"),
        (
            {"persistent": "true"},
            r"persistent: cuda kernels by mma\.sync are not persistent; found true; allowed: false",
        ),
        (
            {"epilogue": "staged"},
            r"epilogue: cuda kernels by mma\.sync store from registers; found staged; allowed: direct",
        ),
        ({"softmax": "first_max"}, r"softmax: .*no other row max; found first_max; allowed: lazy, exact_max, bounded"),
        ({"tile": "{n: 48}"}, r"tile\.n: 48 is not one of 16, 32, 64, 128; nearest: 32"),
        ({"tile": "{m: 96}"}, r"tile\.m: 96 is not one of 64, 128; nearest: (64|128)"),
        ({"warps": 2}, r"warps|num_warps: 2 is not one of 4, 8"),
        (
            {"head_dim": 256, "tile": "{m: 256, n: 128}"},
            r"tile: Shared memory \d+ B exceeds 166912 B on sm80: Q 131072",
        ),
        ({"variant": "allowed", "pack_gqa": "true"}, r"pack_gqa: a tile map lists the tiles of single heads"),
    ],
    ids=str,
)
def test_what_it_cannot_do_is_refused(fields: dict[str, object], message: str) -> None:
    variant = str(fields.pop("variant", "causal"))
    with pytest.raises(PlanError, match=message):
        planned(variant, arch="sm80", backend="cuda", **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("variant", "fields", "shares"),
    [
        ("packed_documents", {}, True),
        ("packed_documents", {"layout": "varlen"}, True),
        ("sliding_window", {"arch": "sm120a"}, True),
        ("sink_window", {}, True),
        ("causal", {}, False),
        ("prefix_lm", {}, False),
        ("full", {}, False),
        ("allowed", {}, False),
        ("sliding_window", {"pack_gqa": "true"}, False),
        ("sliding_window", {"head_dim": 192}, False),  # pairs of warps
    ],
)
def test_warps_of_a_tile_see_the_same_keys(variant: str, fields: dict[str, object], shares: bool) -> None:
    own = mma(variant, **fields).structure  # type: ignore[arg-type]
    assert isinstance(own, MmaForward)
    assert own.shares_keys == shares


def test_heads_with_masks_of_their_own_share_no_tile() -> None:
    mask = "0 <= q_pos - kv and q_pos - kv < window[h]"
    declared = f"variants:\n  own: {{tensors: {{window: {{dtype: int32, shape: [h]}}}}, mask: '{mask}'}}\n"
    own = mma("own", declared=declared).structure
    assert isinstance(own, MmaForward)
    assert own.skips
    assert not own.shares_keys


def test_a_spec_fixes_tile_stages_and_warps() -> None:
    made = mma(head_dim=128, tile="{m: 128, n: 32}", pipeline="{stages: 4}", warps=8)
    assert (made.tile_m, made.tile_n, made.stages, made.num_warps) == (128, 32, 4, 8)
    assert made.structure.row_blocks == 1
    assert made.name == "fwd_sm80_mma_bf16_d128_causal_m128n32s4w8"


def test_hopper_takes_it_if_asked_for() -> None:
    """Kernels for other cards run on Hopper, where they are verified."""
    asked = kernel_spec(arch="sm90a", backend="cuda", loads="pointer", head_dim=128)
    assert plan(asked).schedule == "mma_forward"
    unasked = plan(replace(asked, backend=None))
    assert unasked.backend == "triton"
    assert "multiply by mma.sync, not by wgmma" in unasked.backend_reason
    for_ampere = mma(head_dim=128)
    same = plan(replace(asked, tile_m=for_ampere.tile_m, tile_n=for_ampere.tile_n, stages=for_ampere.stages,
                        num_warps=for_ampere.num_warps))  # fmt: skip
    assert same.structure == for_ampere.structure


def test_candidates_of_tuning() -> None:
    tiles = {(p.tile_m, p.tile_n, p.stages, p.num_warps) for _, p in candidates(kernel_spec(arch="sm80", backend=None))}
    assert len(tiles) > 10


# --- bank conflicts ------------------------------------------------------------------------------------------


def swizzled(box_bytes: int) -> Callable[[int, int], int]:
    """Return the function of copy.cuh that says in which chunk of a row of shared memory a chunk lies."""
    (expression,) = re.findall(r"return chunk \^ \(kBoxBytes == 128 \? (.+) : (.+)\);", headers()["copy.cuh"])
    code = expression[0 if box_bytes == 128 else 1].replace("/", "//")
    return lambda row, chunk: chunk ^ int(eval(code, {"row": row}))


def conflicts(addresses: list[int]) -> int:
    """Most words that one bank of shared memory serves, of accesses of 16 bytes by eight lanes at a time."""
    most = 0
    for first in range(0, len(addresses), 8):
        banks = Counter((at // 4 + i) % 32 for at in addresses[first : first + 8] for i in range(4))
        most = max(most, *banks.values())
    return most


@pytest.mark.parametrize("box_bytes", [64, 128])
def test_no_access_to_shared_memory_has_bank_conflicts(box_bytes: int) -> None:
    place, chunks = swizzled(box_bytes), box_bytes // 16
    lanes = range(32)

    def at(row: int, chunk: int) -> int:
        return row * box_bytes + 16 * place(row, chunk)

    for warp in range(8):  # copies: a lane has a chunk of a row
        threads = [32 * warp + lane for lane in lanes]
        assert conflicts([at(t // chunks, t % chunks) for t in threads]) == 1
    for column in range(0, chunks, 2):  # ldmatrix of Q, K and V: lanes give the rows of four blocks
        assert conflicts([at(lane % 16, column + lane // 16) for lane in lanes]) == 1
        assert conflicts([at(lane // 16 * 8 + lane % 8, column + lane // 8 % 2) for lane in lanes]) == 1
        # a column is added to a lane's place by XOR
        for row in range(16):
            for half in range(2):
                assert at(row, column + half) == at(row, half) ^ 16 * column


# --- operands of 8 bits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["sm89", "sm120a"])
def test_operands_of_8_bits(arch: str) -> None:
    for head_dim in (16, 64, 80, 128, 192, 256):
        made = mma("softcap", arch, head_dim=head_dim, dtype="fp8_e4m3")
        own = made.structure
        assert isinstance(own, MmaForward)
        assert (made.schedule, made.softmax, own.peak) == ("mma_forward", "exact_max", 4)
        assert own.shared_bytes <= ARCHES[arch].shared_memory
        assert own.columns_qk % 32 == 0  # that one product sums over
        assert {"q_descale_ptr", "k_descale_ptr", "v_descale_ptr"} <= {one.name for one in made.arguments}


@pytest.mark.parametrize(
    ("arch", "fields", "message"),
    [
        ("sm86", {}, r"dtype: sm86 multiplies no numbers of 8 bits; allowed: bf16, fp16"),
        ("sm89", {"head_dim": 72}, r"head_dim: .*multiples of 16"),
        ("sm89", {"descale": 64}, r"descale: kernels by mma\.sync take a scale of each head; found 64; allowed: head"),
        ("sm89", {"transposed_v": "true"}, r"transposed_v: kernels by mma\.sync transpose v themselves"),
        ("sm89", {"softmax": "lazy"}, r"softmax: 'lazy' does not exist in fp8_e4m3; allowed: exact_max"),
    ],
    ids=str,
)
def test_what_8_bits_cannot_do_is_refused(arch: str, fields: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        planned("causal", arch=arch, backend="cuda", **{"head_dim": 128, "dtype": "fp8_e4m3", **fields})  # type: ignore[arg-type]
