"""Files of figures: runs of benchmarks with card, date and commit, from which README's numbers are recomputed.

``attngen bench --record FILE`` writes them; docs/figures/speed.json is the project's own.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from attngen import resources
from attngen.files import read_regular
from attngen.lab.bench.cases import DIRECTIONS

#: Date or commit of a run of which it was not kept, or of a checkout with changes.
UNKNOWN = "unknown"

#: Name of attngen's own contender in the cells; others are peers.
OWN = "attngen"

SPEED, TIME = "TFLOP/s", "milliseconds"


@dataclass(frozen=True, slots=True)
class BenchRun:
    """Figures of one kind on one card: ``cells`` by cell and contender, in ``unit``, None where nothing was measured.

    ``commit`` is that of the kernels measured. ``source`` says how the figures were made, or where they are from.
    """

    figures: str
    card: str
    date: str
    commit: str
    source: str
    unit: str
    cells: Mapping[str, Mapping[str, float | None]]
    versions: Mapping[str, str] = field(default_factory=dict)

    def ratios(self, part: str = "", peer: str | None = None) -> dict[str, float]:
        """attngen's speed over that of the fastest peer, or of one, by cell, where both were measured.

        ``part`` leaves cells out whose name does not hold it.
        """
        ratios = {name: self._ratio(cell, peer) for name, cell in self.cells.items() if part in name}
        return {name: ratio for name, ratio in ratios.items() if ratio is not None}

    def _ratio(self, cell: Mapping[str, float | None], peer: str | None) -> float | None:
        kernels = [name for name in cell if name.startswith(OWN)]
        own = cell.get(OWN if OWN in cell or len(kernels) != 1 else kernels[0])
        peers = [name for name in cell if name not in kernels and peer in (None, name)]
        others = [figure for figure in map(cell.get, peers) if figure is not None]
        if own is None or not others:
            return None
        return own / max(others) if self.unit == SPEED else min(others) / own


def mean_and_range(ratios: Iterable[float]) -> tuple[float, float, float]:
    """Geometric mean, least and most of some ratios."""
    kept = list(ratios)
    return geometric_mean(kept), min(kept), max(kept)


def read_runs(path: Path) -> list[BenchRun]:
    """The runs of a file, none if there is no such file. Raises ValueError if it holds anything else."""
    if not path.is_file():
        return []
    try:
        return [BenchRun(**row) for row in json.loads(read_regular(path))["runs"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} holds no runs of benchmarks: {error}") from None


def write_runs(path: Path, runs: Sequence[BenchRun]) -> None:
    """Put runs into a file, each in the place of an earlier one of the same figures and card."""
    by_name = {(run.figures, run.card): run for run in (*read_runs(path), *runs)}
    path.write_text(json_of([by_name[name] for name in sorted(by_name)]), encoding="utf-8")


def json_of(runs: Sequence[BenchRun]) -> str:
    """The text of a file of runs, with a line for each cell."""

    def member(name: str, value: object) -> str:
        if name != "cells":
            return f"{json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}"
        assert isinstance(value, dict)
        lines = [f"    {json.dumps(cell, ensure_ascii=False)}: {json.dumps(row)}" for cell, row in value.items()]
        return '"cells": {\n' + ",\n".join(lines) + "\n   }"

    texts = ["  {\n   " + ",\n   ".join(member(*pair) for pair in asdict(run).items()) + "\n  }" for run in runs]
    return '{\n "runs": [\n' + ",\n".join(texts) + "\n ]\n}\n"


def runs_of(document: Mapping[str, Any], commit: str | None, source: str) -> list[BenchRun]:
    """The runs in the document that ``attngen bench --json`` writes for the grid, for variants, or for masks."""
    cells = _mask_cells if document.get("suite") == "masks" else _grid_cells
    common = {
        "card": document["gpu"]["name"], "date": datetime.now(timezone.utc).date().isoformat(),
        "commit": commit or UNKNOWN, "source": source,
        "versions": {name: version for name, version in document["versions"].items() if version is not None},
    }  # fmt: skip
    by_figures: dict[str, dict[str, dict[str, float | None]]] = {}
    for row in document["rows"]:
        for figures, cell, values in cells(row):
            by_figures.setdefault(figures, {})[cell] = values
    return [
        BenchRun(figures=figures, unit=TIME if figures.startswith("masks ") else SPEED, cells=rows, **common)
        for figures, rows in by_figures.items()
    ]


def _grid_cells(row: Mapping[str, Any]) -> Iterable[tuple[str, str, dict[str, float | None]]]:
    figures = row["direction"] if row["suite"] == "grid" else f"{row['suite']} {row['direction']}"
    cell = row["name"].replace(f" {row['direction']} ", " ")
    yield figures, cell, {result["contender"]: _rounded(result["tflops"]) for result in row["results"]}


def _mask_cells(row: Mapping[str, Any]) -> Iterable[tuple[str, str, dict[str, float | None]]]:
    for direction in DIRECTIONS:
        times = {one["contender"]: (one.get(direction) or {}).get("milliseconds") for one in row["results"]}
        yield (
            f"masks {direction}", f"{row['case']} d{row['head_dim']}",
            {contender: _rounded(time) for contender, time in times.items()},
        )  # fmt: skip


def _rounded(figure: float | None) -> float | None:
    """Four digits of a figure; timing does not repeat more."""
    return None if figure is None else float(f"{figure:.4g}")


def clean_commit() -> str | None:
    """The commit of the checkout that attngen runs from; None if it has changes, or is no checkout."""
    root = resources.root()
    if not (root / ".git").exists():
        return None

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return None if git("status", "--porcelain") else git("rev-parse", "--short=12", "HEAD")
    except (OSError, subprocess.CalledProcessError):
        return None
