"""The figures of a race as a picture: TFLOP/s over seqlen, one panel for each mask, head_dim and dtype."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attngen.tools.bench_report import BenchReport, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Panels side by side, and inches of one.
_COLUMNS, _WIDTH, _HEIGHT = 3, 4.5, 3.4


def plot(report: BenchReport, path: Path) -> None:
    """Write the picture of a report; the ending of ``path`` picks the format. Raises OSError if it cannot be written.

    Needs matplotlib.
    """
    from matplotlib.figure import Figure

    groups = report.groups
    colours = {name: f"C{n}" for n, name in enumerate(dict.fromkeys(r.contestant for r in report.results))}
    columns = min(len(groups), _COLUMNS)
    lines = math.ceil(len(groups) / columns)
    figure = Figure(figsize=(_WIDTH * columns, _HEIGHT * lines), layout="constrained")
    axes = list(figure.subplots(lines, columns, squeeze=False).flat)
    for axis, (name, rows) in zip(axes, groups.items(), strict=False):
        _panel(axis, name, rows, colours, report.ceilings.matrix_tflops if report.ceilings else None)
    for axis in axes[len(groups) :]:
        axis.set_axis_off()
    if report.gpu is not None:
        figure.suptitle(f"forward attention, {report.gpu['name']}")
    figure.savefig(path, dpi=150)


def _panel(axis: Axes, name: str, rows: Sequence[Row], colours: Mapping[str, str], ceiling: float | None) -> None:
    """Draw one group: a line for each contestant, kernels of ours thick, and the matrix product as the ceiling."""
    lines: dict[tuple[str, bool], list[tuple[int, float]]] = {}
    for row in rows:
        for result in row.results:
            if result.tflops is not None:
                points = lines.setdefault((result.contestant, result.ours), [])
                points.append((row.case.seqlen, result.tflops))
    for (contestant, ours), points in lines.items():
        width = 2.5 if ours else 1.0
        found = zip(*sorted(points), strict=True)
        axis.plot(*found, marker="o", linewidth=width, color=colours[contestant], label=contestant)
    if ceiling is not None:
        axis.axhline(ceiling, color="black", linestyle=":", label="bf16 matrix product")
    seqlens = sorted({row.case.seqlen for row in rows})
    axis.set_xscale("log", base=2)
    axis.set_xticks(seqlens, [str(seqlen) for seqlen in seqlens])
    axis.set_ylim(bottom=0)
    axis.set_title(name)
    axis.set_xlabel("seqlen")
    axis.set_ylabel("TFLOP/s")
    axis.legend(fontsize="x-small")
