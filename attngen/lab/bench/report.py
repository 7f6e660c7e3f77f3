"""Results of a benchmark: times, ratios to the best peer, geometric means, and all of it as JSON."""

from __future__ import annotations

import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Generic, TypeVar

from attngen.lab.bench.machine import Ceilings, Reading
from attngen.lab.bench.timing import Timing

#: Characters of an error that a table or a report holds.
_MAX_REASON = 300


@dataclass(frozen=True)
class Result:
    """Outcome for one contender in one case.

    ``peer`` says that another library computed it; ``kernel`` names the kernel of attngen. ``status`` is measured,
    planned (a dry run), unsupported (``reason`` says why) or failed. ``flops`` are those of a call. ``error`` is
    relative to float64, infinite for a NaN. ``reading`` is the state of the card while this contender ran, known where
    samples are taken without pauses.
    """

    contender: str
    kernel: str | None = None
    status: str = "planned"
    reason: str | None = None
    timing: Timing | None = None
    flops: float | None = None
    error: float | None = None
    reading: Reading | None = None
    peer: bool = False

    @property
    def label(self) -> str:
        """The name by which ratios and means list it."""
        return self.contender

    @property
    def milliseconds(self) -> float | None:
        """Median time of a call; None if it was not measured."""
        return None if self.timing is None else self.timing.milliseconds

    @property
    def microseconds(self) -> float | None:
        """The same in microseconds."""
        return None if self.timing is None else 1e3 * self.timing.milliseconds

    @property
    def tflops(self) -> float | None:
        """TFLOP/s over visible pairs."""
        return None if self.milliseconds is None or self.flops is None else self.flops / self.milliseconds / 1e9

    @property
    def joules(self) -> float | None:
        """Joules for 10¹² operations; None where the power was not read."""
        return self.reading.watts / self.tflops if self.reading is not None and self.tflops else None

    def to_dict(self) -> dict[str, Any]:
        """The entries that documents of all suites have."""
        return {
            "contender": self.contender,
            "kernel": self.kernel,
            "status": self.status,
            "reason": self.reason,
            "tflops": self.tflops,
            "relative_error": self.error if self.error is not None and math.isfinite(self.error) else None,
            "host_microseconds": self.timing and self.timing.host_us,
            "gpu": self.reading and asdict(self.reading),
            "joules_per_tflop": self.joules,
        }

    def in_microseconds(self) -> dict[str, Any]:
        """The entries of a suite whose documents have microseconds."""
        samples = [1e3 * sample for sample in self.timing.samples] if self.timing else []
        return {**self.to_dict(), "microseconds": self.microseconds, "samples": samples}


ResultType = TypeVar("ResultType", bound=Result)


@dataclass(frozen=True, kw_only=True)
class Row(ABC, Generic[ResultType]):
    """One case. ``input_sets`` counts its sets of inputs; ``reading`` is the state of the card while it was timed."""

    results: tuple[ResultType, ...]
    input_sets: int | None = None
    reading: Reading | None = None

    @property
    @abstractmethod
    def name(self) -> str:
        """The case in a few words."""

    @property
    def line(self) -> str:
        """The case and the figures of all contenders, for the progress of a run."""
        figures = [f"{one.contender} {one.microseconds:.1f}" for one in self.results if one.microseconds is not None]
        return f"{self.name}: {', '.join(figures) or 'nothing was measured'} µs"

    def rivals(self, result: ResultType) -> Iterable[ResultType]:
        """The peers that a result of attngen is compared with."""
        return (other for other in self.results if other.peer)

    def best_peer(self, result: ResultType) -> ResultType | None:
        """The fastest rival of a result; None if none was measured."""
        measured = [other for other in self.rivals(result) if other.milliseconds is not None]
        return min(measured, key=lambda other: other.milliseconds or math.inf, default=None)

    def to_peer(self, result: ResultType) -> float | None:
        """The speed of a result of attngen over that of the best peer."""
        best = self.best_peer(result)
        if result.peer or best is None or best.milliseconds is None or result.milliseconds is None:
            return None
        return best.milliseconds / result.milliseconds

    @property
    def ratios(self) -> dict[str, float]:
        """The speed of each contender of attngen over that of the best peer, as far as both were measured."""
        ratios = {result.label: self.to_peer(result) for result in self.results}
        return {label: ratio for label, ratio in ratios.items() if ratio is not None}

    def to_dict(self) -> dict[str, Any]:
        """The row in the document."""
        return {
            "name": self.name,
            "input_sets": self.input_sets,
            "gpu": self.reading and asdict(self.reading),
            "results": [self.result_to_dict(result) for result in self.results],
        }

    def result_to_dict(self, result: ResultType) -> dict[str, Any]:
        """A result in the document."""
        return result.in_microseconds()


