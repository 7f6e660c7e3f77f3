"""Silent losses of speed in Hopper kernels, read from the log of ptxas: spills and serialized wgmma."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attngen.compile.inspect import Resources
from attngen.errors import ChoiceError

if TYPE_CHECKING:
    from attngen.plan.model import Plan


def require_fast(plan: Plan, name: str, resources: Resources, max_spills: int) -> None:
    """Raise ChoiceError for a kernel that spills more than ``max_spills`` bytes a thread, or whose wgmma ptxas
    serialized, unless its spec allows that."""
    spills = resources.spills > max_spills and "spill" not in plan.allow
    serialized = resources.serialized_wgmma and "serialized_wgmma" not in plan.allow
    if not spills and not serialized:
        return
    costs = [f"{resources.spills} B of spills at {resources.registers} registers"] if spills else []
    costs += ["ptxas serialized wgmma, so that tensor cores wait for each other"] if serialized else []
    allow = ", ".join((["spill"] if spills else []) + (["serialized_wgmma"] if serialized else []))
    raise ChoiceError(
        f"{name}: {'; '.join(costs)}\n"
        f"  the spec may leave tile, stages and warps to the plan, or say 'allow: [{allow}]'",
        slow=(bool(serialized), resources.spills if spills else 0),
    )
