"""A picture of the figures: TFLOP/s over seqlen on the grid, and bars for variants, in each direction."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attngen.lab.bench.grid import GridReport, GridRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Panels side by side, and inches of one.
_COLUMNS, _WIDTH, _HEIGHT = 3, 4.5, 3.4

_INK = "#808080"

#: Settings of matplotlib that keep a picture readable on white and on black pages: grey ink, no background.
STYLE: Mapping[str, Any] = {
    "figure.facecolor": "none", "savefig.facecolor": "none", "axes.facecolor": "none", "legend.facecolor": "none",
    "legend.framealpha": 0.0, "text.color": _INK, "axes.edgecolor": _INK, "axes.labelcolor": _INK,
    "xtick.color": _INK, "ytick.color": _INK, "axes.grid": True, "grid.color": _INK, "grid.alpha": 0.25,
    "axes.axisbelow": True,
}  # fmt: skip

_Panel = Callable[["Axes"], None]


def plot(report: GridReport, path: Path) -> None:
    """Write the picture of a report; the ending of ``path`` picks the format. Raises OSError if it cannot be written.

    Needs matplotlib.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    colours = {name: f"C{n}" for n, name in enumerate(dict.fromkeys(r.contender for r in report.results))}
    panels = list(_panels(report, colours))
    columns = min(len(panels), _COLUMNS)
    lines = math.ceil(len(panels) / columns)
    with rc_context(dict(STYLE)):
        figure = Figure(figsize=(_WIDTH * columns, _HEIGHT * lines), layout="constrained")
        axes = list(figure.subplots(lines, columns, squeeze=False).flat)
        for axis, draw in zip(axes, panels, strict=False):
            draw(axis)
        for axis in axes[len(panels) :]:
            axis.set_axis_off()
        if report.gpu is not None:
            figure.suptitle(f"{' and '.join(report.directions)} attention, {report.gpu['name']}")
        figure.savefig(path, dpi=150)


def _panels(report: GridReport, colours: Mapping[str, str]) -> list[_Panel]:
    """A function that draws each panel: a group of the grid, or variants that were measured at the same sizes."""
    ceiling = report.ceilings.matrix_tflops if report.ceilings else None
    lines: dict[str, list[GridRow]] = {}
    bars: dict[str, list[GridRow]] = {}
    for row in report.rows:
        case = row.case
        if case.suite == "grid":
            lines.setdefault(case.group, []).append(row)
        else:
            direction = "" if case.direction == "forward" else f" {case.direction}"
            bars.setdefault(f"variants {case.shape}{direction} {case.length}", []).append(row)
    drawn = [partial(_lines, name=name, rows=rows, colours=colours, ceiling=ceiling) for name, rows in lines.items()]
    return [*drawn, *(partial(_bars, name=name, rows=rows, colours=colours) for name, rows in bars.items())]


def _lines(axis: Axes, name: str, rows: Sequence[GridRow], colours: Mapping[str, str], ceiling: float | None) -> None:
    """Draw one group: a line for each contender, attngen's thick, and the matrix product as the ceiling."""
    lines: dict[tuple[str, bool], list[tuple[int, float]]] = {}
    for row in rows:
        for result in row.results:
            if result.tflops is not None:
                points = lines.setdefault((result.contender, result.peer), [])
                points.append((row.case.seqlen, result.tflops))
    for (contender, peer), points in lines.items():
        width = 1.0 if peer else 2.5
        axes = zip(*sorted(points), strict=True)
        axis.plot(*axes, marker="o", linewidth=width, color=colours[contender], label=contender)
    if ceiling is not None:
        axis.axhline(ceiling, color=_INK, linestyle=":", label="bf16 matrix product")
    seqlens = sorted({row.case.seqlen for row in rows})
    axis.set_xscale("log", base=2)
    axis.set_xticks(seqlens, [str(seqlen) for seqlen in seqlens])
    axis.set_xlabel("seqlen")
    _finish(axis, name)


def _bars(axis: Axes, name: str, rows: Sequence[GridRow], colours: Mapping[str, str]) -> None:
    """Draw variants next to one another: a bar for each contender, attngen's filled."""
    peers = {result.contender: result.peer for row in rows for result in row.results if result.tflops is not None}
    width = 0.8 / max(len(peers), 1)
    for number, (contender, peer) in enumerate(peers.items()):
        speeds = [next((r.tflops for r in row.results if r.contender == contender), None) for row in rows]
        places = [index + (number + 0.5) * width - 0.4 for index, speed in enumerate(speeds) if speed is not None]
        heights = [speed for speed in speeds if speed is not None]
        colour = colours[contender]
        axis.bar(places, heights, width, edgecolor=colour, color="none" if peer else colour, label=contender)
    axis.set_xticks(range(len(rows)), [row.case.variant for row in rows], rotation=30, ha="right")
    _finish(axis, name)


def _finish(axis: Axes, name: str) -> None:
    axis.set_ylim(bottom=0)
    axis.set_title(name)
    axis.set_ylabel("TFLOP/s")
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize="x-small")