@dataclass(frozen=True, slots=True)
class Mean:
    """Geometric mean and least of the ratios of each contender over some cases, and the number of cases."""

    of: str
    ratios: Mapping[str, float]
    least: Mapping[str, float]
    cases: Mapping[str, int]


RowType = TypeVar("RowType", bound=Row[Any])


def mean_of(of: str, rows: Iterable[Row[Any]]) -> Mean | None:
    """Means over the cases in which a contender and a peer were measured; None for fewer than two each."""
    by_label: dict[str, list[float]] = {}
    for row in rows:
        for label, ratio in row.ratios.items():
            by_label.setdefault(label, []).append(ratio)
    several = {label: ratios for label, ratios in by_label.items() if len(ratios) > 1}
    if not several:
        return None
    return Mean(
        of,
        {label: statistics.geometric_mean(ratios) for label, ratios in several.items()},
        {label: min(ratios) for label, ratios in several.items()},
        {label: len(ratios) for label, ratios in several.items()},
    )


def grouped(rows: Iterable[RowType], key: Callable[[RowType], str]) -> dict[str, list[RowType]]:
    """Rows by a key, in their order."""
    groups: dict[str, list[RowType]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


@dataclass(frozen=True, kw_only=True)
class Report(Generic[RowType]):
    """A run so far.

    ``left_out`` maps kernels or peers that are in no case to the reason, ``failures`` kernels that do not compile to
    the error. ``stopped`` says why the run ended early.
    """

    spec: str = ""
    package: str = ""
    rows: tuple[RowType, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    failures: Mapping[str, str] = field(default_factory=dict)
    gpu: Mapping[str, Any] | None = None
    versions: Mapping[str, str | None] = field(default_factory=dict)
    ceilings: Ceilings | None = None
    rounds: int | None = None
    seed: int | None = None
    stopped: str | None = None

    @property
    def results(self) -> list[Any]:
        """The results of all cases."""
        return [result for row in self.rows for result in row.results]

    @property
    def groups(self) -> Mapping[str, Sequence[RowType]]:
        """The rows over which means are taken, by the name of the mean."""
        return {}

    @property
    def means(self) -> tuple[Mean, ...]:
        """Geometric mean and least of the ratios to the best peer, of each group that has two cases or more."""
        means = (mean_of(of, rows) for of, rows in self.groups.items())
        return tuple(mean for mean in means if mean is not None)

    @property
    def ok(self) -> bool:
        """Whether a kernel of attngen was measured, and none failed."""
        statuses = {result.status for result in self.results if not result.peer}
        return self.stopped is None and not self.failures and "measured" in statuses and "failed" not in statuses

    def to_dict(self) -> dict[str, Any]:
        """The entries that the documents of all suites have."""
        return {
            "spec": self.spec,
            "package": self.package,
            "ok": self.ok,
            "stopped": self.stopped,
            "gpu": None if self.gpu is None else dict(self.gpu),
            "versions": dict(self.versions),
            "ceilings": self.ceilings and asdict(self.ceilings),
            "rounds": self.rounds,
            "seed": self.seed,
            "rows": [row.to_dict() for row in self.rows],
            "means": [asdict(mean) for mean in self.means],
        }


def reason_of(error: Exception) -> str:
    """The first line of an error, or its type if it says nothing."""
    lines = str(error).strip().splitlines()
    return shortened(f"{type(error).__name__}: {lines[0]}") if lines else type(error).__name__


def shortened(reason: str) -> str:
    """A reason as reports hold it."""
    return reason[:_MAX_REASON]
