"""``attngen bench --suite small`` and ``--oracle``: tables of small calls, and of kernels beside the fastest ones."""

from __future__ import annotations

from datetime import date
from typing import TYPE_CHECKING

import click

from attngen.commands.output import counted, print_table
from attngen.lab.commands.bench_output import (
    columns,
    print_absent,
    print_end,
    print_failed,
    print_means,
    print_readings,
    ratio,
)

if TYPE_CHECKING:
    from attngen.lab.bench.small.oracle import OracleReport
    from attngen.lab.bench.small.report import SmallReport


def print_small(report: SmallReport) -> None:
    """Print microseconds of all contenders, ratios to the best library, and who is absent or failed."""
    names = columns(one for one in report.results if one.microseconds is not None)
    lines = []
    for row in report.rows:
        times = {one.contender: one.microseconds for one in row.results if one.microseconds is not None}
        figures = [f"{times[name]:.2f}" if name in times else "" for name in names]
        lines.append([row.name, *figures, ratio(row.to_peer(row.own)), (row.own.kernel or "").rpartition("/")[2]])
    if names:
        print_table(["µs", *names, "speed / best peer", "kernel"], lines)
    print_means(report, "call", lambda of, _: [of])
    print_readings(report)
    print_absent(report, "call")
    print_failed(report)
    how = "in samples of 60 ms without pauses" if report.sustained else "of replayed graphs"
    print_end(report, f"; medians of {report.rounds} rounds {how}")


def print_plan(report: SmallReport) -> None:
    """Print the calls and who makes them."""
    names = columns(report.results)
    rows = []
    for row in report.rows:
        planned = {result.contender for result in row.results if result.status == "planned"}
        rows.append([row.name, *("x" if name in planned else "" for name in names)])
    print_table(["call", *names], rows)
    print_absent(report, "call")
    click.echo(f"{report.package}: {counted(len(report.rows), 'call')}; nothing was measured")


def print_oracle(report: OracleReport) -> None:
    """Print the comparison, and the constants that suit the times best."""
    rows = [
        [
            row.name, row.taken, f"{row.measured[row.taken]:.1f}", f"{row.predicted.get(row.taken, 0):.1f}",
            *((row.best, f"{min(row.measured.values()):.1f}", f"{100 * row.lost:.1f} %") if row.lost else ("", "", "")),
        ]
        for row in report.rows
        if row.taken is not None
    ]  # fmt: skip
    if rows and report.lost is not None:
        print_table(("call", "taken", "us", "predicted", "fastest", "us", "lost"), rows)
        mean, most = report.lost
        click.echo(f"lost: {100 * mean:.2f} % in the mean of {len(rows)} calls, {100 * most:.1f} % at most")
    if report.fit is not None:
        from attngen.schema.measured_times import times_text

        fit = report.fit
        click.echo(
            f"times fitted, as in tuned/hopper_times.yaml; errors {100 * fit.error:.1f} % root mean square, "
            f"{100 * fit.largest:.0f} % at most:"
        )
        gpu, method = str((report.gpu or {}).get("name")), f"attngen bench --oracle, medians of {report.rounds} rounds"
        click.echo(times_text(fit.launch_ns, fit.rows, gpu=gpu, date=date.today().isoformat(), method=method), nl=False)
    for name, reason in report.all_failures.items():
        click.secho(f"{name}: {reason}", fg="red", err=True)
