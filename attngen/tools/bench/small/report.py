"""What the suite of small calls found: times, ratios to the best peer, and all of it as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from attngen.tools.bench.machine import Ceilings, Reading
from attngen.tools.bench.report import Mean, joules, mean_of
from attngen.tools.bench.serving.replay import Replayed
from attngen.tools.bench.small.shapes import Shape

#: Version of the JSON document.
FORMAT = 1

#: The column of ours.
OURS = "attngen"


@dataclass(frozen=True, slots=True)
class SmallResult:
    """What became of one contestant in one call; ``kernel`` is the one of ours that ran.

    ``status`` is measured, planned (a dry run), unsupported (``reason`` says why) or failed. ``error`` is relative to
    float64, infinite for a NaN; ``reading`` is of the card meanwhile, in a sustained race.
    """

    contestant: str
    shape: Shape
    kernel: str | None = None
    status: str = "planned"
    reason: str | None = None
    timing: Replayed | None = None
    error: float | None = None
    reading: Reading | None = None

    @property
    def microseconds(self) -> float | None:
        """The time of a call on the GPU; None if it was not measured."""
        return self.timing.microseconds if self.timing is not None and self.status == "measured" else None

    @property
    def tflops(self) -> float | None:
        """TFLOP/s over visible pairs."""
        return None if self.microseconds is None else self.shape.flops / self.microseconds / 1e6

    @property
    def joules(self) -> float | None:
        """Joules for 10¹² operations; None where the power was not read."""
        return joules(self.reading, self.tflops)

    def to_dict(self) -> dict[str, Any]:
        """Return it as the report holds it."""
        timing = self.timing
        return {
            "contestant": self.contestant,
            "kernel": self.kernel,
            "status": self.status,
            "reason": self.reason,
            "relative_error": self.error if self.error is not None and math.isfinite(self.error) else None,
            "microseconds": self.microseconds,
            "samples": list(timing.samples) if timing else [],
            "host_microseconds": timing and timing.host_microseconds,
            "tflops": self.tflops,
            "gpu": None if self.reading is None else asdict(self.reading),
            "joules_per_tflop": self.joules,
        }


@dataclass(frozen=True, slots=True)
class SmallRow:
    """One call."""

    shape: Shape
    results: tuple[SmallResult, ...]
    input_sets: int | None = None

    @property
    def ours(self) -> SmallResult:
        """That of ours."""
        return next(result for result in self.results if result.contestant == OURS)

    @property
    def best_peer(self) -> SmallResult | None:
        """The fastest library; None if none was measured."""
        peers = [result for result in self.results if result.contestant != OURS and result.microseconds is not None]
        return min(peers, key=lambda result: result.microseconds or math.inf, default=None)

    @property
    def ratios(self) -> dict[str, float]:
        """The speed of ours by that of the best peer."""
        best, ours = self.best_peer, self.ours
        if best is None or best.microseconds is None or ours.microseconds is None:
            return {}
        return {OURS: best.microseconds / ours.microseconds}

    def to_dict(self) -> dict[str, Any]:
        """Return it as the report holds it."""
        best = self.best_peer
        return {
            **self.shape.to_dict(), "input_sets": self.input_sets, "best_peer": best and best.contestant,
            "to_peer": self.ratios.get(OURS), "results": [result.to_dict() for result in self.results],
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class SmallReport:
    """All that the suite found."""

    spec: str
    package: str
    rows: tuple[SmallRow, ...]
    sustained: bool = False
    gpu: Mapping[str, Any] | None = None
    versions: Mapping[str, str | None] = field(default_factory=dict)
    ceilings: Ceilings | None = None
    rounds: int | None = None
    seed: int | None = None
    failures: Mapping[str, str] = field(default_factory=dict)  # kernels that do not compile
    stopped: str | None = None

    @property
    def results(self) -> list[SmallResult]:
        """The results of all calls."""
        return [result for row in self.rows for result in row.results]

    @property
    def means(self) -> tuple[Mean, ...]:
        """Geometric mean and least of the ratios to the best peer, by variant and head dim, and of all."""
        groups = dict.fromkeys(f"{row.shape.variant} d{row.shape.head_dim}" for row in self.rows)
        found = [
            mean_of(of, [row for row in self.rows if f"{row.shape.variant} d{row.shape.head_dim}" == of])
            for of in groups
        ]
        return tuple(mean for mean in (*found, mean_of("all", self.rows)) if mean is not None)

    @property
    def ok(self) -> bool:
        """Whether ours was measured, and none failed."""
        ours = [row.ours.status for row in self.rows]
        return self.stopped is None and not self.failures and "measured" in ours and "failed" not in ours

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document."""
        return {
            "format": FORMAT, "suite": "small", "spec": self.spec, "package": self.package, "ok": self.ok,
            "stopped": self.stopped, "sustained": self.sustained, "gpu": None if self.gpu is None else dict(self.gpu),
            "versions": dict(self.versions), "ceilings": None if self.ceilings is None else asdict(self.ceilings),
            "rounds": self.rounds, "seed": self.seed, "rows": [row.to_dict() for row in self.rows],
            "means": [mean.to_dict() for mean in self.means], "failures": dict(self.failures),
        }  # fmt: skip
