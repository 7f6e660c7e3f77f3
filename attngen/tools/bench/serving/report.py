"""What the serving suite found: times, rates, ratios to the best peer and to another lane, and all of it as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from attngen.tools.bench.machine import Ceilings, Reading
from attngen.tools.bench.report import Mean, mean_of
from attngen.tools.bench.serving.cells import Cell, Form, Problem
from attngen.tools.bench.serving.replay import Replayed

#: Version of the JSON document.
FORMAT = 1


@dataclass(frozen=True, slots=True)
class ServingResult:
    """What became of one contestant in one form of a cell's cache.

    ``lane`` names ours; a peer has none. ``kernel`` is the one that ran. ``status`` is measured, planned (a dry run),
    unsupported (``reason`` says why) or failed. ``error`` is relative to float64, infinite for a NaN.
    """

    contestant: str
    problem: Problem
    form: Form
    lane: str | None = None
    beside: str | None = None
    kernel: str | None = None
    status: str = "planned"
    reason: str | None = None
    timing: Replayed | None = None
    error: float | None = None

    @property
    def microseconds(self) -> float | None:
        """The time of a call on the GPU; None if it was not measured."""
        return self.timing.microseconds if self.timing is not None and self.status == "measured" else None

    @property
    def tbps(self) -> float | None:
        """TB/s of the K and V that queries see."""
        return None if self.microseconds is None else self.problem.cache_bytes / self.microseconds / 1e6

    @property
    def tflops(self) -> float | None:
        """TFLOP/s over visible pairs."""
        return None if self.microseconds is None else self.problem.flops / self.microseconds / 1e6


@dataclass(frozen=True, slots=True)
class ServingRow:
    """One cell. ``input_sets`` are those of its first problem."""

    cell: Cell
    results: tuple[ServingResult, ...]
    input_sets: int | None = None
    reading: Reading | None = None

    def best_peer(self, result: ServingResult) -> ServingResult | None:
        """Return the fastest peer on the same problem, contiguous or over pages of any size as the result is."""
        paged = result.form.page_size is not None
        rivals = [
            other
            for other in self.results
            if other.lane is None and other.microseconds is not None and other.problem == result.problem
            and (other.form.page_size is not None) == paged
        ]  # fmt: skip
        return min(rivals, key=lambda other: other.microseconds or math.inf, default=None)

    def to_peer(self, result: ServingResult) -> float | None:
        """Return the speed of one of ours over that of the best peer."""
        best = self.best_peer(result)
        if result.lane is None or best is None or best.microseconds is None or result.microseconds is None:
            return None
        return best.microseconds / result.microseconds

    def to_beside(self, result: ServingResult) -> float | None:
        """Return the time of one of ours over that of the lane that it is compared with."""
        for other in self.results:
            if other.lane is not None and other.lane == result.beside:
                if other.microseconds is None or result.microseconds is None:
                    return None
                return result.microseconds / other.microseconds
        return None

    @property
    def ratios(self) -> dict[str, float]:
        """The speed of each lane over that of the best peer, as far as there is one."""
        found = {result.lane: self.to_peer(result) for result in self.results if result.lane is not None}
        return {lane: ratio for lane, ratio in found.items() if ratio is not None}

    def to_dict(self) -> dict[str, Any]:
        """Return it as the report holds it."""
        return {
            "name": self.cell.name,
            "group": self.cell.group,
            "input_sets": self.input_sets,
            "gpu": None if self.reading is None else asdict(self.reading),
            "results": [self._result(result) for result in self.results],
        }

    def _result(self, result: ServingResult) -> dict[str, Any]:
        timing, problem, best = result.timing, result.problem, self.best_peer(result)
        return {
            "contestant": result.contestant,
            "lane": result.lane,
            "kernel": result.kernel,
            "variant": problem.variant,
            "form": result.form.name,
            "heads_first": result.form.heads_first,
            "batch": problem.batch,
            "seqlen_q": problem.seqlen_q,
            "lengths": sorted(set(problem.lengths)),
            "heads": problem.heads,
            "kv_heads": problem.kv_heads,
            "status": result.status,
            "reason": result.reason,
            "relative_error": result.error if result.error is not None and math.isfinite(result.error) else None,
            "microseconds": result.microseconds,
            "samples": list(timing.samples) if timing else [],
            "host_microseconds": timing and timing.host_microseconds,
            "tbps": result.tbps,
            "tflops": result.tflops,
            "best_peer": best.contestant if best is not None and result.lane is not None else None,
            "to_peer": self.to_peer(result),
            "beside": result.beside,
            "to_beside": self.to_beside(result),
        }


@dataclass(frozen=True, slots=True)
class ServingReport:
    """All that the suite found. ``left_out`` maps peers that are not here to the reason."""

    spec: str
    package: str
    rows: tuple[ServingRow, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)
    gpu: Mapping[str, Any] | None = None
    versions: Mapping[str, str | None] = field(default_factory=dict)
    ceilings: Ceilings | None = None
    rounds: int | None = None
    seed: int | None = None
    stopped: str | None = None

    @property
    def results(self) -> list[ServingResult]:
        """The results of all cells."""
        return [result for row in self.rows for result in row.results]

    @property
    def means(self) -> tuple[Mean, ...]:
        """Geometric mean and least of the ratios to the best peer, of each group that has two cells or more."""
        groups = dict.fromkeys(row.cell.group for row in self.rows)
        found = (mean_of(of, [row for row in self.rows if row.cell.group == of]) for of in groups)
        return tuple(mean for mean in found if mean is not None)

    @property
    def ok(self) -> bool:
        """Whether a kernel of ours was measured, and none failed."""
        ours = [result.status for result in self.results if result.lane is not None]
        return self.stopped is None and "measured" in ours and "failed" not in ours

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document."""
        return {
            "format": FORMAT,
            "suite": "serving",
            "spec": self.spec,
            "package": self.package,
            "ok": self.ok,
            "stopped": self.stopped,
            "gpu": None if self.gpu is None else dict(self.gpu),
            "versions": dict(self.versions),
            "ceilings": None if self.ceilings is None else asdict(self.ceilings),
            "rounds": self.rounds,
            "seed": self.seed,
            "rows": [row.to_dict() for row in self.rows],
            "means": [mean.to_dict() for mean in self.means],
            "left_out": dict(self.left_out),
        }
