"""Samples of contenders as replays of CUDA graphs: the host affects no figure but its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from attngen.lab.bench.timing import SAMPLE_MS, Clock, Contender, Work

#: Milliseconds that a graph takes at least, and the most calls that it holds.
_GRAPH_MS, _MOST_CALLS = 1.0, 256

#: Calls that estimate the time of one, and calls that are enqueued to time the host.
_ESTIMATED, _ENQUEUED = 4, 32

#: Takes calls and returns what replays them, and the result of the last one.
Capture = Callable[[Sequence[Callable[[], Any]]], tuple[Callable[[], Any], Any]]


def cuda_graph(calls: Sequence[Callable[[], Any]]) -> tuple[Callable[[], Any], Any]:
    """Capture calls in a CUDA graph; see ``Capture``."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            result = call()
    return graph.replay, result


class Replays:
    """Replays of a contender's calls, captured so often that a graph takes a millisecond; a ``Sampler``."""

    def __init__(self, contender: Contender, clock: Clock, capture: Capture) -> None:
        """Run each call, which compiles, loads and allocates, and capture them. Raises what a call raises."""
        self._contender, self._clock = contender, clock
        calls = contender.calls
        with contender.session():
            for call in calls:
                call()
            one = self._time(lambda: [calls[i % len(calls)]() for i in range(_ESTIMATED)], _ESTIMATED)
            passes = max(math.ceil(min(_GRAPH_MS / max(one, 1e-6), _MOST_CALLS) / len(calls)), 1)
            self._calls = passes * len(calls)
            self._replay, self._result = capture(list(calls) * passes)
        self._replay()
        self._replays = max(math.ceil(SAMPLE_MS / max(self._time(self._replay, 1), 1e-6)), 2)
        self.intact = True

    def output(self) -> Tensor:
        """Compute the output of the last set of inputs, by a replay; see ``Sampler``."""
        self._out().fill_(math.nan)
        self._replay()
        return self._out()

    def sample(self) -> float:
        """See ``Sampler``."""
        self._out().fill_(math.nan)
        work = self.work(SAMPLE_MS)
        milliseconds = self._time(work.enqueue, work.calls)
        self.intact &= not bool(self._out().isnan().any())
        return milliseconds

    def host_us(self) -> float:
        """Take the time that enqueuing a call takes the host, where the GPU has nothing else to do."""
        calls = self._contender.calls
        self._clock.milliseconds(self._clock.mark(), self._clock.mark())  # waits for what was enqueued before
        with self._contender.session():
            began = self._clock.host_seconds()
            for i in range(_ENQUEUED):
                calls[i % len(calls)]()
            return 1e6 * (self._clock.host_seconds() - began) / _ENQUEUED

    def work(self, milliseconds: float) -> Work:
        """See ``Sampler``."""
        count = math.ceil(self._replays * milliseconds / SAMPLE_MS)

        def enqueue() -> None:
            for _ in range(count):
                self._replay()

        return Work(enqueue, count * self._calls)

    def _time(self, work: Callable[[], Any], calls: int) -> float:
        """Time the work of so many calls; return the milliseconds of one."""
        start = self._clock.mark()
        work()
        return self._clock.milliseconds(start, self._clock.mark()) / calls

    def _out(self) -> Tensor:
        out: Tensor = self._contender.as_bshd(self._result)
        return out
