"""``attngen bench --suite small`` and ``--oracle``: what is printed of calls of little work, and of kernels beside the
fastest ones; and of the card in sustained races."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from attngen.commands.output import counted, print_table

if TYPE_CHECKING:
    from attngen.tools.bench.report import Result
    from attngen.tools.bench.small.oracle import Compared, OracleReport
    from attngen.tools.bench.small.report import SmallReport, SmallResult, SmallRow
    from attngen.tools.bench.small.run import SmallOptions


def run_small(spec: Path, options: SmallOptions, dry_run: bool, write: Callable[[SmallReport], None]) -> bool:
    """Run the suite, print it, and return whether all went well. ``write`` takes each report so far."""
    from attngen.tools.bench.small import run as tool

    if dry_run:
        report = tool.dry_run(spec, options)
        write(report)
        names = [peer.name for peer in tool.named(tool.small_peers(), options.peers)]
        rows = []
        for row in report.rows:
            planned = {result.contestant for result in row.results}
            rows.append([row.shape.name, *("x" if name in planned else "" for name in (*names, "attngen"))])
        print_table(["call", *names, "attngen"], rows)
        click.echo(f"{report.package}: {counted(len(report.rows), 'call')}; nothing was measured")
        return True

    def observe(report: SmallReport, total: int) -> None:
        write(report)
        click.echo(f"[{len(report.rows)}/{total}] {_figures(report.rows[-1])}", err=True)

    report = tool.bench_small(spec, options, observe)
    write(report)
    print_small(report)
    return report.ok


def _figures(row: SmallRow) -> str:
    figures = [f"{one.contestant} {one.microseconds:.1f}" for one in row.results if one.microseconds is not None]
    return f"{row.shape.name}: {', '.join(figures) or 'nothing was measured'} µs"


def print_small(report: SmallReport) -> None:
    """Print microseconds of all contestants, ratios to the best library, and who is not in the race."""
    names = list(dict.fromkeys(one.contestant for one in report.results if one.microseconds is not None))
    lines = []
    for row in report.rows:
        times = {one.contestant: one.microseconds for one in row.results if one.microseconds is not None}
        ratio = next(iter(row.ratios.values()), None)
        cells = [f"{times[name]:.2f}" if name in times else "" for name in names]
        lines.append([row.shape.name, *cells, "" if ratio is None else f"{ratio:.2f}", _kernel(row.ours)])
    if names:
        print_table(["µs", *names, "speed / best peer", "kernel"], lines)
    means = [
        [mean.of, f"{ratio:.3f}", f"{mean.least[name]:.3f}", f"{mean.cases[name]}"]
        for mean in report.means
        for name, ratio in mean.ratios.items()
    ]
    if means:
        print_table(["speed / best peer", "geometric mean", "least", "calls"], means)
    print_readings([(row.shape.name, row.results) for row in report.rows])
    absent = [(one.contestant, one.reason) for one in report.results if one.status == "unsupported"]
    for (name, why), count in Counter(absent).items():
        click.echo(f"not in {counted(count, 'call')}: {name}: {why}")
    for name, why in report.failures.items():
        click.secho(f"{name}: {why}", fg="red", err=True)
    for one in report.results:
        if one.status == "failed":
            click.secho(f"{one.shape.name}: {one.contestant}: {one.reason}", fg="red", err=True)
    if report.gpu is not None:
        how = "in samples of 60 ms without pauses" if report.sustained else "of replayed graphs"
        click.echo(f"{report.package} on {report.gpu['name']}; medians of {report.rounds} rounds {how}")
    if report.stopped is not None:
        click.secho(report.stopped, fg="red", err=True)


def _kernel(result: SmallResult) -> str:
    return (result.kernel or "").rpartition("/")[2]


def print_readings(cases: Iterable[tuple[str, Iterable[Result | SmallResult]]]) -> None:
    """Print clock, power and energy of each contestant of sustained races; nothing where nothing was read."""
    lines = [
        [name, one.contestant, f"{one.tflops:.0f}", f"{one.reading.sm_mhz:.0f}", f"{one.reading.watts:.0f}",
         "" if one.joules is None else f"{one.joules:.2f}"]
        for name, results in cases
        for one in results
        if one.reading is not None and one.tflops is not None
    ]  # fmt: skip
    if lines:
        print_table(["sustained", "", "TFLOP/s", "MHz", "W", "J / TFLOP"], lines)


def run_oracle(
    spec: Path, part: str | None, rounds: int, jobs: int | None, write: Callable[[OracleReport], None]
) -> bool:
    """Time all kernels on all shapes, print what the choice loses, and return whether all went well."""
    from attngen.tools.bench.small.oracle import compare

    def observe(report: OracleReport, total: int) -> None:
        write(report)
        if report.rows:
            click.echo(f"[{len(report.rows)}/{total}] {_line(report.rows[-1])}", err=True)

    report = compare(spec, part, rounds, jobs, observe)
    write(report)
    print_oracle(report)
    return report.ok


def _line(row: Compared) -> str:
    return f"{row.shape.name}: {row.measured[row.taken]:.1f} us, {100 * row.lost:.1f} % above {row.best}"


def print_oracle(report: OracleReport) -> None:
    """Print the comparison, and the constants that suit the times best."""
    rows = [
        [
            row.shape.name, row.taken, f"{row.measured[row.taken]:.1f}", f"{row.predicted.get(row.taken, 0):.1f}",
            *((row.best, f"{row.measured[row.best]:.1f}", f"{100 * row.lost:.1f} %") if row.lost else ("", "", "")),
        ]
        for row in report.rows
    ]  # fmt: skip
    if rows:
        print_table(("call", "taken", "us", "predicted", "fastest", "us", "lost"), rows)
        mean, most = report.lost
        click.echo(f"lost: {100 * mean:.2f} % in the mean of {len(rows)} calls, {100 * most:.1f} % at most")
    if report.fit is not None:
        found = report.fit
        click.echo(
            f"constants fitted to these times, in ns (plan/times.py); errors {100 * found.error:.1f} % root mean "
            f"square, {100 * found.largest:.0f} % at most; launch {found.launch:.0f}"
        )
        rows = [[f"{r.consumers}", f"{r.tile_n}", f"{r.columns}", f"{r.tile:.1f}", f"{r.step:.1f}"]
                for r in found.rows]  # fmt: skip
        print_table(("consumers", "tile.n", "columns", "tile", "step"), rows)
    for name, reason in (report.failures or {}).items():
        click.secho(f"{name}: {reason}", fg="red", err=True)
