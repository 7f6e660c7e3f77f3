"""Kernels by mma.sync, compiled for each card: products, fragments, spills."""

from __future__ import annotations

import pytest

from attngen.compile import compile_source
from attngen.compile.inspect import count_instructions
from attngen.plan import Plan
from attngen.plan.allowances import MMA_SPILLS
from attngen.plan.schedules.structures import MmaBackward, MmaForward
from attngen.render import render
from tests.plan.specs import planned

KERNELS = {
    "sm80": {"head_dim": 64, "passes": "backward", "backward": None},
    "sm86": {"head_dim": 72, "layout": "paged"},
    "sm89": {"head_dim": 128},
    "sm120a": {"head_dim": 256, "dtype": "fp16", "layout": "varlen"},
}


def expected(plan: Plan) -> tuple[int, int]:
    """Products and loads of fragments that a kernel has: one loop, and no copy of it."""
    own = plan.structure
    if isinstance(own, MmaBackward):
        warps, rows = plan.num_warps // own.dq_rows, plan.tile_m
        dq_columns, depth = max(own.columns_qk // warps, 16), plan.tile_n // 16
        by_rows = (own.columns_qk + own.columns_v) // 16  # S and dP: steps of 16 columns
        by_columns = rows // 16 * (own.columns_qk + own.columns_v) // 16  # dK and dV
        products = by_rows * rows // 8 + 2 * by_columns + depth * dq_columns // 8
        return products, by_rows * (1 + rows // 16) + by_columns + depth * (1 + dq_columns // 16)
    assert isinstance(own, MmaForward)
    columns, keys, blocks = own.columns_qk // 16, plan.tile_n // 16, own.row_blocks
    fragments = columns * (blocks + keys) + keys * own.columns_v // 16
    return 2 * blocks * keys * (columns + own.columns_v // 16), fragments


@pytest.mark.parametrize("arch", KERNELS)
def test_the_cubin_of_a_card_is_as_planned(arch: str) -> None:
    plan = planned("causal", **{"arch": arch, "backend": None, **KERNELS[arch]})  # type: ignore[arg-type]
    artifact = compile_source(plan, render(plan))
    assert artifact.manifest["arch"] == arch
    assert artifact.manifest["resources"]["spills"] <= MMA_SPILLS.bytes
    products, fragments = expected(plan)
    assert count_instructions(artifact.cubin, "HMMA") == products
    assert count_instructions(artifact.cubin, "LDSM") == fragments
    assert count_instructions(artifact.cubin, "LDGSTS") > 0
