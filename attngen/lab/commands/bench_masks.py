"""``attngen bench --suite masks``: tables of masks and scores beside FlexAttention."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from attngen.commands.output import counted, print_table
from attngen.lab.commands.bench_output import print_absent, ratio

if TYPE_CHECKING:
    from attngen.lab.bench.masks.report import MaskReport, MaskResult, MaskRow

_COLUMNS = (
    "cell", "", "forward ms", "backward ms", "map ms", "", "speed / FlexAttention", "",
    "per tile / causal", "", "first call s", "second ms", "error",
)  # fmt: skip


def print_plan(report: MaskReport) -> None:
    """Print the cells."""
    rows = [[row.name, f"b1 s{row.cell.seqlen} h{row.cell.heads}/{row.cell.kv_heads}"] for row in report.rows]
    print_table(["cell", "shape"], rows)
    print_absent(report, "cell")
    click.echo(f"masks: {counted(len(rows), 'cell')}; nothing was measured")


def print_masks(report: MaskReport) -> None:
    """Print times and ratios of all cells, then means, what is slower or beyond its limit, and what failed."""
    from attngen.lab.bench.cases import DIRECTIONS
    from attngen.lab.bench.masks.report import CONSTANTS, FRONT_END, SCALARS

    lines = [
        [row.name if number == 0 else "", *_cells(row, one)]
        for row in report.rows
        for number, one in enumerate(one for one in row.results if one.status in ("measured", "compared"))
    ]
    if lines:
        print_table(_COLUMNS, lines)
    means = [
        [contender, direction, f"{mean[0]:.3f}", f"{mean[1]:.3f}", str(mean[2])]
        for contender in (CONSTANTS, SCALARS, FRONT_END)
        for direction in DIRECTIONS
        if (mean := report.mean(contender, direction)) is not None
    ]
    if means:
        print_table(["speed / FlexAttention", "", "geometric mean", "least", "cells"], means)
    for title, named in (
        ("slower than FlexAttention", report.slower),
        ("beyond the limits of a tile", report.beyond),
        ("not run, for lack of time", report.not_run),
    ):
        if named:
            click.echo("\n".join([f"{title}: {len(named)}", *(f"  {line}" for line in named)]))
    print_absent(report, "cell")
    for line in report.failed:
        click.secho(line, fg="red", err=True)
    if report.gpu is not None:
        click.echo(
            f"masks on {report.gpu['name']}: {counted(len(report.rows), 'cell')}, medians of {report.rounds} rounds "
            f"without pauses; {report.seconds.get('all', 0):.0f} s, of which {report.seconds.get('prepared', 0):.0f} "
            "before the first measurement"
        )
    if report.stopped is not None:
        click.secho(report.stopped, fg="red", err=True)


def _cells(row: MaskRow, one: MaskResult) -> list[str]:
    from attngen.lab.bench.cases import DIRECTIONS

    speeds = [ratio(row.speed(one, each)) if not one.peer else "" for each in DIRECTIONS]
    return [
        one.contender,
        *(_milliseconds(one, each) for each in DIRECTIONS),
        *(_of_map(row, one, each) for each in DIRECTIONS),
        *speeds,
        *(ratio(row.to_causal(one, each)) for each in DIRECTIONS),
        "" if one.first is None else f"{one.first:.1f}",
        "" if one.second is None else f"{one.second:.2f}",
        "" if one.error is None else f"{one.error:.0e}",
    ]


def _milliseconds(one: MaskResult, direction: str) -> str:
    timing = one.timings.get(direction)
    return "" if timing is None else f"{timing.milliseconds:.3f}{'*' if timing.host_bound else ''}"


def _of_map(row: MaskRow, one: MaskResult, direction: str) -> str:
    made = one.maps.get(direction)
    return "" if made is None else f"{made:.3f}{'' if row.reads else ' once'}"
