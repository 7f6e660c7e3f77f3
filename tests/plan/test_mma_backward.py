"""Plans of the backward by mma.sync: tiles within the budgets of each card, warps, and bank conflicts of P and dS."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from attngen.arch import ARCHES
from attngen.dtypes import HEAD_DIMS
from attngen.errors import PlanError
from attngen.plan import Plan, plan
from attngen.plan.schedules.mma_backward import SCHEDULE
from attngen.plan.schedules.structures import MmaBackward
from attngen.render import render
from tests.plan.specs import kernel_spec, planned
from tests.plan.test_mma_forward import CARDS, conflicts, swizzled

BACKWARD: Mapping[str, object] = {"backend": None, "passes": "backward", "backward": "{backend: cuda}"}


def mma(arch: str, head_dim: object, variant: str = "causal") -> Plan:
    return planned(variant, **{"arch": arch, "head_dim": head_dim, **BACKWARD})  # type: ignore[arg-type]


@pytest.mark.parametrize("arch", CARDS)
@pytest.mark.parametrize("head_dim", [*HEAD_DIMS, "{qk: 192, v: 128}", "{qk: 40, v: 24}"])
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
