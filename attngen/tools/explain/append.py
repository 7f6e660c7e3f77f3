"""The plan of a kernel that appends to caches, in words."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attngen.dtypes import CHUNK_BYTES
from attngen.formats import APPEND
from attngen.plan.model import Plan
from attngen.schema import load_spec
from attngen.tools.build.pipeline import plans as plans_of


@dataclass(frozen=True, slots=True)
class AppendExplanation:
    """The plan of a kernel that appends, and what its explanation says."""

    plan: Plan

    def facts(self) -> list[tuple[str, str]]:
        """Return label and text of each line, for people."""
        plan = self.plan
        vectors = plan.threads * CHUNK_BYTES // plan.operands.k.bytes
        return [
            ("does", "writes new keys and values into pages or dense caches; rotates keys and queries on the way"),
            ("target", f"{plan.arch_name}, {plan.dtype_name}, {plan.direction}"),
            ("head_dim", f"any whose rows are multiples of {CHUNK_BYTES} B; those of this spec up to {self._widest()}"),
            ("block", f"{plan.threads} threads of {CHUNK_BYTES} B each: {vectors} numbers of a row of K, V or Q"),
            ("loads", f"by pointers; strides and addresses are multiples of {plan.alignment} B"),
            ("grid", "one block for as many rows of tokens and heads as it holds"),
        ]

    def _widest(self) -> str:
        qk, v = self.plan.head_dim_qk, self.plan.head_dim_v
        return str(qk) if qk == v else f"{qk} for q and k, {v} for v"

    def to_dict(self) -> dict[str, Any]:
        """The document of ``attngen explain --json``."""
        return {"plan": self.plan.to_dict(), "facts": dict(self.facts())}


def explain_appends(spec: str | Path, kernel: str | None = None) -> list[AppendExplanation]:
    """Explain the kernels of a spec that append to caches, or those whose name contains ``kernel``.

    Raises SpecError if the spec is wrong.
    """
    plans = (plan for _, plan in plans_of(load_spec(spec)) if plan.direction == APPEND)
    return [AppendExplanation(plan) for plan in plans if kernel is None or kernel in plan.name]
