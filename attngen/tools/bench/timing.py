"""Time contestants side by side: batches between two events, in interleaved rounds, over rotating inputs.

A sustained race has longer samples, in random order, and the next one is enqueued before the last one is waited for:
the card never rests, and runs at the clock that its power allows.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any, Protocol

import torch
from torch import Tensor

#: Milliseconds that a sample takes at least, so that neither the events nor the first launch matter.
SAMPLE_MS = 5.0

#: The same in a sustained race.
SUSTAINED_MS = 60.0

#: Calls by which the length of a sample, and the time that the host takes for a call, are estimated.
_ESTIMATED = 5

#: A call is host-bound when enqueuing it takes this share of the time that it takes on the GPU.
HOST_SHARE = 0.9


@dataclass(frozen=True)
class Contestant:
    """A kernel in the race: one call for each set of inputs, all of one shape.

    ``session`` is entered around every batch of calls, for settings that a program makes once. ``as_bshd`` turns what
    a call returns into the output as (batch, seqlen, heads, head_dim). ``leaves`` are q, k and v of each call as the
    library takes them, by which a backward is differentiated.
    """

    name: str
    calls: Sequence[Callable[[], Any]]
    session: Callable[[], AbstractContextManager[Any]] = nullcontext
    as_bshd: Callable[[Any], Any] = field(default=lambda result: result)
    leaves: Sequence[tuple[Tensor, Tensor, Tensor]] = ()

    def first(self) -> Any:
        """Return the output of the first set of inputs."""
        with self.session():
            return self.as_bshd(self.calls[0]())


@dataclass(frozen=True, slots=True)
class Timing:
    """The milliseconds of a call in each round, and the microseconds that enqueuing one took the host.

    ``intact`` is False if some output held a value that no call wrote. ``spans`` say when samples ran, in seconds of
    the host's clock, in a sustained race.
    """

    samples: tuple[float, ...]
    host_us: float
    intact: bool
    spans: tuple[tuple[float, float], ...] = ()

    @property
    def milliseconds(self) -> float:
        """The median of the rounds."""
        return statistics.median(self.samples)

    @property
    def host_bound(self) -> bool:
        """Whether the figure is the speed of the host rather than that of the kernel."""
        return self.host_us >= HOST_SHARE * 1e3 * self.milliseconds


class Clock(Protocol):
    """Time on the GPU and on the host."""

    def mark(self) -> Any:
        """Return a mark of this moment between the enqueued calls."""

    def milliseconds(self, start: Any, end: Any) -> float:
        """Wait until the GPU has reached both moments, and return the time between them."""

    def host_seconds(self) -> float:
        """Return the time of the host."""


class CudaClock:
    """CUDA events on the current stream."""

    def mark(self) -> torch.cuda.Event:
        """See ``Clock``."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def milliseconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """See ``Clock``."""
        end.synchronize()
        return float(start.elapsed_time(end))

    def host_seconds(self) -> float:
        """See ``Clock``."""
        return time.monotonic()


class Outputs(Protocol):
    """The memory that outputs are allocated in."""

    def poison(self) -> None:
        """Fill it with values that no call writes."""

    def intact(self, out: Any) -> bool:
        """Whether every element of an output was written."""


class _Lane:
    """One contestant's part of a race."""

    def __init__(self, contestant: Contestant, clock: Clock, outputs: Outputs) -> None:
        self._contestant = contestant
        self._clock = clock
        self._outputs = outputs
        self._calls = cycle(contestant.calls)
        self.intact = True
        for _ in contestant.calls:  # anything that compiles, loads or allocates at the first call
            self.batch(1)
        estimate, self.host_us = self.batch(_ESTIMATED)
        self._repeats = max(math.ceil(SAMPLE_MS / max(estimate, 1e-6)), 2)

    def sample(self) -> float:
        """Return the milliseconds of a call, over a batch of SAMPLE_MS or more."""
        return self.batch(self._repeats)[0]

    def work(self, milliseconds: float) -> Work:
        """Return batches of so many milliseconds or more, which nobody waits for."""
        count = math.ceil(self._repeats * milliseconds / SAMPLE_MS)

        def enqueue() -> None:
            with self._contestant.session():
                for _ in range(count):
                    next(self._calls)()

        return Work(enqueue, count)

    def batch(self, count: int) -> tuple[float, float]:
        """Run a number of calls; return the milliseconds of one, and the host's microseconds for one."""
        self._outputs.poison()
        with self._contestant.session():
            began = self._clock.host_seconds()
            start = self._clock.mark()
            for _ in range(count):
                result = next(self._calls)()
            end = self._clock.mark()
            host = self._clock.host_seconds() - began
        elapsed = self._clock.milliseconds(start, end)
        self.intact &= self._outputs.intact(self._contestant.as_bshd(result))
        return elapsed / count, 1e6 * host / count


def race(contestants: Sequence[Contestant], clock: Clock, outputs: Outputs, rounds: int) -> list[Timing]:
    """Time all contestants in interleaved rounds, each round starting with another one.

    One more round is run first, and not counted: it warms the card up. Raises what a call raises.
    """
    lanes = [_Lane(contestant, clock, outputs) for contestant in contestants]
    samples: list[list[float]] = [[] for _ in lanes]
    for number in range(rounds + 1):
        for turn in range(len(lanes)):
            index = (turn + number) % len(lanes)
            sample = lanes[index].sample()
            if number:
                samples[index].append(sample)
    return [Timing(tuple(times), lane.host_us, lane.intact) for times, lane in zip(samples, lanes, strict=True)]


@dataclass(frozen=True, slots=True)
class Work:
    """Enqueues some calls, and how many."""

    enqueue: Callable[[], None]
    calls: int


@dataclass(slots=True)
class Sustained:
    """Milliseconds of a call in each round, and from when to when samples ran, in seconds of the host's clock."""

    samples: list[float] = field(default_factory=list)
    spans: list[tuple[float, float]] = field(default_factory=list)


def sustain(works: Sequence[Work], clock: Clock, rounds: int, order: random.Random) -> list[Sustained]:
    """Run all works in rounds, each in another random order, and never let the card rest in between.

    One round more is run before, and not counted: it warms the card up. Raises what a work raises.
    """
    found = [Sustained() for _ in works]
    waiting: tuple[int, bool, Any, Any] | None = None
    moment = clock.host_seconds()

    def finish() -> None:
        nonlocal moment
        if waiting is None:
            return
        index, counts, start, end = waiting
        took, began = clock.milliseconds(start, end), moment
        moment = clock.host_seconds()
        if counts:
            found[index].samples.append(took / works[index].calls)
            found[index].spans.append((began, moment))

    for number in range(rounds + 1):
        for index in order.sample(range(len(works)), len(works)):
            start = clock.mark()
            works[index].enqueue()
            end = clock.mark()
            finish()
            waiting = index, number > 0, start, end
    finish()
    return found


def sustained_race(
    contestants: Sequence[Contestant], clock: Clock, outputs: Outputs, rounds: int, order: random.Random,
    milliseconds: float = SUSTAINED_MS,
) -> list[Timing]:  # fmt: skip
    """Time all contestants as ``race`` does, without pauses; outputs are looked at in one more sample after it.

    A sample takes ``milliseconds`` or more.
    """
    lanes = [_Lane(contestant, clock, outputs) for contestant in contestants]
    found = sustain([lane.work(milliseconds) for lane in lanes], clock, rounds, order)
    for lane in lanes:
        lane.sample()
    return [
        Timing(tuple(one.samples), lane.host_us, lane.intact, tuple(one.spans))
        for one, lane in zip(found, lanes, strict=True)
    ]
