"""``attngen bench --suite serving``: tables of decoding, appending and prefill over caches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from attngen.commands.output import counted, print_table
from attngen.lab.commands.bench_output import print_absent, print_end, print_failed, print_means, ratio

if TYPE_CHECKING:
    from attngen.lab.bench.serving.report import ServingReport, ServingResult, ServingRow


def print_serving(report: ServingReport) -> None:
    """Print times, rates and ratios of all cells, means, and contenders that are absent or failed."""
    lines = []
    for row in report.rows:
        measured = [result for result in row.results if result.microseconds is not None]
        lines += [[row.name if one is measured[0] else "", *_cells(row, one)] for one in measured]
    if lines:
        print_table(
            ["cell", "", "form", "µs", "TB/s", "TFLOP/s", "speed / best peer", "time / beside", "host µs"], lines
        )
    print_means(report, "cell", lambda of, lane: [f"{of}: {lane}"])
    _print_reasons(report)
    reached = report.ceilings
    print_end(
        report, None if reached is None else f": copy {reached.copy_gbps:.0f} GB/s; medians of {report.rounds} rounds "
        "of replayed graphs"
    )  # fmt: skip


def _cells(row: ServingRow, result: ServingResult) -> list[str]:
    assert result.timing is not None
    assert result.microseconds is not None
    return [
        result.contender,
        result.form.name,
        f"{result.microseconds:.2f}" if result.microseconds < 100 else f"{result.microseconds:.1f}",
        f"{result.tbps:.2f}",
        f"{result.tflops:.0f}",
        ratio(row.to_peer(result), 3),
        ratio(row.to_beside(result), 3),
        f"{result.timing.host_us:.1f}",
    ]


def print_plan(report: ServingReport) -> None:
    """Print the cells and their contenders."""
    lines = [
        [row.name, one.contender, one.form.name]
        for row in report.rows
        for one in row.results
        if one.status == "planned"
    ]
    if lines:
        print_table(["cell", "contender", "form"], lines)
    _print_reasons(report)
    click.echo(f"{report.package}: {counted(len(report.rows), 'cell')}; nothing was measured")


def _print_reasons(report: ServingReport) -> None:
    for name, reason in report.left_out.items():
        click.echo(f"left out: {name}: {reason}")
    print_absent(report, "cell")
    print_failed(report, lambda result: f"{result.contender}, {result.form.name}")
