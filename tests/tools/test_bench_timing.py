"""The timer: a clock that the calls themselves move."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from attngen.tools.bench.timing import Contestant, race
from tests.tools.bench_support import FakeClock


@dataclass
class FakeOutputs:
    """Memory that notes when it is poisoned, and what it was asked about."""

    poisoned: int = 0
    broken: set[str] = field(default_factory=set)

    def poison(self) -> None:
        self.poisoned += 1

    def intact(self, out: str) -> bool:
        return out not in self.broken


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
    one = Contestant("one", [runner("one", log, clock, costs(0.3, first=[900.0]))])
    other = Contestant("other", [runner("other", log, clock, costs(7.0))])
    found = race([one, other], clock, FakeOutputs(), 3)
    assert [len(timing.samples) for timing in found] == [3, 3]
    assert found[0].milliseconds == pytest.approx(0.3)
    assert found[1].milliseconds == pytest.approx(7.0)
    # 1 call that may compile, 5 that estimate, and 4 samples (one of them not counted): ceil(5 / 0.3), and 2 at least
    assert log.count("one") == 1 + 5 + 4 * 17
    assert log.count("other") == 1 + 5 + 4 * 2


def test_rounds_are_interleaved_and_begin_in_turns() -> None:
    clock, log = FakeClock(), []
    race([Contestant(n, [runner(n, log, clock, costs(5.0))]) for n in "abc"], clock, FakeOutputs(), 2)
    samples = log[3 * 6 :]
    assert "".join(samples[::2]) == "".join(samples[1::2]) == "abc" + "bca" + "cab"


def test_the_median_ignores_a_slow_round() -> None:
    clock, log = FakeClock(), []
    slow = [1.0] * 6 + [1.0] * 5 + [50.0] * 5  # the second round
    (found,) = race([Contestant("a", [runner("a", log, clock, costs(1.0, first=slow))])], clock, FakeOutputs(), 3)
    assert found.samples == pytest.approx((50.0, 1.0, 1.0))
    assert found.milliseconds == pytest.approx(1.0)


def test_sets_of_inputs_take_turns_across_samples() -> None:
    clock, log = FakeClock(), []
    calls = [runner(str(n), log, clock, costs(2.0)) for n in range(4)]
    race([Contestant("a", calls)], clock, FakeOutputs(), 2)
    assert log == [str(n % 4) for n in range(len(log))]


def test_a_call_that_waits_for_the_host_is_marked() -> None:
    clock, log = FakeClock(), []
    contestants = [
        Contestant("free", [runner("free", log, clock, costs(0.05), host=0.02)]),
        Contestant("bound", [runner("bound", log, clock, costs(0.05), host=0.05)]),
    ]
    free, bound = race(contestants, clock, FakeOutputs(), 1)
    assert (free.host_us, bound.host_us) == pytest.approx((20, 50))
    assert (free.host_bound, bound.host_bound) == (False, True)


def test_outputs_are_poisoned_before_and_looked_at_after_each_sample() -> None:
    clock, log, outputs = FakeClock(), [], FakeOutputs(broken={"a!"})
    contestants = [
        Contestant(n, [runner(n, log, clock, costs(9.0))], as_bshd=lambda out: out + ("!" if out == "a" else ""))
        for n in "ab"
    ]
    assert [timing.intact for timing in race(contestants, clock, outputs, 3)] == [False, True]
    assert outputs.poisoned == 2 * (1 + 1 + 4)


def test_a_session_is_open_around_each_batch_and_outside_of_calls() -> None:
    opened: list[str] = []

    @contextmanager
    def session() -> Iterator[None]:
        opened.append("in")
        yield
        opened.append("out")

    clock = FakeClock()
    race([Contestant("a", [runner("call", opened, clock, costs(9.0))], session)], clock, FakeOutputs(), 1)
    assert opened[:3] == ["in", "call", "out"]
    assert "".join(opened).count("incallcallout") == 2
