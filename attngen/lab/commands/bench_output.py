"""Tables and lines that ``attngen bench`` prints for all suites."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import click

from attngen.commands.output import counted, print_table

if TYPE_CHECKING:
    from attngen.lab.bench.report import Report, Result


def print_means(report: Report[Any], noun: str, titled: Callable[[str, str], list[str]]) -> None:
    """Print geometric mean and least of the ratios to the best peer; ``titled`` names a mean and a contender."""
    rows = [
        [*titled(mean.of, label), f"{ratio:.3f}", f"{mean.least[label]:.3f}", str(mean.cases[label])]
        for mean in report.means
        for label, ratio in mean.ratios.items()
    ]
    if rows:
        print_table(["speed / best peer", "geometric mean", "least", f"{noun}s"], rows)


def print_readings(report: Report[Any]) -> None:
    """Print clock, power and energy of each contender without pauses; nothing where nothing was read."""
    lines = [
        [row.name, one.contender, f"{one.tflops:.0f}", f"{one.reading.sm_mhz:.0f}", f"{one.reading.watts:.0f}",
         "" if one.joules is None else f"{one.joules:.2f}"]
        for row in report.rows
        for one in row.results
        if one.reading is not None and one.tflops is not None
    ]  # fmt: skip
    if lines:
        print_table(["sustained", "", "TFLOP/s", "MHz", "W", "J / TFLOP"], lines)


def print_absent(report: Report[Any], noun: str) -> None:
    """Print the contenders that are not in some cases, with the reasons."""
    absent = [(one.contender, one.reason) for one in report.results if one.status == "unsupported"]
    for (name, reason), count in Counter(absent).items():
        click.echo(f"not in {counted(count, noun)}: {name}: {reason}")


def print_failed(report: Report[Any], named: Callable[[Any], str] = lambda result: result.contender) -> None:
    """Print kernels that do not compile and contenders that failed, in red."""
    lines = [f"{name}: {reason}" for name, reason in report.failures.items()]
    failed = [(row.name, one) for row in report.rows for one in row.results if one.status == "failed"]
    lines += [f"{name}: {named(one)}: {one.reason}" for name, one in failed]
    for line in lines:
        click.secho(line, fg="red", err=True)


def print_end(report: Report[Any], measured: str | None) -> None:
    """Print the card and the rules of the run (``measured``), and why it ended early or measured no kernel."""
    if report.gpu is not None and measured is not None:
        click.echo(f"{report.package} on {report.gpu['name']}{measured}")
    if report.stopped is not None:
        click.secho(report.stopped, fg="red", err=True)
    if not any(not one.peer and one.timing is not None for one in report.results):
        click.secho("no kernel was measured", fg="red", err=True)


def columns(results: Iterable[Result]) -> list[str]:
    """Names of contenders, each once: peers first, then attngen's."""
    ordered = sorted(results, key=lambda result: not result.peer)
    return list(dict.fromkeys(result.contender for result in ordered))


def ratio(value: float | None, digits: int = 2) -> str:
    """A ratio in a table; nothing where there is none."""
    return "" if value is None else f"{value:.{digits}f}"
