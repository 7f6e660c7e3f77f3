"""Results of the suite of small calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attngen.lab.bench.report import Report, Result, Row, grouped
from attngen.lab.bench.small.shapes import Shape

#: Version of the JSON document.
FORMAT = 1

#: The column of attngen.
OWN = "attngen"


@dataclass(frozen=True, kw_only=True)
class SmallRow(Row[Result]):
    """One call."""

    shape: Shape

    @property
    def name(self) -> str:
        """See ``Row``."""
        return self.shape.name

    @property
    def own(self) -> Result:
        """The result of attngen."""
        return next(result for result in self.results if not result.peer)

    def to_dict(self) -> dict[str, Any]:
        """See ``Row``."""
        best = self.best_peer(self.own)
        row = {**super().to_dict(), **self.shape.to_dict()}
        return {**row, "best_peer": best and best.contender, "to_peer": self.to_peer(self.own)}


@dataclass(frozen=True, kw_only=True)
class SmallReport(Report[SmallRow]):
    """A run of small calls so far; ``sustained`` says whether samples are taken without pauses."""

    sustained: bool = False

    @property
    def groups(self) -> dict[str, list[SmallRow]]:
        """See ``Report``: by variant and head dim, and all."""
        groups = grouped(self.rows, lambda row: f"{row.shape.variant} d{row.shape.head_dim}")
        return {**groups, "all": list(self.rows)}

    def to_dict(self) -> dict[str, Any]:
        """The JSON document."""
        return {
            **super().to_dict(), "format": FORMAT, "suite": "small", "sustained": self.sustained,
            "failures": dict(self.failures),
        }  # fmt: skip
