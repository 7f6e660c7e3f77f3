"""Times of contenders side by side: samples between two events, in rounds of random order, over rotating inputs.

Without pauses, samples are longer, and the next one is enqueued before the last one is waited for: the card never
rests, and runs at the clock that its power allows. Calls that take the host longer than the card wait for each other
in a queue, so that their figure is the card's, too.
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

#: The same without pauses.
SUSTAINED_MS = 60.0

#: Calls by which the length of a sample, and the time that the host takes for a call, are estimated.
_ESTIMATED = 5

#: A call is host-bound when enqueuing it takes this fraction of the time that it takes on the GPU.
HOST_FRACTION = 0.9

#: Calls wait in a queue where enqueuing one takes this fraction of its time. It is less than the fraction above: of few
#: calls the last one is still on the GPU when the host is done, which hides that the host is slower.
_HELD_FRACTION = 0.5

#: The time that a queue is given to fill, over what enqueuing its calls took before.
_LEAD = 1.5

#: Most sets of inputs; calls so small that this many fit the L2 cache are bound by their launch.
_MAX_SETS = 64


def input_sets(input_bytes: int, l2_bytes: int) -> int:
    """Count the sets of inputs, of so many bytes each, that together exceed twice the L2 cache."""
    return min(max(math.ceil(2 * l2_bytes / input_bytes), 1), _MAX_SETS)


@dataclass(frozen=True)
class Contender:
    """One way to compute a case: a call for each set of inputs, all of one shape.

    ``session`` is entered around every batch of calls, for settings that a program makes once. ``as_bshd`` turns what
    a call returns into the output as (batch, seqlen, heads, head_dim). ``leaves`` are q, k and v of each call as the
    library takes them, by which a backward pass is differentiated.
    """

    name: str
    calls: Sequence[Callable[[], Any]]
    session: Callable[[], AbstractContextManager[Any]] = nullcontext
    as_bshd: Callable[[Any], Any] = field(default=lambda result: result)
    leaves: Sequence[tuple[Tensor, Tensor, Tensor]] = ()

    def first(self) -> Any:
        """Compute the output of the first set of inputs."""
        with self.session():
            return self.as_bshd(self.calls[0]())


@dataclass(frozen=True, slots=True)
class Timing:
    """The milliseconds of a call in each round, and the microseconds that enqueuing one took the host.

    ``intact`` is False if some output held a value that no call wrote. ``spans`` say when samples ran, in seconds of
    the host's clock, where they were taken without pauses.
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
        """Whether enqueuing a call takes as long as the call; if samples had pauses, the figure is the host's speed."""
        return self.host_us >= HOST_FRACTION * 1e3 * self.milliseconds


class Clock(Protocol):
    """Time on the GPU and on the host."""

    def mark(self) -> Any:
        """Mark this moment between the enqueued calls."""

    def milliseconds(self, start: Any, end: Any) -> float:
        """Wait until the GPU has reached both marks, and return the time between them."""

    def host_seconds(self) -> float:
        """Read the clock of the host."""

    def hold(self, milliseconds: float) -> None:
        """Let what is enqueued from now on wait for so long."""


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

    def hold(self, milliseconds: float) -> None:
        """See ``Clock``."""
        cycles_of_one = torch.cuda.get_device_properties().clock_rate  # kHz
        torch.cuda._sleep(int(milliseconds * cycles_of_one))


class Outputs(Protocol):
    """The memory that outputs are allocated in."""

    def poison(self) -> None:
        """Fill it with values that no call writes."""

    def intact(self, out: Any) -> bool:
        """Whether every element of an output was written."""


class UncheckedOutputs:
    """Outputs that nothing poisons and nothing looks at."""

    def poison(self) -> None:
        """See ``Outputs``."""

    def intact(self, out: Any) -> bool:
        """See ``Outputs``."""
        return True


@dataclass(frozen=True, slots=True)
class Work:
    """Enqueues some calls, and says how many. They wait ``lead_ms``, so that the card does not wait for the host."""

    enqueue: Callable[[], None]
    calls: int
    lead_ms: float = 0.0


class Sampler(Protocol):
    """A contender that was called before, so that nothing is compiled or loaded in its samples.

    ``intact`` turns False when an output holds a value that no call wrote.
    """

    intact: bool

    def output(self) -> Any:
        """Compute an output in poisoned memory, as (batch, seqlen, heads, head_dim)."""

    def sample(self) -> float:
        """Take the milliseconds of a call, over SAMPLE_MS or more."""

    def host_us(self) -> float:
        """Take the microseconds that enqueuing a call takes the host."""

    def work(self, milliseconds: float) -> Work:
        """Calls of so many milliseconds or more, for a caller that does not wait for them."""


