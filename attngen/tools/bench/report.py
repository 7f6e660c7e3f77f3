"""What a race found: figures, ratios to the best peer, geometric means, and all of it as JSON."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from attngen.tools.bench.cases import DIRECTIONS, SUITES, BenchCase
from attngen.tools.bench.ladder import Ladder, Rung
from attngen.tools.bench.machine import Ceilings, Reading
from attngen.tools.bench.timing import Timing

#: Version of the JSON document.
FORMAT = 2


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one contestant in one case.

    ``status`` is measured, planned (a dry run), unsupported (``reason`` says why) or failed. ``kernel`` names a kernel
    of ours; a peer has none. ``error`` is relative to float64, infinite for a NaN. ``workspace`` are the bytes that a
    backward held beside its inputs and gradients, ``workspace_bound`` the most that one of ours may.
    """

    contestant: str
    kernel: str | None = None
    status: str = "planned"
    reason: str | None = None
    timing: Timing | None = None
    tflops: float | None = None
    error: float | None = None
    workspace: int | None = None
    workspace_bound: int | None = None
    reading: Reading | None = None  # of the card meanwhile, in a sustained race

    @property
    def ours(self) -> bool:
        """Whether a kernel of the spec ran."""
        return self.kernel is not None

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
            "tflops": self.tflops,
            "relative_error": self.error if self.error is not None and math.isfinite(self.error) else None,
            "milliseconds": timing and timing.milliseconds,
            "samples": list(timing.samples) if timing else [],
            "host_microseconds": timing and timing.host_us,
            "host_bound": timing and timing.host_bound,
            **({"gpu": asdict(self.reading), "joules_per_tflop": self.joules} if self.reading is not None else {}),
            "workspace_bytes": self.workspace,
            "workspace_bound_bytes": self.workspace_bound,
        }


def joules(reading: Reading | None, tflops: float | None) -> float | None:
    """Return the joules for 10¹² operations of a kernel that does so many TFLOP/s."""
    return reading.watts / tflops if reading is not None and tflops else None


@dataclass(frozen=True, slots=True)
class Row:
    """One case. ``pairs`` and ``flops`` are None in a dry run, ``reading`` also where nothing could be read."""

    case: BenchCase
    results: tuple[Result, ...]
    pairs: float | None = None
    input_sets: int | None = None
    reading: Reading | None = None

    @property
    def best_peer(self) -> Result | None:
        """The fastest peer; None if none was measured."""
        peers = [result for result in self.results if not result.ours and result.tflops is not None]
        return max(peers, key=lambda result: result.tflops or 0.0, default=None)

    @property
    def ratios(self) -> dict[str, float]:
        """The speed of each kernel of ours by that of the best peer."""
        best = self.best_peer
        if best is None or best.tflops is None:
            return {}
        return {r.contestant: r.tflops / best.tflops for r in self.results if r.ours and r.tflops is not None}

    def to_dict(self) -> dict[str, Any]:
        """Return it as the report holds it."""
        case, best = self.case, self.best_peer
        return {
            "name": case.name,
            "suite": case.suite,
            "direction": case.direction,
            "variant": case.variant,
            "dtype": case.dtype,
            "head_dim_qk": case.head_dim_qk,
            "head_dim_v": case.head_dim_v,
            "batch": case.batch,
            "seqlen": case.seqlen,
            "heads": case.heads,
            "kv_heads": case.kv_heads,
            "visible_pairs": self.pairs,
            "flops": None if self.pairs is None else case.flops(self.pairs),
            "input_sets": self.input_sets,
            "gpu": None if self.reading is None else asdict(self.reading),
            "best_peer": best and best.contestant,
            "ratios": self.ratios,
            "results": [result.to_dict() for result in self.results],
        }


@dataclass(frozen=True, slots=True)
class Mean:
    """Geometric mean and least of the ratios of each of our contestants over some cases, and over how many."""

    of: str
    ratios: Mapping[str, float]
    least: Mapping[str, float]
    cases: Mapping[str, int]

    def to_dict(self) -> dict[str, Any]:
        """Return it as the report holds it."""
        return asdict(self)


class Rated(Protocol):
    """A case with the speed of each of our contestants by that of the best peer."""

    @property
    def ratios(self) -> dict[str, float]: ...


def mean_of(of: str, rows: Iterable[Rated]) -> Mean | None:
    """Return the means over the cases in which a contestant and a peer were measured; None if none has two of them."""
    ratios: dict[str, list[float]] = {}
    for row in rows:
        for name, ratio in row.ratios.items():
            ratios.setdefault(name, []).append(ratio)
    several = {name: found for name, found in ratios.items() if len(found) > 1}
    if not several:
        return None
    return Mean(
        of,
        {name: statistics.geometric_mean(found) for name, found in several.items()},
        {name: min(found) for name, found in several.items()},
        {name: len(found) for name, found in several.items()},
    )


@dataclass(frozen=True, slots=True)
class Step:
    """A rung of a ladder in one case: its speed, and that by the speeds of the rungs before it and of the last one.

    All three are None where the rung, or the one that it is compared with, was not measured.
    """

    rung: Rung
    result: Result | None
    to_previous: float | None
    to_last: float | None

    def to_dict(self) -> dict[str, Any]:
        """Return it as the report holds it."""
        return {
            "name": self.rung.name,
            "tflops": self.result and self.result.tflops,
            "to_previous": self.to_previous,
            "to_last": self.to_last,
        }


