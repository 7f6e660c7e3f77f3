"""Kernels by mma.sync, compiled for each card: products, fragments, spills."""

from __future__ import annotations

import pytest

from attngen.compile import compile_source
from attngen.compile.inspect import count_instructions
from attngen.families.mma_backward.structure import MmaBackward
from attngen.families.mma_forward.structure import MmaForward
from attngen.plan import Plan
from attngen.plan.allowances import MMA_BACKWARD_SPILLS, MMA_SPILLS
from attngen.render import render
from tests.families.decode.test_mma_decode import planned as split
from tests.plan.specs import planned
from tests.sampling import few

BACKWARD = {"passes": "backward", "backward": None}
KERNELS = (
    ("sm80", {"head_dim": 128, **BACKWARD}),
    ("sm86", {"head_dim": 96, **BACKWARD}),
    ("sm86", {"head_dim": 72, "layout": "paged"}),
    ("sm89", {"head_dim": 128}),
    ("sm120a", {"head_dim": 224, "dtype": "fp16", "layout": "varlen"}),
)


def columns_of(columns: int, warps: int) -> int:
    """Columns of each of some warps: whole products of 16."""
    return -(-columns // (16 * warps)) * 16


def backward_counts(plan: Plan, own: MmaBackward) -> tuple[int, int]:
    """Products and loads of fragments of a step of a backward."""
    query_warps = 32 * plan.num_warps // plan.tile_n
    queries, depth = plan.tile_m // query_warps // 16, (own.columns_qk + own.columns_v) // 16
    columns = columns_of(own.columns_qk, query_warps) + columns_of(own.columns_v, query_warps)
    of_dq = columns_of(own.columns_qk, 32 * plan.num_warps // plan.tile_m)
    products = depth * 4 * queries + plan.tile_m // 16 * columns // 4 + plan.tile_n // 16 * of_dq // 4
    # a warp has P and dS of its own queries in registers
    of_others = 2 * 2 * (plan.tile_m // 16 - queries)
    fragments = (
        depth * (2 + queries) + plan.tile_m // 16 * columns // 16 + of_others + plan.tile_n // 16 * (2 + of_dq // 16)
    )
    return products, fragments


def expected(plan: Plan) -> tuple[int, int]:
    """Products and loads of fragments that a kernel has: one loop, and no copy of it."""
    own = plan.structure
    if isinstance(own, MmaBackward):
        return backward_counts(plan, own)
    assert isinstance(own, MmaForward)
    columns, keys, blocks = own.columns_qk // 16, plan.tile_n // 16, own.row_blocks
    fragments = columns * (blocks + keys) + keys * own.columns_v // 16
    return 2 * blocks * keys * (columns + own.columns_v // 16), fragments


@pytest.mark.exhaustive
@few(("arch", "fields"), KERNELS, always=1, often=range(0, 99, 2))
def test_the_cubin_of_a_card_is_as_planned(arch: str, fields: dict[str, object]) -> None:
    plan = planned("causal", **{"arch": arch, "backend": None, **fields})  # type: ignore[arg-type]
    artifact = compile_source(plan, render(plan))
    assert artifact.manifest["arch"] == arch
    most = MMA_BACKWARD_SPILLS if plan.direction == "backward" else MMA_SPILLS
    assert artifact.manifest["resources"]["spills"] <= most.bytes
    products, fragments = expected(plan)
    assert count_instructions(artifact.cubin, "HMMA") == products
    assert count_instructions(artifact.cubin, "LDSM") == fragments
    assert count_instructions(artifact.cubin, "LDGSTS") > 0


@pytest.mark.exhaustive
@few(
    ("arch", "entry", "instructions"),
    [
        ("sm80", "dtype: bf16", {"LDGSTS": 1, "ARRIVES": 1}),
        ("sm120a", "kv_dtype: fp8_e4m3", {"LDGSTS": 1, "ARRIVES": 1}),
    ],
    always=(1,),
)
def test_split_kv_kernels_copy_without_tma(arch: str, entry: str, instructions: dict[str, int]) -> None:
    plan = split(f"variant: causal, {entry}", arch)
    artifact = compile_source(plan, render(plan))
    assert artifact.manifest["resources"]["spills"] == 0
    for name, least in instructions.items():
        assert count_instructions(artifact.cubin, name) >= least, name
    assert count_instructions(artifact.cubin, "UTMALDG") == 0


@few("arch", ["sm89", "sm120a"], always=0)
def test_products_of_8_bits(arch: str) -> None:
    plan = planned("causal", arch=arch, backend=None, dtype="fp8_e4m3", head_dim=128)
    artifact = compile_source(plan, render(plan))
    own = plan.structure
    assert isinstance(own, MmaForward)
    assert artifact.manifest["resources"]["spills"] <= MMA_SPILLS.bytes
    columns, keys, blocks = own.columns_qk // 32, plan.tile_n // 16, own.row_blocks
    of_k, of_v = 2 * blocks * keys * columns, blocks * keys * own.columns_v // 16
    assert count_instructions(artifact.cubin, "QMMA") == of_k + of_v
    assert count_instructions(artifact.cubin, "LDSM") == columns * (blocks + keys) + keys // 2 * own.columns_v // 16
