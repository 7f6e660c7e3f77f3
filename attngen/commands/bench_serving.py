"""``attngen bench --suite serving``: what it prints about decoding, appending and prefill over caches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from attngen.commands.output import counted, print_table

if TYPE_CHECKING:
    from attngen.tools.bench.serving.report import ServingReport, ServingResult, ServingRow
    from attngen.tools.bench.serving.run import ServingOptions


def run_serving(spec: Path, options: ServingOptions, dry_run: bool, write: Callable[[ServingReport], None]) -> bool:
    """Run the suite, print it, and return whether all went well. ``write`` takes each report so far."""
    from attngen.tools.bench.serving import run as tool

    if dry_run:
        report = tool.dry_run(spec, options)
        write(report)
        _print_plan(report)
        return True

    def observe(report: ServingReport, total: int) -> None:
        write(report)
        click.echo(f"[{len(report.rows)}/{total}] {_line(report.rows[-1])}", err=True)

    report = tool.bench_serving(spec, options, observe)
    write(report)
    _print(report)
    return report.ok


def _line(row: ServingRow) -> str:
    figures = [f"{one.contestant} {one.microseconds:.1f}" for one in row.results if one.microseconds is not None]
    return f"{row.cell.name}: {', '.join(figures) or 'nothing was measured'} µs"


def _print(report: ServingReport) -> None:
    lines = []
    for row in report.rows:
        measured = [result for result in row.results if result.microseconds is not None]
        lines += [[row.cell.name if one is measured[0] else "", *_cells(row, one)] for one in measured]
    if lines:
        print_table(
            ["cell", "", "form", "µs", "TB/s", "TFLOP/s", "speed / best peer", "time / beside", "host µs"], lines
        )
    means = [
        [f"{mean.of}: {lane}", f"{ratio:.3f}", f"{mean.least[lane]:.3f}", str(mean.cases[lane])]
        for mean in report.means
        for lane, ratio in mean.ratios.items()
    ]
    if means:
        print_table(["speed / best peer", "geometric mean", "least", "cells"], means)
    _print_reasons(report)
    if report.gpu is not None and report.ceilings is not None:
        click.echo(
            f"{report.package} on {report.gpu['name']}: copy {report.ceilings.copy_gbps:.0f} GB/s; medians of "
            f"{report.rounds} rounds of replayed graphs"
        )
    if report.stopped is not None:
        click.secho(report.stopped, fg="red", err=True)
    if not any(result.lane is not None and result.microseconds is not None for result in report.results):
        click.secho("no kernel was measured", fg="red", err=True)


def _cells(row: ServingRow, result: ServingResult) -> list[str]:
    assert result.timing is not None
    assert result.microseconds is not None
    peer, beside = row.to_peer(result), row.to_beside(result)
    return [
        result.contestant,
        result.form.name,
        f"{result.microseconds:.2f}" if result.microseconds < 100 else f"{result.microseconds:.1f}",
        f"{result.tbps:.2f}",
        f"{result.tflops:.0f}",
        "" if peer is None else f"{peer:.3f}",
        "" if beside is None else f"{beside:.3f}",
        f"{result.timing.host_microseconds:.1f}",
    ]


def _print_plan(report: ServingReport) -> None:
    lines = []
    for row in report.rows:
        for result in row.results:
            if result.status == "planned":
                lines.append([row.cell.name, result.contestant, result.form.name])
    if lines:
        print_table(["cell", "contestant", "form"], lines)
    _print_reasons(report)
    click.echo(f"{report.package}: {counted(len(report.rows), 'cell')}; nothing was measured")


def _print_reasons(report: ServingReport) -> None:
    """Print who is not in the race, and why, and what failed."""
    for name, reason in report.left_out.items():
        click.echo(f"left out: {name}: {reason}")
    absent = [(one.contestant, one.reason) for one in report.results if one.status == "unsupported"]
    for (name, why), count in Counter(absent).items():
        click.echo(f"not in {counted(count, 'cell')}: {name}: {why}")
    for row in report.rows:
        for one in row.results:
            if one.status == "failed":
                click.secho(f"{row.cell.name}: {one.contestant}, {one.form.name}: {one.reason}", fg="red", err=True)
