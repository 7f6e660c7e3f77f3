"""The explanation of kernels whose blocks take ranges of a list of tiles of keys, and merge partial results."""

from __future__ import annotations

from dataclasses import dataclass

from attngen.parts.explained.base import ScheduleExplanation


@dataclass(frozen=True, slots=True)
class RangesExplanation(ScheduleExplanation):
    """The explanation of such a kernel by its structure."""

    def facts(self) -> dict[str, list[str]]:
        """Return lines by label, for people."""
        structure, limit = self.plan.structure, self.plan.arch.shared_memory
        return {
            "roles": [
                f"{role.name:10s} {role.warps} warps, {role.registers} registers a thread"
                for role in structure.warp_roles
            ],
            "shared memory": [
                f"{structure.shared_bytes} B of {limit} B; offset, bytes and what is there:",
                *(f"{r.offset:6d} {r.bytes:6d}  {r.name:10s} {self.holds(r.name)}" for r in structure.shared),
            ],
        }

    def grid(self, side_by_side: str) -> str:
        """The work of each block."""
        del side_by_side
        blocks = self.plan.launch(self.plan.main).cluster
        return (
            f"persistent: a block for each multiprocessor, or clusters of {blocks} where a "
            f"sequence has more than {self.plan.tile_m} rows; whole items of rows first, then equal ranges of the "
            "tiles that are left, whose partial results a second launch merges"
        )