class Batches:
    """Samples of calls that the host enqueues one by one."""

    def __init__(self, contender: Contender, clock: Clock, outputs: Outputs) -> None:
        """Call each set of inputs once, and estimate the time of a call. Raises what a call raises."""
        self._contender, self._clock, self._outputs = contender, clock, outputs
        self._calls = cycle(contender.calls)
        self.intact = True
        for _ in contender.calls:
            self._batch(1)
        estimate, self._host_us = self._batch(_ESTIMATED)
        self._held = self._host_us >= _HELD_FRACTION * 1e3 * estimate
        self._repeats = max(math.ceil(SAMPLE_MS / max(estimate, 1e-6)), 2)

    def output(self) -> Any:
        """Compute the output of the first set of inputs; see ``Sampler``."""
        self._outputs.poison()
        return self._contender.first()

    def sample(self) -> float:
        """See ``Sampler``."""
        return self._batch(self._repeats)[0]

    def host_us(self) -> float:
        """See ``Sampler``."""
        return self._host_us

    def work(self, milliseconds: float) -> Work:
        """See ``Sampler``."""
        count = math.ceil(self._repeats * milliseconds / SAMPLE_MS)

        def enqueue() -> None:
            with self._contender.session():
                for _ in range(count):
                    next(self._calls)()

        return Work(enqueue, count, _LEAD * count * self._host_us / 1e3 if self._held else 0.0)

    def _batch(self, count: int) -> tuple[float, float]:
        """Run a number of calls; return the milliseconds of one, and the host's microseconds for one."""
        self._outputs.poison()
        with self._contender.session():
            began = self._clock.host_seconds()
            start = self._clock.mark()
            for _ in range(count):
                result = next(self._calls)()
            end = self._clock.mark()
            host = self._clock.host_seconds() - began
        elapsed = self._clock.milliseconds(start, end)
        self.intact &= self._outputs.intact(self._contender.as_bshd(result))
        return elapsed / count, 1e6 * host / count


def interleaved(samplers: Sequence[Sampler], rounds: int, order: random.Random) -> list[Timing]:
    """Time all contenders in interleaved rounds, each in another random order.

    One more round is run first, and not counted: it warms the card up. Raises what a call raises.
    """
    samples: list[list[float]] = [[] for _ in samplers]
    host: list[list[float]] = [[] for _ in samplers]
    for number in range(rounds + 1):
        for index in order.sample(range(len(samplers)), len(samplers)):
            sample, host_us = samplers[index].sample(), samplers[index].host_us()
            if number:
                samples[index].append(sample)
                host[index].append(host_us)
    return [
        Timing(tuple(own), statistics.median(host_us), sampler.intact)
        for own, host_us, sampler in zip(samples, host, samplers, strict=True)
    ]


@dataclass(slots=True)
class Sustained:
    """Milliseconds of a call in each round, and from when to when samples ran, in seconds of the host's clock."""

    samples: list[float] = field(default_factory=list)
    spans: list[tuple[float, float]] = field(default_factory=list)


def sustain(works: Sequence[Work], clock: Clock, rounds: int, order: random.Random) -> list[Sustained]:
    """Run all works in rounds, each in another random order, and never let the card rest in between.

    One more round is run first, and not counted: it warms the card up. Raises what a work raises.
    """
    sustained = [Sustained() for _ in works]
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
            sustained[index].samples.append(took / works[index].calls)
            sustained[index].spans.append((began, moment))

    for number in range(rounds + 1):
        for index in order.sample(range(len(works)), len(works)):
            if works[index].lead_ms:
                clock.hold(works[index].lead_ms)
            start = clock.mark()
            works[index].enqueue()
            end = clock.mark()
            finish()
            waiting = index, number > 0, start, end
    finish()
    return sustained


def without_pauses(
    samplers: Sequence[Sampler], clock: Clock, rounds: int, order: random.Random, milliseconds: float
) -> list[Timing]:
    """Time all contenders as ``interleaved`` does, in samples of ``milliseconds`` or more without pauses.

    The host is timed, and outputs are looked at, in one more sample after these.
    """
    sustained = sustain([sampler.work(milliseconds) for sampler in samplers], clock, rounds, order)
    for sampler in samplers:
        sampler.sample()
    return [
        Timing(tuple(own.samples), sampler.host_us(), sampler.intact, tuple(own.spans))
        for own, sampler in zip(sustained, samplers, strict=True)
    ]
