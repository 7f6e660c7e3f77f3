"""The plan of a forward-mode derivative in words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from attngen.families.triton.jvp import TANGENTS
from attngen.parts.columns import padded_width
from attngen.parts.explained.base import ScheduleExplanation
from attngen.plan.budget import tangent_memory


@dataclass(frozen=True, slots=True)
class TangentExplanation(ScheduleExplanation):
    """The explanation of a derivative, which is one of two launches."""

    def facts(self) -> dict[str, list[str]]:
        """Return lines by label, for people."""
        return {"shared memory": list(self._memory())}

    def _memory(self) -> Iterator[str]:
        """Yield a line for each launch: its tile, and the operands in shared memory."""
        plan = self.plan
        for name, tangents in TANGENTS.items():
            launch = plan.launch(name)
            needed = tangent_memory(
                tile_m=launch.tile_m,
                tile_n=launch.tile_n,
                stages=launch.stages,
                width_qk=padded_width(plan.columns_qk),
                width_v=padded_width(plan.columns_v),
                kept_bytes=plan.kept_bytes,
                operands=plan.operands,
                moves_keys="k" in tangents,
            )
            yield (
                f"{', '.join(f'd{of}' for of in tangents):10s} {launch.tile_m} queries x {launch.tile_n} keys, "
                f"{launch.num_warps} warps; {needed.total} B of {plan.arch.shared_memory} B: {needed}"
            )
