"""``attngen bench --ladder``: tables of each rung, its changed lines, and its speed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from attngen.commands.output import print_table
from attngen.lab.commands.bench_output import ratio

if TYPE_CHECKING:
    from attngen.lab.bench.grid import GridReport, GridRow, RungResult
    from attngen.lab.bench.ladder import Ladder


def print_ladders(report: GridReport) -> None:
    """Print the entry that each ladder begins with, and its rungs: a table for each case that was measured."""
    from attngen.lab.bench.grid import steps

    for ladder in report.ladders:
        click.secho(f"ladder of {ladder.of.name}", bold=True)
        first = next((rung for rung in ladder.rungs if rung.kernel is not None), None)
        if first is not None:
            click.echo(
                f"  {first.name}, as an entry of 'kernels'; a line of a later rung adds its field, or replaces it:"
            )
            for index, line in enumerate(first.lines):
                click.echo(f"  {'- ' if index == 0 else '  '}{line}")
        rows = [row for row in report.rows_of(ladder) if any(result.tflops is not None for result in row.results)]
        for row in rows:
            _print_case(report, row, steps(ladder, row))
        if not rows:
            _print_plan(report, ladder)
        for rung in ladder.rungs:
            if rung.refusal is not None:
                click.echo(f"not in the ladder: {rung.name}: {rung.refusal}")


def _print_case(report: GridReport, row: GridRow, steps: Sequence[RungResult]) -> None:
    from attngen.lab.bench.grid import memory_of

    lines = []
    for step in steps:
        if step.rung.kernel is None:
            continue
        memory = memory_of(step.rung, report.resources)
        used = (_registers(memory), _number(memory["shared_memory"]))
        lines.append([step.rung.name, *_figures(step), *used, _change(step)])
    names = ["rung", "TFLOP/s", "/ first", "/ previous", "/ last", "registers", "shared B", "changed"]
    print_table(names, lines, title=row.name)


def _print_plan(report: GridReport, ladder: Ladder) -> None:
    from attngen.lab.bench.grid import RungResult, memory_of

    lines = [
        [rung.name, _number(memory_of(rung, report.resources)["shared_memory"]), _change(RungResult(rung))]
        for rung in ladder.rungs
        if rung.kernel is not None
    ]
    print_table(["rung", "shared B", "changed"], lines)


def _figures(step: RungResult) -> tuple[str, ...]:
    if step.result is None or step.result.tflops is None:
        return step.result.status if step.result else "", "", "", ""
    mark = "*" if step.result.timing is not None and step.result.timing.host_bound else ""
    ratios = (step.to_first, step.to_previous, step.to_last)
    return f"{step.result.tflops:5.0f}{mark}", *(ratio(each, 3) for each in ratios)


def _number(value: int | None) -> str:
    return "" if value is None else str(value)


def _registers(memory: dict[str, int | None]) -> str:
    """Registers of a consumer's thread, after those at launch where roles redistribute them."""
    launched, own = memory["registers"], memory["consumer_registers"]
    return _number(own) if launched in (None, own) else f"{launched}, {own} to multiply"


def _change(step: RungResult) -> str:
    """Lines that differ from the rung before; the first rung's are printed above."""
    return "" if step.rung.changed == step.rung.lines else "; ".join(step.rung.changed)
