"""Plans of the backward by mma.sync: tiles within the budgets of each card, warps, and bank conflicts of P and dS."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest

from attngen.arch import ARCHES
from attngen.dtypes import HEAD_DIMS
from attngen.errors import PlanError
from attngen.families.mma_backward.schedule import SCHEDULE
from attngen.families.mma_backward.structure import MmaBackward
from attngen.plan import Plan, plan
from attngen.render import render
from tests.families.mma_forward.test_mma_forward import CARDS, conflicts, swizzled
from tests.plan.specs import kernel_spec, planned
from tests.plan.test_tensor_gradients import DECLARED
from tests.sampling import few, sampled

BACKWARD: Mapping[str, object] = {"backend": None, "passes": "backward", "backward": "{backend: cuda}"}


def mma(arch: str, head_dim: object, variant: str = "causal") -> Plan:
    return planned(variant, **{"arch": arch, "head_dim": head_dim, **BACKWARD})  # type: ignore[arg-type]


@sampled(always=9, arch=[*CARDS], head_dim=[*HEAD_DIMS, "{qk: 192, v: 128}", "{qk: 40, v: 24}"])
def test_tiles_fit_the_card(arch: str, head_dim: object) -> None:
    if arch != "sm80" and isinstance(head_dim, int) and head_dim > 160:
        with pytest.raises(PlanError, match=r"shared memory for 320 columns of K and V"):
            mma(arch, head_dim)
        return
    for variant in ("causal", "relative_bias"):
        made = mma(arch, head_dim, variant)
        own = made.structure
        assert isinstance(own, MmaBackward)
        assert made.schedule == "mma_backward"
        assert own.shared_bytes <= ARCHES[arch].shared_memory
        warps = 32 * made.num_warps // made.tile_n  # that have the same keys
        assert warps * made.tile_n == 32 * made.num_warps
        assert made.tile_m % (16 * warps) == 0
        assert made.tile_m % 32 == 0
        assert own.shares_p == (warps > 1)
        # a thread has registers for its part of dK and dV, of S and dP, and some beside these
        columns = sum(-(-columns // (16 * warps)) * 16 for columns in (own.columns_qk, own.columns_v))
        assert columns + 2 * made.tile_m // warps + 32 <= 255


@pytest.mark.parametrize(("arch", "head_dim"), [("sm80", 64), ("sm80", 128), ("sm86", 128)])
def test_pairs_in_shared_memory_have_no_bank_conflicts(arch: str, head_dim: int) -> None:
    made = mma(arch, head_dim)
    assert "kPairBytes = 2 * kBlockM < 128 ? 64 : 128" in render(made).text
    row_bytes = 64 if 2 * made.tile_m < 128 else 128
    place, chunks, lanes = swizzled(row_bytes), row_bytes // 16, range(32)

    def at(key: int, chunk: int) -> int:
        return key * row_bytes + 16 * place(key, chunk)

    for chunk in range(chunks):  # stores: four lanes of a key have four bytes each
        for first in (0, 8):
            banks = {(at(first + lane // 4, chunk) + 4 * (lane % 4)) // 4 % 32 for lane in lanes}
            assert len(banks) == 32
    for chunk in range(0, chunks, 2):  # as A of dV and dK, and, transposed, of dQ
        assert conflicts([at(lane % 16, chunk + lane // 16) for lane in lanes]) == 1
        assert conflicts([at(lane // 16 * 8 + lane % 8, chunk + lane // 8 % 2) for lane in lanes]) == 1


def test_other_tiles_need_fewer_registers() -> None:
    fields = {"arch": "sm80", "head_dim": 64, **BACKWARD}
    spec = kernel_spec("causal", **fields)  # type: ignore[arg-type]
    first = plan(spec)
    others = [(one.tile_m, one.tile_n) for one in SCHEDULE.alternatives(spec, ARCHES["sm80"], first)]
    assert (first.tile_m, first.tile_n) == (128, 128)
    assert others[0] == (64, 128)
    assert all(m < 128 for m, _ in others)


@few("layout", ["dense", "varlen"])
@pytest.mark.parametrize(
    ("variant", "iteration", "by_head"),
    [
        ("causal", "ranges", False),
        ("own", "ranges", True),
        ("dilated", "classified", False),
        ("allowed", "tile_map", True),
    ],
)
def test_a_fixed_order_goes_from_the_last_queries_to_the_first(
    variant: str, iteration: str, by_head: bool, layout: str
) -> None:
    """Turns ascend from step to step of a tile of keys, as the model of the order has them."""
    fields = {
        "arch": "sm80", "head_dim": 64, "layout": layout, "tile_map": "never" if variant == "dilated" else "auto",
        "declared": 'variants:\n  own: {mask: "q_pos >= kv and q_pos - kv < 100 * h + 1"}\n', **BACKWARD,
    }  # fmt: skip
    kernel, other = (planned(variant, deterministic=each, **fields) for each in ("true", "false"))  # type: ignore[arg-type]
    assert kernel.name == f"{other.name}_deterministic"
    assert kernel.iteration == iteration
    assert kernel.ordered
    assert "tile_counter" in [argument.name for argument in kernel.arguments]
    assert "tile_counter" not in [argument.name for argument in other.arguments]
    text = render(kernel).text
    taken, made_of_it = text.index("atomicInc(tile_counter, gridDim.x - 1)"), text.index("place_tile(index, ")
    assert taken < text.index("__syncthreads();", taken) < made_of_it
    (turn,) = re.findall(r"return (.*last_tile.*);", text)
    heads, tiles = range(6, 9), range(4, -1, -1)
    steps = [(h, t) for h in heads for t in tiles] if by_head else [(h, t) for t in tiles for h in heads]
    turns = [eval(turn, {"h": h, "hk": 2, "group": 3, "tile": t, "last_tile": 4}) for h, t in steps]
    assert turns == list(range(15))
    assert text.index("await_turn(earlier, turn, lane);") < text.index("add_to(own + 32 * i")
    assert "order.cuh" not in render(other).text


@pytest.mark.parametrize(
    ("score", "lines"),
    [
        ("s + gate[h] * (kv - q_pos)", ["tensor_sum_0 += dlogit", "add_tensor_sums(summed_head)"]),
        ("s * sigmoid(gate[h])", ["p_weighted_0_of_blocks[2][kWarpM / 4]"]),
        ("s + keys[b, kv]", ["tensor_sum_0[block][j] +="]),
        ("s + rows[h, q]", ["ds_tile.each_query("]),
        ("s + table[h, min(abs(q - kv), 256)]", ["ds_tile.sum(", "ds_tile.each_diagonal("]),
        ("s + table[h, q * kv % 257]", ["tensor_sum_0_entry[block][row]"]),
        ("s + bias[h, q, kv]", ["ds_tile.each_block(", "store_eight<Element>("]),
    ],
)
def test_gradients_of_tensors(score: str, lines: list[str]) -> None:
    own = DECLARED.format(score=score)
    kernel = planned("own", **{"arch": "sm86", "head_dim": 64, "declared": own, **BACKWARD})  # type: ignore[arg-type]
    assert kernel.schedule == "mma_backward"
    text = render(kernel).text
    assert all(line in text for line in lines)
    with pytest.raises(PlanError, match=r"deterministic: gradients .* allowed: false"):
        planned("own", **{"arch": "sm86", "declared": own, "deterministic": "true", **BACKWARD})  # type: ignore[arg-type]


def test_padded_columns_count() -> None:
    with pytest.raises(PlanError, match=r"shared memory for 320 columns of K and V on sm86, not 96 \+ 256"):
        mma("sm86", "{qk: 72, v: 240}")


@pytest.mark.parametrize(
    ("variant", "tile"),
    [("causal", (128, 128, 8)), ("sliding_window", (64, 64, 4)), ("packed_documents", (64, 64, 4))],
)
def test_narrow_masks_have_smaller_tiles(variant: str, tile: tuple[int, int, int]) -> None:
    """Two blocks run side by side, also with the shared memory of a smaller card."""
    made = mma("sm80", 64, variant)
    assert (made.tile_m, made.tile_n, made.num_warps) == tile
    other = mma("sm86", 64, variant)
    assert (other.tile_m, other.tile_n, other.num_warps) == (64, 64, 4)
    assert isinstance(other.structure, MmaBackward)
    assert other.structure.blocks == 2
    assert 2 * (other.structure.shared_bytes + 1024) <= 100 * 1024


@pytest.mark.parametrize(
    ("variant", "arch", "tile"),
    [
        ("sliding_window", "sm80", (64, 64, 4)),
        ("sliding_window", "sm86", (32, 128, 8)),  # has no room for two such blocks
        ("packed_documents", "sm80", (64, 128, 8)),  # whose values need registers
    ],
)
def test_windows_have_two_blocks_at_head_dim_128(variant: str, arch: str, tile: tuple[int, int, int]) -> None:
    made = mma(arch, 128, variant)
    own = made.structure
    assert isinstance(own, MmaBackward)
    assert (made.tile_m, made.tile_n, made.num_warps) == tile
    assert (own.blocks == 2) == (tile == (64, 64, 4))
    assert own.late_beside_s == (own.late_columns if own.blocks == 2 else own.late_columns // 2)


@pytest.mark.parametrize(("variant", "values"), [("packed_documents", 1), ("sliding_window", 0), ("allowed", 0)])
def test_the_mask_finds_values_of_queries_in_shared_memory(variant: str, values: int) -> None:
    made = mma("sm80", 64, variant)
    held = [region.bytes for region in made.structure.shared if region.name == "query_values"]
    assert held == ([2 * made.tile_m * 4] if values else [])
    assert ("values_ahead" in render(made).text) == bool(values)
    wide = mma("sm80", 128, variant)
    assert ("values_of_keys" in render(wide).text) == bool(values)
    assert "values_ahead" not in render(mma("sm86", 128, variant)).text  # 32 queries


@pytest.mark.parametrize("deterministic", ["true", "false"])
def test_tensors_are_searched_before_the_steps(deterministic: str) -> None:
    fields = {"arch": "sm80", "head_dim": 128, "deterministic": deterministic, **BACKWARD}
    text = render(planned("packed_documents", **fields)).text  # type: ignore[arg-type]
    assert text.count("= first_at_least_by_warp(") == 1
    assert text.index("= first_at_least_by_warp(") < text.index("const auto next_step = ")