def steps(ladder: Ladder, row: Row) -> tuple[Step, ...]:
    """Return the rungs of a ladder as a case found them."""
    results = {result.contestant: result for result in row.results}
    speeds = {name: result.tflops for name, result in results.items() if result.tflops is not None}
    last = speeds.get(ladder.rungs[-1].name)
    found, previous = [], None
    for rung in ladder.rungs:
        speed = speeds.get(rung.name)
        found.append(
            Step(
                rung,
                results.get(rung.name),
                speed / previous if speed is not None and previous is not None else None,
                speed / last if speed is not None and last is not None else None,
            )
        )
        previous = speed if speed is not None else previous
    return tuple(found)


@dataclass(frozen=True, slots=True)
class BenchReport:
    """All that a race found. ``left_out`` maps kernels to the reason; ``stopped`` says why the race did not end.

    ``ladders`` are those that were raced, if that was asked for; ``resources`` holds what the compiler said of each
    kernel.
    """

    spec: str
    package: str
    rows: tuple[Row, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)
    gpu: Mapping[str, Any] | None = None
    versions: Mapping[str, str | None] = field(default_factory=dict)
    ceilings: Ceilings | None = None
    rounds: int | None = None
    seed: int | None = None
    stopped: str | None = None
    ladders: tuple[Ladder, ...] = ()
    resources: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def rows_of(self, ladder: Ladder) -> list[Row]:
        """Return the cases in which the rungs of a ladder were raced."""
        names = {kernel.plan.name for kernel in ladder.kernels.values()}
        return [row for row in self.rows if {result.kernel for result in row.results} <= names]

    @property
    def groups(self) -> dict[str, list[Row]]:
        """The rows that differ in their lengths only, in their order."""
        found: dict[str, list[Row]] = {}
        for row in self.rows:
            found.setdefault(row.case.group, []).append(row)
        return found

    @property
    def directions(self) -> list[str]:
        """Forward or backward or both, as far as cases have them."""
        return list(dict.fromkeys(row.case.direction for row in self.rows))

    @property
    def means(self) -> tuple[Mean, ...]:
        """The means of each group and of each suite, as far as they have two cases or more."""
        found = (mean_of(of, rows) for of, rows in [*self.groups.items(), *self._suites().items()])
        return tuple(mean for mean in found if mean is not None)

    def _suites(self) -> dict[str, list[Row]]:
        """Return the rows of each suite in each direction, such as ``grid`` and ``grid backward``."""
        return {
            suite if direction == "forward" else f"{suite} {direction}": [
                row for row in self.rows if (row.case.suite, row.case.direction) == (suite, direction)
            ]
            for direction in DIRECTIONS
            for suite in SUITES
        }

    def to_causal(self, row: Row) -> dict[str, float]:
        """Return the time of each contestant per visible pair by that of our fastest causal kernel.

        That is of the case which differs in its variant only; empty where it was not measured, and on the grid.
        """
        if row.case.suite != "variants":
            return {}
        causal = replace(row.case, variant="causal")
        ours = [r.tflops for other in self.rows if other.case == causal for r in other.results if r.ours and r.tflops]
        return {r.contestant: max(ours) / r.tflops for r in row.results if r.tflops} if ours else {}

    @property
    def results(self) -> list[Result]:
        """The results of all cases."""
        return [result for row in self.rows for result in row.results]

    @property
    def ok(self) -> bool:
        """Whether a kernel of ours was measured, and none failed."""
        ours = [result.status for result in self.results if result.ours]
        return self.stopped is None and "measured" in ours and "failed" not in ours

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document."""
        return {
            "format": FORMAT,
            "spec": self.spec,
            "package": self.package,
            "ok": self.ok,
            "stopped": self.stopped,
            "gpu": None if self.gpu is None else dict(self.gpu),
            "versions": dict(self.versions),
            "ceilings": None if self.ceilings is None else asdict(self.ceilings),
            "rounds": self.rounds,
            "seed": self.seed,
            "rows": [{**row.to_dict(), "to_causal": self.to_causal(row)} for row in self.rows],
            "means": [mean.to_dict() for mean in self.means],
            "left_out": dict(self.left_out),
            "ladders": [self._ladder(ladder) for ladder in self.ladders],
        }

    def _ladder(self, ladder: Ladder) -> dict[str, Any]:
        return {
            "kernel": ladder.of.name,
            "rungs": [
                {
                    "name": rung.name,
                    "kernel": rung.plan and rung.plan.name,
                    "entry": list(rung.lines),
                    "changed": list(rung.changed),
                    "refusal": rung.refusal,
                    **memory_of(rung, self.resources),
                }
                for rung in ladder.rungs
            ],
            "cases": [
                {"name": row.case.name, "rungs": [step.to_dict() for step in steps(ladder, row)]}
                for row in self.rows_of(ladder)
            ],
        }


def memory_of(rung: Rung, resources: Mapping[str, Mapping[str, Any]]) -> dict[str, int | None]:
    """Return the registers per thread that a launch reserves and a multiplying warp has, and bytes of shared memory.

    None for what is not known before the kernel is compiled, or does not exist.
    """
    found = rung.plan
    if found is None or not found.structure.shared:
        return {"registers": None, "consumer_registers": None, "shared_memory": None}
    launched = resources.get(found.name, {}).get("registers")
    roles = found.structure.warp_roles
    own = (
        max(role.registers for role in roles) if len(roles) > 1 else launched
    )  # all that do the same keep the launch's
    return {"registers": launched, "consumer_registers": own, "shared_memory": found.structure.shared_bytes}
