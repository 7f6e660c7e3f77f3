"""The plan of a kernel that widens caches, in words."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attngen.formats import WIDEN
from attngen.plan.model import Plan
from attngen.schema import load_spec
from attngen.tools.build.pipeline import plans as plans_of


@dataclass(frozen=True, slots=True)
class WidenExplanation:
    """The plan of a kernel that widens caches, and what its explanation says."""

    plan: Plan

    def facts(self) -> list[tuple[str, str]]:
        """Return label and text of each line, for people."""
        plan = self.plan
        wide, narrow = plan.operands.q.bytes, plan.operands.k.bytes
        return [
            ("does", f"writes the used keys and values of a cache in 8 bits in {plan.dtype_name}, times their scales"),
            ("target", f"{plan.arch_name}, {plan.dtype_name}, {plan.direction}"),
            ("head_dim", "any multiple of 8"),
            ("block", f"{plan.threads} threads: keys or values of {plan.tile_n} tokens of a sequence, of all heads"),
            ("runs", "before an ordinary kernel, where a call has many queries"),
            ("moves", f"{narrow} B of a number in, {wide} B out"),
        ]

    def to_dict(self) -> dict[str, Any]:
        """The document of ``attngen explain --json``."""
        return {"plan": self.plan.to_dict(), "facts": dict(self.facts())}


def explain_wideners(spec: str | Path, kernel: str | None = None) -> list[WidenExplanation]:
    """Explain the kernels of a spec that widen caches, or those whose name contains ``kernel``.

    Raises SpecError if the spec is wrong.
    """
    plans = (plan for _, plan in plans_of(load_spec(spec)) if plan.direction == WIDEN)
    return [WidenExplanation(plan) for plan in plans if kernel is None or kernel in plan.name]
