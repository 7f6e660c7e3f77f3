"""The pipes of a kernel as values: writers and readers of shared memory in a block, and the barriers between them.

A schedule declares them once. Shared memory, the constants and the initialization of the kernels, ``attngen explain``
and the tables of docs/schedules all come from that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from attngen.plan.model import Region, Role

BARRIER_BYTES = 8  # an mbarrier
WARPGROUP = 4  # warps

#: Floats of a partial result beside its columns: row max and row sum of a warp and of a block, and padding
#: between rows (split.cuh).
ROW_PADDING = 8


@dataclass(frozen=True, slots=True)
class Signal:
    """Completion of a phase of a barrier: the number of ``arrivals``, ``by`` whom, and what the reader then knows."""

    arrivals: int
    by: str
    says: str
    bytes: bool = False  # an arrival announces bytes of copies, which must land, too

    @property
    def sources(self) -> str:
        """Arriving warps or threads, in words."""
        return f"{self.by}, and the bytes of the copy" if self.bytes else self.by


@dataclass(frozen=True, slots=True)
class Barrier:
    """``count`` barriers side by side in shared memory, one for each stage."""

    name: str
    count: int
    signal: Signal

    @property
    def bytes(self) -> int:
        """Bytes of shared memory that they take."""
        return self.count * BARRIER_BYTES


@dataclass(frozen=True, slots=True)
class Ring:
    """Stages that the ``writers`` fill and the ``readers`` empty. ``stored`` names what lies in each, with its bytes.

    A side that needs no barrier has None: ``guards`` says why.
    """

    name: str
    stages: int
    writers: str
    readers: str
    guards: str
    full: Signal | None = None
    empty: Signal | None = None
    stored: tuple[tuple[str, int], ...] = ()
    alternates: bool = False  # double-buffered by design: its stages are not a choice of the plan
    count: int = 1  # of such rings, one for each reader, one after the other
    joined: bool = False  # stages of all of them are numbered through (own_rings.cuh)

    @property
    def barriers(self) -> tuple[Barrier, ...]:
        """Its barriers: ``NAME_full`` and ``NAME_empty``."""
        sides = (("full", self.full), ("empty", self.empty))
        return tuple(
            Barrier(f"{self.name}_{side}", self.count * self.stages, signal) for side, signal in sides if signal
        )


@dataclass(frozen=True, slots=True)
class Event:
    """A barrier that hands over no memory: something has happened."""

    name: str
    signal: Signal

    @property
    def barriers(self) -> tuple[Barrier, ...]:
        """Its one barrier."""
        return (Barrier(self.name, 1, self.signal),)


@dataclass(frozen=True, slots=True)
class NamedBarrier:
    """``count`` named barriers of the hardware from number ``first`` on; ``threads`` sync or arrive at each."""

    name: str
    first: int
    count: int
    threads: int
    guards: str


@dataclass(frozen=True, slots=True)
class Pipes:
    """All of a kernel, rings and events in the order in which their barriers lie in shared memory."""

    pipes: tuple[Ring | Event, ...]
    named: tuple[NamedBarrier, ...]
    roles: tuple[Role, ...]
    order: tuple[str, ...]  # of shared memory: what is stored, and ``barriers``; not every kernel has all of it
    others: tuple[tuple[str, int], ...] = ()  # regions of shared memory that no ring hands over, with their bytes

    def __post_init__(self) -> None:
        """Check that barriers of one name, or of one number, are declared once."""
        names = [barrier.name for barrier in self.barriers]
        numbers = [0, *(one.first + i for one in self.named for i in range(one.count))]  # 0 is __syncthreads
        for keys in (names, numbers):
            if len(set(keys)) < len(keys):
                raise ValueError(f"declared twice: {keys}")
        if max(numbers) > 15:
            raise ValueError(f"a block has 16 named barriers, not {max(numbers) + 1}")
        stored = {name for ring in self.rings for name, _ in ring.stored} | {name for name, _ in self.others}
        if lost := stored - set(self.order):
            raise ValueError(f"no place in shared memory: {lost}")
        for group in {role.first // WARPGROUP for role in self.roles}:  # setmaxnreg is of a whole warpgroup
            counts = {role.registers for role in self.roles if role.first // WARPGROUP == group}
            if len(counts) > 1:
                raise ValueError(f"threads of one warpgroup have the same registers, not {sorted(counts)}")
        threads = 32 * sum(role.warps for role in self.roles)
        asked, reserved = sum(32 * role.warps * role.registers for role in self.roles), 65536 // threads // 8 * 8
        if asked > threads * reserved:
            raise ValueError(f"roles ask for {asked} registers; a launch reserves {threads} x {reserved}")

    @property
    def rings(self) -> tuple[Ring, ...]:
        """The pipes that have stages."""
        return tuple(pipe for pipe in self.pipes if isinstance(pipe, Ring))

    @property
    def events(self) -> tuple[Event, ...]:
        """The pipes that hand over no memory."""
        return tuple(pipe for pipe in self.pipes if isinstance(pipe, Event))

    @property
    def barriers(self) -> tuple[Barrier, ...]:
        """The barriers in shared memory, in their order."""
        return tuple(barrier for pipe in self.pipes for barrier in pipe.barriers)

    def ring(self, name: str) -> Ring:
        """Return a ring by its name; KeyError if there is none."""
        return _find(self.rings, name)

    def barrier(self, name: str) -> Barrier:
        """Return the barriers of a name; KeyError if there are none."""
        return _find(self.barriers, name)

    def role(self, name: str) -> Role:
        """Return a role by its name; KeyError if there is none."""
        return _find(self.roles, name)

    @property
    def regions(self) -> tuple[Region, ...]:
        """The map of shared memory."""
        stored = {name: ring.count * ring.stages * size for ring in self.rings for name, size in ring.stored} | dict(
            self.others
        )
        sizes = {name: [(name, size)] for name, size in stored.items()}
        sizes["barriers"] = [(barrier.name, barrier.bytes) for barrier in self.barriers]
        offset, regions = 0, []
        for region, size in (entry for name in self.order for entry in sizes.get(name, ())):
            regions.append(Region(region, offset, size))
            offset += size
        return tuple(regions)


_One = TypeVar("_One", Ring, Barrier, Role)


def _find(declared: tuple[_One, ...], name: str) -> _One:
    for one in declared:
        if one.name == name:
            return one
    raise KeyError(name)
