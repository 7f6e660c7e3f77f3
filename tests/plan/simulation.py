"""Building blocks of the models of barriers: barriers, rings of stages, and a run of roles in any order.

Roles are generators that follow the templates line by line: each yields the condition that it waits for. The simulation
lets any role run whose condition holds, so that a run is one of the interleavings that a GPU may choose. A barrier in
shared memory is what PTX says: it counts phases, and a wait sees only their parity, so that one who comes two phases
late waits for the wrong one. A consumer has two warps, the leader that arrives for all, and another; products, named
barriers and nothing else keep them together. Copies land some time after they were issued.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

from attngen.plan import pipes

Condition = Callable[[], bool]
Role = Iterator[Condition]

WARPS = 2  # of a consumer: the leader, and one for the others


class ProtocolError(Exception):
    """The protocol is wrong: all roles wait, or one reads what is not there."""


@dataclass
class Barrier:
    """An mbarrier: ``count`` arrivals complete a phase."""

    count: int
    arrived: int = 0
    phases: int = 0

    def arrive(self) -> None:
        self.arrived += 1
        if self.arrived == self.count:
            self.arrived, self.phases = 0, self.phases + 1

    def done(self, parity: int) -> Condition:
        return lambda: self.phases % 2 != parity


@dataclass
class Named:
    """A named barrier over a number of warps, of which some only arrive."""

    count: int
    arrived: int = 0
    generation: int = 0

    def arrive(self) -> None:
        self.arrived += 1
        if self.arrived == self.count:
            self.arrived, self.generation = 0, self.generation + 1

    def sync(self) -> Role:
        awaited = self.generation + 1
        self.arrive()
        yield lambda: self.generation >= awaited


def barriers(signal: pipes.Signal | None, count: int) -> list[Barrier]:
    """Return so many barriers, for which the bytes of a copy count as one more arrival."""
    return [Barrier(signal.arrivals + signal.bytes) for _ in range(count)] if signal else []


def named(declared: pipes.Pipes, name: str) -> list[Named]:
    """Return the named barriers of a group; none if it is not declared."""
    matching = (one for one in declared.named if one.name == name)
    return [Named(one.threads // 128 * WARPS) for one in matching for _ in range(one.count)]


@dataclass
class Ring:
    """Stages with their barriers, as a schedule declares them."""

    declared: pipes.Ring
    full: list[Barrier] = field(init=False)
    empty: list[Barrier] = field(init=False)
    holds: list[object] = field(init=False)

    def __post_init__(self) -> None:
        self.full = barriers(self.declared.full, self.stages)
        self.empty = barriers(self.declared.empty, self.stages)
        self.holds = [None] * self.stages

    @property
    def stages(self) -> int:
        """Number of stages."""
        return self.declared.stages


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
