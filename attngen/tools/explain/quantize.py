"""The plan of a kernel that quantizes, in words."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attngen.dtypes import CHUNK_BYTES
from attngen.formats import QUANTIZE
from attngen.plan.model import Plan
from attngen.schema import load_spec
from attngen.tools.build.pipeline import plans as plans_of


@dataclass(frozen=True, slots=True)
class QuantizeExplanation:
    """The plan of a kernel that quantizes, and what its explanation says."""

    plan: Plan

    def facts(self) -> list[tuple[str, str]]:
        """Return label and text of each line, for people."""
        plan = self.plan
        if plan.loads == "descriptor":
            return self._facts_of_tiles()
        return [
            ("does", "rounds Q, K and V to 8 bits and finds their scales; rotates and transforms rows of Q and K"),
            ("target", f"{plan.arch_name}, {plan.dtype_name}, {plan.direction}"),
            ("head_dim", f"any multiple of {CHUNK_BYTES // plan.operands.q.bytes} up to 256"),
            ("block", f"some rows of a head; a thread has {4 * CHUNK_BYTES} B, up to {plan.threads} threads"),
            ("loads", f"by pointers; strides and addresses are multiples of {plan.alignment} B"),
            ("launches", "1 with a scale for each block of tokens; else 2, which find the largest numbers and round"),
            ("moves", f"{plan.operands.q.bytes} B of a number in, 1 B out; with 2 launches twice the former"),
        ]

    def _facts_of_tiles(self) -> list[tuple[str, str]]:
        plan = self.plan
        return [
            (
                "does",
                "rounds Q, K and V to 8 bits and finds scales but those of tensors; rotates and transforms Q and K",
            ),
            ("target", f"{plan.arch_name}, {plan.dtype_name}, {plan.direction}"),
            ("head_dim", str(plan.head_dim_qk)),
            (
                "tile",
                f"{plan.tile_m} tokens of {128 // plan.head_dim_qk} heads, for {plan.num_warps // 4} groups of 4 warps",
            ),
            (
                "loads",
                f"by the copy engine, {plan.stages} tiles of a group at a time; {plan.launches[0].shared_bytes} B",
            ),
            ("launches", "1; with rotation 2 for scales of tokens and 3 for those of heads, of which V has one"),
            ("moves", f"{plan.operands.q.bytes} B of a number in, 1 B out"),
        ]

    def to_dict(self) -> dict[str, Any]:
        """The document of ``attngen explain --json``."""
        return {"plan": self.plan.to_dict(), "facts": dict(self.facts())}


def explain_quantizers(spec: str | Path, kernel: str | None = None) -> list[QuantizeExplanation]:
    """Explain the kernels of a spec that quantize, or those whose name contains ``kernel``.

    Raises SpecError if the spec is wrong.
    """
    plans = (plan for _, plan in plans_of(load_spec(spec)) if plan.direction == QUANTIZE)
    return [QuantizeExplanation(plan) for plan in plans if kernel is None or kernel in plan.name]
