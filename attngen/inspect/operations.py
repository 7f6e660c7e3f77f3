"""The plans of kernels that are not attention, in words."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from attngen.build.pipeline import plans as plans_of
from attngen.operations import OPERATIONS, operation_of
from attngen.plan.model import Plan
from attngen.schema import load_spec


@dataclass(frozen=True, slots=True)
class HelperExplanation:
    """The plan of such a kernel, and what its explanation says."""

    plan: Plan

    def facts(self) -> list[tuple[str, str]]:
        """Label and text of each line, for people."""
        does, *others = resolve_name(operation_of(self.plan.direction).facts)(self.plan)
        return [does, ("target", f"{self.plan.arch_name}, {self.plan.dtype_name}, {self.plan.direction}"), *others]

    def to_dict(self) -> dict[str, Any]:
        """The document of ``attngen explain --json``."""
        return {"plan": self.plan.to_dict(), "facts": dict(self.facts())}


def explain_helpers(spec: str | Path, kernel: str | None = None) -> list[HelperExplanation]:
    """Explain the kernels of a spec that are no attention, or those whose name contains ``kernel``.

    Raises SpecError if the spec is wrong.
    """
    plans = [plan for _, plan in plans_of(load_spec(spec)) if kernel is None or kernel in plan.name]
    return [
        HelperExplanation(plan)
        for operation in OPERATIONS
        if operation.facts
        for plan in plans
        if plan.direction in operation.directions
    ]
