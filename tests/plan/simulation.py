"""A run of roles in any order.

Roles are generators that follow the templates line by line: each yields the condition that it waits for. The simulation
lets any role run whose condition holds, so that a run is one of the interleavings that a GPU may choose. Copies land
some time after they were issued.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from random import Random

Condition = Callable[[], bool]
Role = Iterator[Condition]


class ProtocolError(Exception):
    """The protocol is wrong: all roles wait, or one reads what is not there."""


def all_landed(copies: Sequence[list[bool]]) -> Condition:
    """Return the condition that all of some copies have landed."""
    return lambda: all(landed for (landed,) in copies)


class Simulation:
    """Roles that are still at work. A model gives each a name in ``roles``."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.roles: dict[str, Role] = {}
        self.copies = 0
        self.waiting: dict[str, Condition] = {}

    def start(self, name: str, role: Role) -> None:
        """Let something begin that no role waits for at once."""
        self.roles[name] = role
        self.waiting[name] = next(role)

    def land(self, role: Role) -> None:
        """Let something begin that lands some time later."""
        self.copies += 1
        self.start(f"copy {self.copies}", role)

    def issue(self, effect: Callable[[], None]) -> list[bool]:
        """Issue a store, an addition or a copy, and return what says whether it has landed."""
        landed = [False]

        def land() -> Role:
            yield lambda: True
            effect()
            landed[0] = True

        self.land(land())
        return landed

    def run(self) -> None:
        """Run to the end; ProtocolError if that is not reached, or something else is read than was meant."""
        self.waiting = {name: lambda: True for name in self.roles}
        slowness = {name: self.random.choice((1, 5, 50)) for name in self.roles}
        while self.waiting:
            ready = [name for name, condition in self.waiting.items() if condition()]
            if not ready:
                raise ProtocolError(f"deadlock of {', '.join(self.waiting)}")
            (name,) = self.random.choices(ready, [1 / slowness.get(name, 5) for name in ready])
            try:
                self.waiting[name] = next(self.roles[name])
            except StopIteration:
                del self.waiting[name]
