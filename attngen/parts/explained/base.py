"""The explanation of a schedule, beside that of any plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

from attngen.parts.explained.floor import HeadFloor, floor_lines
from attngen.parts.floors import Floor
from attngen.plan.catalogue import named
from attngen.plan.model import Launch, Plan
from attngen.plan.pipes import Pipes


@dataclass(frozen=True, slots=True)
class ScheduleExplanation:
    """The explanation of a schedule that adds nothing; one that does names a subclass in its ``Schedule``.

    ``floor`` is that of a step, and ``heads`` those of heads of some lengths, where the rates of the chip are known.
    """

    plan: Plan
    pipes: Pipes | None = None
    floor: Floor | None = None
    heads: tuple[HeadFloor, ...] = ()

    def facts(self) -> dict[str, list[str]]:
        """Return lines by label, for people: ``roles``, ``registers``, ``shared memory`` and ``steps``, as far as there
        is something to say."""
        return {}

    def grid(self, side_by_side: str) -> str:
        """The work of each block; ``side_by_side`` describes the order."""
        return f"ceil(seqlen_q / {self.plan.tile_m}) x heads x batch blocks; {side_by_side}"

    def launch(self, launch: Launch) -> list[str]:
        """Lines on one launch, its purpose first."""
        return [f"blocks: {launch.grid}"]

    def holds(self, region: str) -> str:
        """Contents of a region of shared memory."""
        for ring in self.pipes.rings if self.pipes else ():
            for name, size in ring.stored:
                if name == region:
                    return f"{ring.stages} {'stages' if ring.stages > 1 else 'stage'} of {size} B"
        return "barriers, 8 B each" if region not in dict(self.pipes.others if self.pipes else ()) else ""

    def to_dict(self) -> dict[str, Any]:
        """Return its entries of the JSON form."""
        return {}

    def floor_lines(self) -> Iterator[str]:
        """Yield the floor, for people."""
        if self.floor is not None:
            yield from floor_lines(self.plan, self.floor, self.heads)


def explanation_of(plan: Plan) -> ScheduleExplanation:
    """Return the explanation of a plan by its schedule."""
    schedule = named(plan.schedule)
    explanation: ScheduleExplanation = resolve_name(schedule.explanation)(
        plan, schedule.pipes(plan) if schedule.pipes else None
    )
    return explanation
