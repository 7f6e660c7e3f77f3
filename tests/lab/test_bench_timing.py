"""The timer: a clock that the calls themselves move."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from attngen.lab.bench.timing import Batches, Contender, Timing, interleaved, without_pauses
from tests.lab.bench_support import FakeClock


@dataclass
class FakeOutputs:
    """Memory that notes when it is poisoned, and what it was asked about."""

    poisoned: int = 0
    broken: set[str] = field(default_factory=set)

    def poison(self) -> None:
        self.poisoned += 1

    def intact(self, out: str) -> bool:
        return out not in self.broken


def time(contenders: Sequence[Contender], clock: FakeClock, outputs: FakeOutputs, rounds: int) -> list[Timing]:
    return interleaved([Batches(one, clock, outputs) for one in contenders], rounds, random.Random(0))


def runner(name: str, log: list[str], clock: FakeClock, costs: Iterator[float], host: float = 0.0) -> Any:
    def call() -> str:
        log.append(name)
        clock.gpu += next(costs)
        clock.host += host
        return name

    return call


def costs(value: float, first: Sequence[float] = ()) -> Iterator[float]:
    yield from first
    while True:
        yield value


def test_the_median_of_samples_of_five_milliseconds() -> None:
    clock, log = FakeClock(), []
    one = Contender("one", [runner("one", log, clock, costs(0.3, first=[900.0]))])
    other = Contender("other", [runner("other", log, clock, costs(7.0))])
    fast, slow = time([one, other], clock, FakeOutputs(), 3)
    assert len(fast.samples) == len(slow.samples) == 3
    assert fast.milliseconds == pytest.approx(0.3)
    assert slow.milliseconds == pytest.approx(7.0)
    # 1 call that may compile, 5 that estimate, and 4 samples (one of them not counted): ceil(5 / 0.3), and 2 at least
    assert log.count("one") == 1 + 5 + 4 * 17
    assert log.count("other") == 1 + 5 + 4 * 2


def test_rounds_are_interleaved_in_random_order() -> None:
    clock, log = FakeClock(), []
    time([Contender(n, [runner(n, log, clock, costs(5.0))]) for n in "abc"], clock, FakeOutputs(), 11)
    samples = "".join(log[3 * 6 :])
    assert samples[::2] == samples[1::2]
    rounds = {samples[::2][i : i + 3] for i in range(0, 3 * 12, 3)}
    assert {"".join(sorted(order)) for order in rounds} == {"abc"}
    assert len(rounds) > 3


def test_the_median_ignores_a_slow_round() -> None:
    clock, log = FakeClock(), []
    slow = [1.0] * 6 + [1.0] * 5 + [50.0] * 5  # the second round
    (timing,) = time([Contender("a", [runner("a", log, clock, costs(1.0, first=slow))])], clock, FakeOutputs(), 3)
    assert timing.samples == pytest.approx((50.0, 1.0, 1.0))
    assert timing.milliseconds == pytest.approx(1.0)


def test_sets_of_inputs_take_turns_across_samples() -> None:
    clock, log = FakeClock(), []
    calls = [runner(str(n), log, clock, costs(2.0)) for n in range(4)]
    time([Contender("a", calls)], clock, FakeOutputs(), 2)
    assert log == [str(n % 4) for n in range(len(log))]


def test_a_call_that_waits_for_the_host_is_marked() -> None:
    clock, log = FakeClock(), []
    contenders = [
        Contender("free", [runner("free", log, clock, costs(0.05), host=0.02)]),
        Contender("bound", [runner("bound", log, clock, costs(0.05), host=0.05)]),
    ]
    free, bound = time(contenders, clock, FakeOutputs(), 1)
    assert (free.host_us, bound.host_us) == pytest.approx((20, 50))
    assert (free.host_bound, bound.host_bound) == (False, True)


def test_without_pauses_calls_that_the_host_bounds_wait_in_a_queue() -> None:
    """Calls take the host 0.06 ms, and the card 0.05 or 0.1, which few calls do not tell from one that the host bounds:
    the figure is the card's."""

    class Queue(FakeClock):
        """A call cannot end before it was enqueued."""

        held = 0

        def mark(self) -> float:
            self.gpu = max(self.gpu, self.host)
            return self.gpu

        def hold(self, milliseconds: float) -> None:
            self.held += 1
            self.gpu = max(self.gpu, self.host) + milliseconds

    clock = Queue()

    def call(cost: float) -> Any:
        def enqueue() -> str:
            clock.host += 0.06
            clock.gpu = max(clock.gpu, clock.host) + cost
            return "out"

        return enqueue

    samplers = [Batches(Contender("one", [call(cost)]), clock, FakeOutputs()) for cost in (0.05, 0.1, 0.5)]
    bound, close, free = without_pauses(samplers, clock, 3, random.Random(0), 15.0)
    assert bound.samples == pytest.approx([0.05] * 3, rel=1e-2)
    assert close.samples == pytest.approx([0.1] * 3, rel=1e-2)
    assert free.samples == pytest.approx([0.5] * 3, rel=1e-2)
    assert clock.held == 8
    assert bound.host_bound


def test_outputs_are_poisoned_before_and_looked_at_after_each_sample() -> None:
    clock, log, outputs = FakeClock(), [], FakeOutputs(broken={"a!"})
    contenders = [
        Contender(n, [runner(n, log, clock, costs(9.0))], as_bshd=lambda out: out + ("!" if out == "a" else ""))
        for n in "ab"
    ]
    assert [timing.intact for timing in time(contenders, clock, outputs, 3)] == [False, True]
    assert outputs.poisoned == 2 * (1 + 1 + 4)


def test_a_session_is_open_around_each_batch_and_outside_of_calls() -> None:
    opened: list[str] = []

    @contextmanager
    def session() -> Iterator[None]:
        opened.append("in")
        yield
        opened.append("out")

    clock = FakeClock()
    time([Contender("a", [runner("call", opened, clock, costs(9.0))], session)], clock, FakeOutputs(), 1)
    assert opened[:3] == ["in", "call", "out"]
    assert "".join(opened).count("incallcallout") == 2
