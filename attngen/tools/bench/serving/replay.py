"""Time contestants by replays of CUDA graphs, in rounds of random order: the host is in no figure but its own."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attngen.tools.bench.timing import SAMPLE_MS, SUSTAINED_MS, Clock, Contestant, Work, sustain

#: Milliseconds that a graph takes at least, and the most calls that it holds.
_GRAPH_MS, _MOST_CALLS = 1.0, 256

#: Calls by which the time of one is estimated, and those that are enqueued to time the host.
_ESTIMATED, _ENQUEUED = 4, 32

#: Takes calls and returns what replays them, and the result of the last one.
Capture = Callable[[Sequence[Callable[[], Any]]], tuple[Callable[[], Any], Any]]


@dataclass(frozen=True, slots=True)
class Replayed:
    """The microseconds of a call on the GPU, and of enqueuing one on the host, in each round.

    ``intact`` is False if an output held a value that no call wrote. ``spans`` say when samples ran, in seconds of the
    host's clock, in a sustained race.
    """

    samples: tuple[float, ...]
    host_samples: tuple[float, ...]
    intact: bool
    spans: tuple[tuple[float, float], ...] = ()

    @property
    def microseconds(self) -> float:
        """The median of the rounds."""
        return statistics.median(self.samples)

    @property
    def host_microseconds(self) -> float:
        """The median of the rounds."""
        return statistics.median(self.host_samples)


def cuda_graph(calls: Sequence[Callable[[], Any]]) -> tuple[Callable[[], Any], Any]:
    """Capture calls in a CUDA graph; see ``Capture``."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            result = call()
    return graph.replay, result


class Track:
    """One contestant's part of a race: its calls, captured so often that a graph takes a millisecond."""

    def __init__(self, contestant: Contestant, clock: Clock, capture: Capture) -> None:
        """Run each call, which compiles, loads and allocates, and capture them. Raises what a call raises."""
        self._contestant, self._clock = contestant, clock
        calls = contestant.calls
        with contestant.session():
            for call in calls:
                call()
            one = self._time(lambda: [calls[i % len(calls)]() for i in range(_ESTIMATED)], _ESTIMATED)
            turns = math.ceil(min(_GRAPH_MS / max(one, 1e-6), _MOST_CALLS) / len(calls))
            self._calls = max(turns, 1) * len(calls)
            self._replay, self._result = capture(list(calls) * max(turns, 1))
        self._replay()
        self._replays = max(math.ceil(SAMPLE_MS / max(self._time(self._replay, 1), 1e-6)), 2)
        self.intact = True

    def output(self) -> Tensor:
        """Return what the last call of the graph gives for the last set of inputs, after a replay."""
        self._poisoned()
        self._replay()
        return self._out()

    def sample(self) -> float:
        """Return the microseconds of a call, over replays of SAMPLE_MS or more."""
        self._poisoned()

        work = self.work(self._replays)
        milliseconds = self._time(work.enqueue, work.calls)
        self.intact &= not bool(self._out().isnan().any())
        return 1e3 * milliseconds

    def work(self, replays: int | None = None) -> Work:
        """Return some replays, or those that take SUSTAINED_MS or more, which nobody waits for."""
        count = math.ceil(self._replays * SUSTAINED_MS / SAMPLE_MS) if replays is None else replays

        def enqueue() -> None:
            for _ in range(count):
                self._replay()

        return Work(enqueue, count * self._calls)

    def host_sample(self) -> float:
        """Return the microseconds that enqueuing a call takes the host, where the GPU has nothing else to do."""
        calls = self._contestant.calls
        self._clock.milliseconds(self._clock.mark(), self._clock.mark())  # waits for what was enqueued before
        with self._contestant.session():
            began = self._clock.host_seconds()
            for i in range(_ENQUEUED):
                calls[i % len(calls)]()
            return 1e6 * (self._clock.host_seconds() - began) / _ENQUEUED

    def _time(self, work: Callable[[], Any], calls: int) -> float:
        """Return the milliseconds of one call, the mean of ``calls``."""
        start = self._clock.mark()
        work()
        return self._clock.milliseconds(start, self._clock.mark()) / calls

    def _out(self) -> Tensor:
        out: Tensor = self._contestant.as_bshd(self._result)
        return out

    def _poisoned(self) -> None:
        self._out().fill_(math.nan)


def race(tracks: Sequence[Track], rounds: int, order: random.Random) -> list[Replayed]:
    """Time all contestants, each round in another random order. Raises what a replay or a call raises.

    One round more is run before, and not counted: it warms the card up.
    """
    samples: list[list[float]] = [[] for _ in tracks]
    host: list[list[float]] = [[] for _ in tracks]
    for number in range(rounds + 1):
        for index in order.sample(range(len(tracks)), len(tracks)):
            found = tracks[index].sample(), tracks[index].host_sample()
            if number:
                samples[index].append(found[0])
                host[index].append(found[1])
    return [Replayed(tuple(s), tuple(h), t.intact) for s, h, t in zip(samples, host, tracks, strict=True)]


def sustained_race(tracks: Sequence[Track], clock: Clock, rounds: int, order: random.Random) -> list[Replayed]:
    """Time all contestants as ``race`` does, without pauses; the host, and outputs, are looked at once, after it."""
    found = sustain([track.work() for track in tracks], clock, rounds, order)
    for track in tracks:
        track.sample()
    return [
        Replayed(tuple(1e3 * ms for ms in one.samples), (track.host_sample(),), track.intact, tuple(one.spans))
        for one, track in zip(found, tracks, strict=True)
    ]
