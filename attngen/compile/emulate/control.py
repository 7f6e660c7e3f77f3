"""The control flow of a program, and where diverging paths meet again."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

#: The place after the end of a program.
END = -1


class Control:
    """The paths through a program, each step of which may jump to a target, and may fall through to the next step."""

    def __init__(self, steps: Sequence[tuple[int | None, bool]]) -> None:
        self._following: list[tuple[int, ...]] = []
        self._found: dict[int, tuple[int, set[int]]] = {}
        for place, (target, falls) in enumerate(steps):
            following = (place + 1,) if falls and place + 1 < len(steps) else ()
            self._following.append(following if target is None else (target, *following))

    def around(self, place: int) -> tuple[int, set[int]]:
        """Return where all paths from a place first meet, which may be the end, and the steps between."""
        if place not in self._found:
            self._found[place] = self._around(place)
        return self._found[place]

    def _around(self, place: int) -> tuple[int, set[int]]:
        meeting = self._meeting(place)
        between: set[int] = set()
        ahead = list(self._following[place])
        while ahead:
            step = ahead.pop()
            if step not in (END, meeting) and step not in between:
                between.add(step)
                ahead += self._following[step]
        return meeting, between

    def _meeting(self, place: int) -> int:
        own = self._passed[place] & ~(1 << place)
        for other in range(len(self._following)):
            if own >> other & 1 and self._passed[other] == own:
                return other
        return END

    @cached_property
    def _passed(self) -> list[int]:
        """For each step, as bits: its postdominators, the steps on every path from it to the end, itself included."""
        count = len(self._following)
        passed = [(1 << count) - 1] * count
        changed = True
        while changed:
            changed = False
            for place in range(count - 1, -1, -1):
                common = (1 << count) - 1
                for other in self._following[place]:
                    common &= 0 if other == END else passed[other]
                if not self._following[place]:
                    common = 0
                common |= 1 << place
                if common != passed[place]:
                    passed[place], changed = common, True
        return passed
