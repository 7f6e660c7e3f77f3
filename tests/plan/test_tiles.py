"""Tiles: within the shared memory of every arch, kept where the spec fixes them, cut into power-of-two columns."""

from __future__ import annotations

import re

import pytest

from attngen.arch import ARCHES
from attngen.dtypes import dtype
from attngen.errors import PlanError
from attngen.families.triton.tiles import columns, gradient_columns
from attngen.parts.columns import padded_width
from attngen.plan.budget import shared_memory
from tests.plan.specs import planned
from tests.sampling import few

HEAD_DIMS = range(8, 257, 8)
BF16 = dtype("bf16")
TRITON = {"forward": {"backend": "triton"}, "backward": {"backward": "{backend: triton}"}}


def memory_of(plan):  # type: ignore[no-untyped-def]
    return shared_memory(
        tile_m=plan.tile_m,
        tile_n=plan.tile_n,
        stages=plan.stages,
        width_qk=padded_width(plan.columns_qk),
        width_v=padded_width(plan.columns_v),
        kept_bytes=plan.kept_bytes,
        operands=plan.operands,
    )


@few("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("arch", ARCHES)
def test_every_head_dim_has_a_tile_that_fits(arch: str, dtype: str) -> None:
    for head_dim in HEAD_DIMS:
        plan = planned(arch=arch, dtype=dtype, head_dim=head_dim)
        assert memory_of(plan).total <= plan.arch.shared_memory, plan.name
        assert plan.tile_m >= 16
        assert plan.tile_n >= 16
        assert plan.stages >= 1
        assert plan.loads == ("descriptor" if plan.arch.descriptors else "pointer")


def test_a_tile_that_the_spec_fixes_is_kept() -> None:
    plan = planned(tile="{m: 128, n: 32}", pipeline="{stages: 4}", warps=8)
    assert (plan.tile_m, plan.tile_n, plan.stages, plan.num_warps, plan.threads) == (128, 32, 4, 8, 256)


def test_stages_are_given_up_before_keys() -> None:
    plan = planned(arch="sm86", head_dim=256, tile="{m: 128}")
    assert plan.tile_m == 128
    free = planned(arch="sm80", head_dim=256, tile="{m: 128}")
    assert (plan.stages, plan.tile_n) < (free.stages, free.tile_n)
    assert memory_of(plan).total <= 99 * 1024


def test_keys_are_given_up_where_the_stages_are_fixed() -> None:
    plan = planned(head_dim=256, pipeline="{stages: 8}")
    assert plan.stages == 8
    assert memory_of(plan).total <= 227 * 1024


def test_a_fixed_tile_that_does_not_fit_is_refused_with_its_sum() -> None:
    with pytest.raises(PlanError) as caught:
        planned(head_dim=256, tile="{m: 256, n: 128}")
    message = str(caught.value)
    assert message.startswith("test.yaml:7: tile: ")
    total, limit = map(int, re.findall(r"(\d+) B exceeds (\d+) B on sm90a", message)[0])
    q, stages, k, v = map(int, re.findall(r"Q (\d+) \+ (\d+) stages x \(K (\d+) \+ V (\d+)\)", message)[0])
    assert limit == 227 * 1024
    assert total == q + stages * (k + v) > limit
    assert (q, k, v) == (256 * 256 * 2, 128 * 256 * 2, 128 * 256 * 2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tile": "{m: 48}"}, r"tile\.m: 48 is not one of 16, 32, 64, 128, 256; nearest: (32|64)"),
        ({"tile": "{n: 512}"}, r"tile\.n: 512 is not one of .*; nearest: 256"),
        ({"warps": 3}, r"3 is not one of 1, 2, 4, 8, 16; nearest: (2|4)"),
        ({"pipeline": "{stages: 9}"}, r"pipeline\.stages: 9 is not one of .*; nearest: 8"),
        ({"head_dim": 20}, r"head_dim 20 is not a multiple of 8 from 8 to 256; nearest: 24"),
        ({"head_dim": 73}, r"head_dim 73 .* nearest: 72"),
        ({"head_dim": 272}, r"no forward of head dims beyond 256; allowed: head_dim 256"),
        ({"head_dim": "{qk: 64, v: 4}"}, r"head_dim 4 .* nearest: 8"),
    ],
)
def test_sizes_that_do_not_exist_are_refused_with_the_nearest(fields: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        planned(**fields)


@few("head_dim", HEAD_DIMS, always=range(0, 999, 4))
def test_columns_are_powers_of_two_that_cover_the_head_dim(head_dim: int) -> None:
    blocks = columns(head_dim, BF16)
    assert len(blocks) <= 2
    assert sum(block.used for block in blocks) == head_dim
    start = 0
    for block in blocks:
        assert block.start == start
        assert block.width & (block.width - 1) == 0
        assert block.width >= 16
        assert 0 < block.used <= block.width
        start += block.width
    # those of the next multiple of 16, which a product is deep, or fewer
    assert padded_width(blocks) <= padded_width(columns(-(-head_dim // 16) * 16, BF16))
    assert padded_width(blocks) < (head_dim + 8) * 1.4


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_columns_of_a_backward_bring_no_padding_alone(head_dim: int) -> None:
    """A copy has 64 columns at most; one that lay wholly after the head dim would be that of nobody's memory."""
    blocks = gradient_columns(head_dim, BF16, wgmma=True)
    if head_dim % 16 == 0:
        assert blocks == columns(head_dim, BF16)
    else:
        assert min(block.width for block in blocks) >= 32
    assert gradient_columns(head_dim, BF16, wgmma=False) == columns(head_dim, BF16)
    assert sum(block.used for block in blocks) == head_dim
    assert [block.start for block in blocks] == [0, *(block.width for block in blocks[:-1])]
    for block in blocks:
        assert block.width & (block.width - 1) == 0
        for first in range(0, block.width, 64):
            assert block.start + first < head_dim


def test_columns_by_example() -> None:
    widths = {d: tuple(block.width for block in columns(d, BF16)) for d in (64, 80, 96, 112, 128, 192, 208)}
    assert widths == {64: (64,), 80: (64, 16), 96: (64, 32), 112: (128,), 128: (128,), 192: (128, 64), 208: (256,)}
    widths = {d: tuple(block.width for block in columns(d, BF16)) for d in (8, 24, 40, 56, 72, 88, 104, 136, 248)}
    assert widths == {
        8: (16,), 24: (32,), 40: (32, 16), 56: (64,), 72: (64, 16), 88: (64, 32), 104: (128,), 136: (128, 16),
        248: (256,),
    }  # fmt: skip


@few(
    ("arch", "precision"),
    [("sm80", "tf32x3"), ("sm89", "tf32x3"), ("sm90a", "bf16x6"), ("sm100a", "bf16x6"), ("sm120a", "tf32x3")],
    always=range(0, 999, 3),
)
@pytest.mark.parametrize("passes", ["forward", "backward"])
def test_float32_is_multiplied_in_parts(arch: str, precision: str, passes: str) -> None:
    for head_dim in HEAD_DIMS:
        plan = planned(arch=arch, dtype="fp32", head_dim=head_dim, passes=passes)
        assert plan.dot_precision == precision
        assert padded_width(plan.columns_qk) >= head_dim == sum(block.used for block in plan.columns_qk)
        if precision == "tf32x3":
            assert len(plan.columns_qk) <= 4
            assert all(block.width <= 64 for block in plan.columns_qk)
    assert planned(arch=arch, dtype="fp32", fast_math="false", passes=passes).dot_precision == "ieee"
    assert planned(arch=arch, dtype="bf16", passes=passes, **TRITON[passes]).dot_precision is None
