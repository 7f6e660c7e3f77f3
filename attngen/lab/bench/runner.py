"""The runner of all suites: their cases one after another, contenders checked and timed side by side.

A suite says what its cases are and which contenders a case has; how they are checked against float64, timed and
reported is the same for all.
"""

from __future__ import annotations

import math
import random
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

import torch

from attngen.errors import CallError, LoadError, NoKernelError, suggest
from attngen.lab.bench.cases import DENSE_SUITES, DIRECTIONS, TOKENS
from attngen.lab.bench.graphs import Capture, cuda_graph
from attngen.lab.bench.machine import Monitor, Reading, ceilings, gpu_facts, versions
from attngen.lab.bench.report import Report, Result, Row, reason_of
from attngen.lab.bench.timing import SUSTAINED_MS, Clock, CudaClock, Sampler, Timing, interleaved, without_pauses
from attngen.lab.verify.gpu import Gpu

_MAX_SEED = 2**31


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Choices of a run, as far as its suite knows them.

    ``part`` is part of a kernel's name, ``cells`` and ``peers`` are parts of the names of cases and libraries; empty
    ones mean all. Without ``seqlens`` and ``head_dims`` cases have their own. ``directions`` are some of
    ``DIRECTIONS``, ``suites`` of ``DENSE_SUITES``. ``ladder``: instead of kernels and peers, the rungs that lead to
    each CUDA kernel. ``taken``: of forward kernels, only the one that a call takes. ``sustained``: without pauses.
    ``limit`` bounds the seconds of the run.
    """

    part: str | None = None
    variants: Sequence[str] = ()
    cells: Sequence[str] = ()
    peers: Sequence[str] = ()
    suites: Sequence[str] = DENSE_SUITES
    directions: Sequence[str] = DIRECTIONS
    tokens: int = TOKENS
    seqlens: Sequence[int] = ()
    head_dims: Sequence[int] = ()
    rounds: int = 7
    check: bool = True
    jobs: int | None = None
    limit: float | None = None
    ladder: bool = False
    taken: bool = False
    sustained: bool = False


class Readings(Protocol):
    """The state of the card over time; see ``Monitor``."""

    def since(self, moment: float) -> Reading | None:
        """Medians since a moment of ``time.monotonic``."""

    def within(self, spans: Sequence[tuple[float, float]]) -> Reading | None:
        """Medians in some spans of ``time.monotonic``."""


@dataclass(frozen=True)
class ReadyContender:
    """A contender ready to be timed, and the check of its output.

    ``error`` returns the error of an output; infinity for a NaN. ``fields`` are those of the result that are known
    before the first call; ``measure`` takes others after the check.
    """

    sampler: Sampler
    error: Callable[[Any], float] | None = None
    limit: float = math.inf
    fields: Mapping[str, Any] = field(default_factory=dict)
    measure: Callable[[], Mapping[str, Any]] = dict


ResultType = TypeVar("ResultType", bound=Result)


@dataclass(frozen=True, kw_only=True)
class Bench:
    """The card that contenders run on, and the rules by which they are timed.

    Inputs must exceed ``l2_bytes``. With ``pauseless_ms`` samples take so many milliseconds or more, without pauses.
    """

    device: torch.device
    l2_bytes: int
    generator: torch.Generator
    order: random.Random
    rounds: int
    check: bool = True
    clock: Clock = field(default_factory=CudaClock)
    capture: Capture = cuda_graph
    readings: Readings | None = None
    pauseless_ms: float | None = None

    def enter(self, result: ResultType, make: Callable[[], ReadyContender]) -> tuple[ResultType, Sampler | None]:
        """Prepare a contender and check its output; its result has a reason instead of a sampler if it cannot run."""
        try:
            entry = make()
            result = replace(result, **entry.fields)
            out = entry.sampler.output()
            if self.check and entry.error is not None:
                error = entry.error(out)
                result = replace(result, error=error)
                if not error <= entry.limit:
                    reason = f"wrong: error {error:.1e} exceeds {entry.limit:.0e}"
                    return replace(result, status="failed", reason=reason), None
            del out
            return replace(result, **entry.measure()), entry.sampler
        except NoKernelError as refusal:
            return replace(result, status="unsupported", reason=reason_of(refusal)), None
        except Exception as raised:  # whatever a library raises for what it lacks, or a kernel on its way down
            return replace(result, status="unsupported" if result.peer else "failed", reason=reason_of(raised)), None

    def measure(
        self, entered: Sequence[tuple[ResultType, Sampler | None]]
    ) -> tuple[tuple[ResultType, ...], Reading | None]:
        """Time the contenders that entered; return all results in their order, and the state of the card meanwhile."""
        began = time.monotonic()
        try:
            timings = iter(self.timed([sampler for _, sampler in entered if sampler is not None]))
        except Exception as error:  # it is not known of whom: no figure of this case can be trusted
            reason = reason_of(error)
            return tuple(r if s is None else replace(r, status="failed", reason=reason) for r, s in entered), None
        results = tuple(r if s is None else self._measured(r, next(timings)) for r, s in entered)
        return results, self.reading_since(began)

    def timed(self, samplers: Sequence[Sampler]) -> list[Timing]:
        """Time contenders side by side. Raises what a call raises."""
        if self.pauseless_ms is None:
            return interleaved(samplers, self.rounds, self.order)
        return without_pauses(samplers, self.clock, self.rounds, self.order, self.pauseless_ms)

    def _measured(self, result: ResultType, timing: Timing) -> ResultType:
        if not timing.intact:
            return replace(result, status="failed", reason="an output holds a NaN, or was not all written")
        reading = self.readings.within(timing.spans) if self.readings is not None and timing.spans else None
        return replace(result, status="measured", timing=timing, reading=reading)

    def reading_since(self, moment: float) -> Reading | None:
        """The state of the card since a moment of ``time.monotonic``."""
        return None if self.readings is None else self.readings.since(moment)


Case = TypeVar("Case")
ReportType = TypeVar("ReportType", bound=Report[Any])

#: Called after each case with the report so far, and with a line about its progress.
Observer = Callable[[Any, str], None]


class Suite(ABC, Generic[Case, ReportType]):
    """The cases of a run, and how one of them is measured.

    ``report`` is without rows. ``pauseless_ms`` is the length of samples that are taken without pauses.
    """

    options: BenchOptions
    report: ReportType
    cases: Sequence[Case]
    noun = "case"
    without_gpu = "bench needs an NVIDIA GPU, and torch finds none; --dry-run lists the {}s without one"

    @property
    def pauseless_ms(self) -> float | None:
        """Milliseconds of a sample without pauses; None where samples are shorter, and outputs are checked between."""
        return SUSTAINED_MS if self.options.sustained else None

    def session(self) -> AbstractContextManager[Any]:
        """Entered around a run, for settings of compilers."""
        return nullcontext()

    @abstractmethod
    def planned(self, case: Case) -> Row[Any]:
        """A case with its contenders, as far as they are known without running anything."""

    @abstractmethod
    def compiled(self, gpu: Gpu, observer: Observer) -> ReportType:
        """Compile what the cases call; return the report with what is known then."""

    @abstractmethod
    def measured(self, bench: Bench, case: Case) -> Row[Any] | None:
        """Measure a case; None if there is no time for it."""

    def finished(self, report: ReportType) -> ReportType:
        """Add what is known when all cases are measured."""
        return report


def capability() -> int | None:
    """The compute capability of the GPU that is here, 10 * major + minor; None without one."""
    return Gpu.current().capability if torch.cuda.is_available() else None


def dry_run(suite: Suite[Case, ReportType]) -> ReportType:
    """List the cases and their contenders, without figures; needs no GPU."""
    return replace(suite.report, rows=tuple(map(suite.planned, suite.cases)))


def bench(suite: Suite[Case, ReportType], observer: Observer) -> ReportType:
    """Compile what the cache lacks, then measure the cases of a suite. Raises LoadError without a GPU."""
    if not torch.cuda.is_available():
        raise LoadError(suite.without_gpu.format(suite.noun))
    gpu, options = Gpu.current(), suite.options
    facts, clock, seed = gpu_facts(gpu), CudaClock(), secrets.randbelow(_MAX_SEED)
    suite.report = replace(suite.report, gpu=facts, versions=versions(), rounds=options.rounds, seed=seed)
    with suite.session():
        report = suite.compiled(gpu, observer)
        with torch.no_grad(), Monitor(gpu) as monitor:
            on_card = Bench(
                device=gpu.device, l2_bytes=facts["l2_bytes"], clock=clock, capture=cuda_graph,
                generator=torch.Generator(gpu.device).manual_seed(seed), order=random.Random(seed),
                rounds=options.rounds, check=options.check, readings=monitor, pauseless_ms=suite.pauseless_ms,
            )  # fmt: skip
            if suite.cases:
                report = replace(report, ceilings=ceilings(gpu, clock, options.rounds))
            for case in suite.cases:
                row = suite.measured(on_card, case)
                if row is None:
                    continue
                report = replace(report, rows=(*report.rows, row))
                if not gpu.answers():
                    report = replace(report, stopped=f"the GPU has not responded since {row.name}")
                observer(report, f"[{len(report.rows)}/{len(suite.cases)}] {row.line}")
                if report.stopped is not None:
                    break
                torch.cuda.empty_cache()
    return suite.finished(report)


def by_parts(
    cases: Sequence[Case], parts: Sequence[str], what: str, name: Callable[[Case], str],
    short: Callable[[Case], str] | None = None,
) -> list[Case]:  # fmt: skip
    """The cases whose names contain one of ``parts``; all if none is given.

    Raises CallError if there is none, with the nearest of the ``short`` names.
    """
    chosen = [case for case in cases if not parts or any(part in name(case) for part in parts)]
    if not chosen:
        nearest = suggest(parts[0], [(short or name)(case) for case in cases])
        raise CallError(f"no {what} has '{parts[0]}' in its name{nearest}")
    return chosen
