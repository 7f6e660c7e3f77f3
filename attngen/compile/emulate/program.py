"""A program as steps over the registers of one thread, and the run of it.

The thread is the first of its warp, and the others are assumed to hold the same values: a vote gives its own predicate,
an exchange its own value, and a sum over the warp 32 times that. PTX and machine code are run alike, so that this
affects both in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from attngen.compile.emulate.control import END, Control
from attngen.compile.emulate.memory import Memory
from attngen.compile.emulate.values import UNKNOWN, Undecided, Unknown, merged

State = list[Any]


@dataclass(frozen=True, slots=True)
class Step:
    """One instruction: what it does to a state, and where the run goes on, if not at the next one."""

    run: Callable[[State], int | None]
    results: tuple[int, ...] = ()  # the places that it may write
    memory: str | None = None  # the memory that it may write
    target: int | None = None  # the step that it may jump to
    falls: bool = True  # whether the next one may follow


#: Slots of the state that are not registers: the Machine, and results that nobody reads.
MACHINE, NOWHERE = 0, 1

#: Branches that a run may take: many times those of the longest kernel on the short sequences of a launch.
MOST_BRANCHES = 20_000


class CannotDecide(Exception):  # noqa: N818
    """The emulation cannot tell what the program does; the message says why."""


class Product(NamedTuple):
    """One ``wgmma`` as it is issued: its shape, the descriptors of its operands, and how it uses them."""

    place: int  # in the program
    shape: str
    descriptors: tuple[int | None, ...]  # of both operands, or of the second, if the first is in registers
    transposed: tuple[bool, bool]
    adds: bool  # to its accumulators; else it overwrites them
    zeros: bool  # the accumulators are certainly 0, so that adding and overwriting are the same

    def same(self, other: Product) -> bool:
        """Whether two products multiply the same. A descriptor that holds unknown data is None."""
        adds = self if self.adds else other
        return self[1:4] == other[1:4] and (self.adds is other.adds or adds.zeros)

    def __str__(self) -> str:
        descriptors = ", ".join("data" if value is None else f"{value:#x}" for value in self.descriptors)
        transposed = "".join(f", {name} transposed" for name, is_so in zip("AB", self.transposed, strict=True) if is_so)
        return f"{self.shape}, {descriptors}{transposed}, {'adds to' if self.adds else 'overwrites'} its accumulators"


@dataclass
class Machine:
    """What a thread reads besides its registers, and the products that it issued."""

    special: dict[str, int]  # registers such as the index of its block
    parameters: bytes
    shared: Memory
    world: Memory
    local: Memory
    products: list[Product] = field(default_factory=list)


@dataclass
class Program:
    """Steps, the registers that they begin with, and the places of the products among them."""

    steps: list[Step]
    texts: list[str]
    initial: State
    products: list[int]
    reached: set[int] = field(default_factory=set)  # those that a run issued

    def run(self, machine: Machine) -> None:
        """Run to the end; what it issues is in ``machine.products``. Raises CannotDecide.

        Where a branch depends on data, the run continues where its two paths meet again, and what is written between
        becomes unknown. It ends where no product can follow.
        """
        state = self.initial.copy()
        state[MACHINE] = machine
        runs, place, branches = [step.run for step in self.steps], 0, MOST_BRANCHES
        while place != END:
            try:
                while True:
                    following = runs[place](state)
                    if following is None:
                        place += 1
                    else:
                        place = following
                        branches -= 1
                        if place == END:
                            break
                        if not branches:
                            raise CannotDecide(f"it does not end after {MOST_BRANCHES} branches")
            except Undecided:
                place = self._skip(place, state)
            except IndexError:
                raise CannotDecide(f"it leaves the code after: {self.texts[min(place, len(self.texts)) - 1]}") from None

    def _skip(self, place: int, state: State) -> int:
        """Return where the paths of a branch meet again, after what they may write was made unknown."""
        meeting, between = self.control.around(place)
        if any(product in between for product in self.products) or place in self.products:
            raise CannotDecide(f"it depends on data: {self.texts[place]}")
        for other in between:
            step = self.steps[other]
            for result in step.results:
                state[result] = UNKNOWN
            if step.memory is not None:
                getattr(state[MACHINE], step.memory).store(UNKNOWN, 4, [])
        return meeting

    @cached_property
    def control(self) -> Control:
        """The control flow of the steps."""
        return Control([(step.target, step.falls) for step in self.steps])


class Guard(NamedTuple):
    """The predicate under which a step is taken."""

    slot: int
    wanted: bool


Compute = Callable[..., Any]


def assign(compute: Compute, sources: Sequence[int], results: Sequence[int], guard: Guard | None = None) -> Step:
    """Return a step that assigns ``compute`` of the sources to the results; they become unknown if it is undecided.

    ``compute`` returns one value for one result, a sequence for several. Under an unknown guard, a result is either its
    old or its new value.
    """
    if len(results) == 1:
        run = _assign_one(compute, sources, results[0])
    else:
        run = _assign_several(compute, sources, tuple(results))
    if guard is None:
        return Step(run, tuple(results))
    slot, wanted = guard

    def guarded(state: State) -> None:
        holds = state[slot]
        if holds is wanted:
            run(state)
        elif holds is UNKNOWN:
            before = [state[result] for result in results]
            run(state)
            for result, value in zip(results, before, strict=True):
                state[result] = merged(value, state[result])

    return Step(guarded, tuple(results))


def _assign_one(compute: Compute, sources: Sequence[int], result: int) -> Callable[[State], None]:
    if len(sources) == 2:
        first, second = sources

        def binary(state: State) -> None:
            try:
                state[result] = compute(state[first], state[second])
            except Undecided:
                state[result] = UNKNOWN

        return binary

    def run(state: State) -> None:
        try:
            state[result] = compute(*[state[source] for source in sources])
        except Undecided:
            state[result] = UNKNOWN

    return run


def _assign_several(compute: Compute, sources: Sequence[int], results: tuple[int, ...]) -> Callable[[State], None]:
    def run(state: State) -> None:
        try:
            values = compute(*[state[source] for source in sources])
        except Undecided:
            for result in results:
                state[result] = UNKNOWN
        else:
            for result, value in zip(results, values, strict=True):
                state[result] = value

    return run


def forget(results: Sequence[int]) -> Step:
    """Return a step after which the results are not known, not even under a guard that does not hold."""

    def run(state: State) -> None:
        for result in results:
            state[result] = UNKNOWN

    return Step(run, tuple(results))


def issue(record: Compute, sources: Sequence[int], sums: Sequence[int], guard: Guard | None) -> Step:
    """Return a step that issues a product, after which its accumulators are not known.

    The first argument of ``record`` is whether the accumulators are certainly 0.
    """

    def run(state: State) -> None:
        if guard is not None:
            holds = state[guard.slot]
            if holds is UNKNOWN:
                raise Undecided
            if holds is not guard.wanted:
                return
        zeros = all(not isinstance(state[place], Unknown) and state[place] == 0 for place in sums)
        record(zeros, *[state[source] for source in sources])
        for result in sums:
            state[result] = UNKNOWN

    return Step(run, tuple(sums))


def jump(target: int, guard: Guard | None = None, condition: Guard | None = None) -> Step:
    """Return a step that jumps if the guard and the condition, where there are any, hold."""
    tests = [test for test in (guard, condition) if test is not None]

    def run(state: State) -> int | None:
        for slot, wanted in tests:
            holds = state[slot]
            if holds is UNKNOWN:
                raise Undecided
            if holds is not wanted:
                return None
        return target

    return Step(run, target=target, falls=bool(tests))


def stop(reason: str) -> Step:
    """Return a step that raises CannotDecide."""

    def run(state: State) -> None:
        raise CannotDecide(reason)

    return Step(run)


def _nothing(state: State) -> None:
    pass


#: What barriers and fences do to a single thread.
NOTHING = Step(_nothing)
