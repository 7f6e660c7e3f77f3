"""``attngen bench --suite trees``: tables of prefix trees beside their sequences apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from attngen.commands.output import counted, print_table
from attngen.lab.commands.bench_output import print_absent, print_end, print_failed, print_readings, ratio

if TYPE_CHECKING:
    from attngen.lab.bench.trees import TreeReport, TreeRow


def print_plan(report: TreeReport) -> None:
    """Print the cells, with what a tree leaves of tokens and visible pairs."""
    print_table(["cell", "shape", "tokens", "apart", "left", "pairs left"], [_sizes(row) for row in report.rows])
    click.echo(f"trees: {counted(len(report.rows), 'cell')}; nothing was measured")


def print_trees(report: TreeReport) -> None:
    """Print milliseconds of both sides, their ratios, and who failed."""
    from attngen.lab.bench.cases import DIRECTIONS
    from attngen.lab.bench.trees import APART, TREE

    lines = []
    for row in report.rows:
        figures: list[str] = []
        for direction in DIRECTIONS:
            times = (row.milliseconds(side, direction) for side in (TREE, APART))
            figures += [*("" if time is None else f"{time:.3f}" for time in times), ratio(row.speed(direction))]
        lines.append([row.name, *_sizes(row)[4:], *figures])
    if lines:
        columns = [f"{direction} {what}" for direction in DIRECTIONS for what in ("ms", "apart", "apart / tree")]
        print_table(["cell", "tokens left", "pairs left", *columns], lines)
    print_readings(report)
    print_absent(report, "cell")
    print_failed(report)
    print_end(report, f"; medians of {report.rounds} rounds")


def _sizes(row: TreeRow) -> list[str]:
    """Cell, shape, tokens of both sides, and the shares of tokens and pairs that a tree leaves."""
    from attngen.lab.bench.trees import APART, TREE

    cell = row.cell
    shares = [f"{100 * each[TREE] / each[APART]:.1f} %" for each in (cell.tokens, cell.pairs)]
    tokens = [f"{cell.tokens[side]:,}" for side in (TREE, APART)]
    return [row.name, f"h{cell.heads}/{cell.kv_heads}", *tokens, *shares]
