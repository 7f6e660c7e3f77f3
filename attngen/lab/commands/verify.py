"""``attngen verify``: the kernels of a spec against the float64 reference."""

from __future__ import annotations

import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click

from attngen import cli
from attngen.commands.arguments import SPEC
from attngen.commands.output import console, print_json, print_table
from attngen.errors import LoadError

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from attngen.lab.verify.verdict import Verdict, VerifyReport


@click.command()
@click.argument("spec", type=SPEC)
@click.option("--only", metavar="PART", help="Only kernels whose name contains this.")
@click.option("--retarget", is_flag=True, help="Plan kernels for other GPUs again for this one, and run those.")
@click.option("--interpret", is_flag=True, help="Use Triton's interpreter although there is a GPU.")
@click.option("--seed", type=click.IntRange(-(2**63), 2**63 - 1),
              help="Repeat a run: the same inputs as the run that printed this seed.")  # fmt: skip
@click.option("--jobs", "-j", type=click.IntRange(min=1), help="Processes at once; default: as cores and memory allow.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.pass_context
def command(
    context: click.Context,
    spec: Path,
    only: str | None,
    retarget: bool,
    interpret: bool,
    seed: int | None,
    jobs: int | None,
    as_json: bool,
) -> None:
    """Run every kernel of a spec on ragged shapes with fresh inputs, and compare it with the float64 reference.

    Results and tile maps start as garbage, and all that lies after a sequence's end is NaN. Kernels that the cache
    lacks are compiled. A kernel that crashes is named, and the others run on in a fresh process. Without a GPU, fp16
    and fp32 kernels run in Triton's interpreter. Exits 1 if a kernel fails, or if none could be run.
    """
    if find_spec("torch") is None:
        raise LoadError("verify computes the reference with torch: install it as pytorch.org says")
    from attngen.lab.verify.run import verify

    with _Progress() as progress:
        report = verify(
            spec,
            only=only,
            retargeted=retarget,
            interpret=interpret or None,
            seed=seed,
            jobs=jobs,
            observer=progress.done,
        )
    if as_json:
        print_json(report.to_dict())
    else:
        _print(report)
    if not report.ok:
        context.exit(cli.EXIT_FAILURE)


_COLUMNS = ("kernel", "max error", "allowed", "rmse", "allowed", "lse error", "dead rows", "result")


def _print(report: VerifyReport) -> None:
    shown = [verdict for verdict in report.verdicts if verdict.status != "not run"]
    if shown:
        print_table(_COLUMNS, [_row(verdict) for verdict in shown])
    for remark, count in Counter(_kind(v.remark) for v in shown if v.remark).items():
        click.echo(f"{_kernels(count)} {remark}")
    for verdict in report.with_status("failed"):
        for problem in verdict.problems:
            click.secho(f"{verdict.plan.name}: {problem}", fg="red", err=True)
    for reason, count in Counter(v.reason for v in report.with_status("not run")).items():
        click.echo(f"not run: {_kernels(count)}: {reason}")
    crashed = sum(verdict.crashed for verdict in report.verdicts)
    named = {"failed": f" ({crashed} crashed)"} if crashed else {}
    counts = ", ".join(f"{len(report.with_status(s))} {s}{named.get(s, '')}" for s in ("passed", "failed", "not run"))
    click.echo(f"{report.package} on {report.device}: {counts}; seed {report.seed}")
    if not shown:
        click.secho("nothing was verified", fg="red", err=True)


def _kind(remark: str | None) -> str:
    """Return a remark without the kernel's own name, so that equal ones count together."""
    return (remark or "").partition(": ran as ")[0]


def _row(verdict: Verdict) -> list[object]:
    name = verdict.plan.name if verdict.remark is None else f"{verdict.plan.name} *"
    if verdict.trial is None or not verdict.trial.tally.deviations:
        return [name, "", "", "", "", "", "", verdict.status]
    tally = verdict.trial.tally
    worst = tally.worst
    assert worst is not None
    figures = (worst.max_error, worst.max_allowed, tally.rmse, tally.rmse_allowed)
    lse = max(deviation.lse_error for deviation in tally.deviations)
    return [name, *(f"{figure:.1e}" for figure in (*figures, lse)), tally.dead_rows, verdict.status]


def _kernels(count: int) -> str:
    return f"{count} kernel{'' if count == 1 else 's'}"


class _Progress:
    """A bar on a terminal."""

    def __init__(self) -> None:
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> _Progress:
        if sys.stderr.isatty():
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

            columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
            self._bar = Progress(*columns, console=console(stderr=True), transient=True)
            self._task = self._bar.add_task("preparing", total=None)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def done(self, name: str, total: int) -> None:
        """Note that a kernel is done."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, total=total, advance=1, description=name)
