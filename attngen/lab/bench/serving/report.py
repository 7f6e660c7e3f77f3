"""Results of the serving suite: times, rates, ratios to the best peer and to another lane."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from attngen.lab.bench.report import Report, Result, Row, grouped
from attngen.lab.bench.serving.cells import CacheShape, Lane, Problem, ServingCell

#: Version of the JSON document.
FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class ServingResult(Result):
    """Outcome for one contender in one form of a cell's cache. ``lane`` is that of attngen; a peer has none."""

    problem: Problem
    form: CacheShape
    lane: Lane | None = None

    @property
    def label(self) -> str:
        """See ``Result``: the name of the lane."""
        return self.lane.name if self.lane is not None else self.contender

    @property
    def tbps(self) -> float | None:
        """TB/s of the K and V that queries see."""
        return None if self.microseconds is None else self.problem.cache_bytes / self.microseconds / 1e6


@dataclass(frozen=True, kw_only=True)
class ServingRow(Row[ServingResult]):
    """One cell. ``input_sets`` are those of its first problem."""

    cell: ServingCell

    @property
    def name(self) -> str:
        """See ``Row``."""
        return self.cell.name

    def rivals(self, result: ServingResult) -> Iterable[ServingResult]:
        """See ``Row``: on the same problem, contiguous or over pages of any size as the result is."""
        paged = result.form.page_size is not None
        return (
            other
            for other in self.results
            if other.peer and other.problem == result.problem and (other.form.page_size is not None) == paged
        )

    def to_beside(self, result: ServingResult) -> float | None:
        """The time of a result of attngen over that of the lane that it is compared with."""
        for other in self.results:
            if other.lane is not None and result.lane is not None and other.lane.name == result.lane.beside:
                if other.microseconds is None or result.microseconds is None:
                    return None
                return result.microseconds / other.microseconds
        return None

    def to_dict(self) -> dict[str, Any]:
        """See ``Row``."""
        return {**super().to_dict(), "group": self.cell.group}

    def result_to_dict(self, result: ServingResult) -> dict[str, Any]:
        """See ``Row``."""
        problem, lane, best = result.problem, result.lane, self.best_peer(result)
        return {
            **result.in_microseconds(),
            "lane": lane and lane.name,
            "variant": problem.variant,
            "form": result.form.name,
            "heads_first": result.form.heads_first,
            "batch": problem.batch,
            "seqlen_q": problem.seqlen_q,
            "lengths": sorted(set(problem.lengths)),
            "heads": problem.heads,
            "kv_heads": problem.kv_heads,
            "tbps": result.tbps,
            "best_peer": best.contender if best is not None and not result.peer else None,
            "to_peer": self.to_peer(result),
            "beside": lane and lane.beside,
            "to_beside": self.to_beside(result),
        }


@dataclass(frozen=True, kw_only=True)
class ServingReport(Report[ServingRow]):
    """A run of the serving suite so far. ``left_out`` maps peers that are not here to the reason."""

    @property
    def groups(self) -> dict[str, list[ServingRow]]:
        """See ``Report``: cells of one group."""
        return grouped(self.rows, lambda row: row.cell.group)

    def to_dict(self) -> dict[str, Any]:
        """The JSON document."""
        return {**super().to_dict(), "format": FORMAT, "suite": "serving", "left_out": dict(self.left_out)}
