"""``attngen tune``: the fastest tile, stages and warps of each kernel of a spec on this GPU, as a file for builds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attngen import cli
from attngen.commands.arguments import SPEC
from attngen.commands.output import counted, print_json, print_table, refuse_unwritable

if TYPE_CHECKING:
    from attngen.lab.tune.run import TuneReport


@click.command()
@click.argument("spec", type=SPEC)
@click.option("--kernel", "part", metavar="PART", help="Only kernels whose name contains this.")
@click.option("--variant", "variants", multiple=True, metavar="NAME", help="Only this variant; may be repeated.")
@click.option("--pass", "passes", type=click.Choice(("forward", "backward", "both")), default="both",
              show_default=True, help="What is searched.")  # fmt: skip
@click.option("--seqlen", "seqlens", type=click.IntRange(1, 2**20), multiple=True, metavar="N",
              help="Queries and keys of a sequence; may be repeated.")  # fmt: skip
@click.option("--tokens", type=click.IntRange(1, 2**24), default=16384, show_default=True,
              help="Tokens of a call, in all sequences together.")  # fmt: skip
@click.option("--rounds", type=click.IntRange(1, 1000), default=5, show_default=True,
              help="Samples of each of the best candidates; their median counts.")  # fmt: skip
@click.option("--seconds", type=click.FloatRange(min=1), default=600, show_default=True,
              help="No kernel is started after this; the same command then resumes.")  # fmt: skip
@click.option("--out", "-o", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="The file of choices; default: NAME.tuned.yaml here.")  # fmt: skip
@click.option("--tables", type=click.Path(path_type=Path, exists=True, file_okay=False, writable=True), metavar="DIR",
              help="Also add rows to the planner's tables, and write these to DIR.")  # fmt: skip
@click.option("--restart", is_flag=True, help="Discard what an earlier search for the same file found.")
@click.option("--dry-run", is_flag=True, help="List kernels and how many candidates they have, and measure nothing.")
@click.option("--jobs", "-j", type=click.IntRange(min=1), help="Compiles at once; default: as cores and memory allow.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.pass_context
def command(
    context: click.Context,
    spec: Path,
    part: str | None,
    variants: tuple[str, ...],
    passes: str,
    seqlens: tuple[int, ...],
    tokens: int,
    rounds: int,
    seconds: float,
    out: Path | None,
    tables: Path | None,
    restart: bool,
    dry_run: bool,
    jobs: int | None,
    as_json: bool,
) -> None:
    """Find the fastest tile, stages and warps for the dense kernels of a spec on this GPU.

    All candidates of a kernel are compiled, checked against float64 and timed on the longest case; the best of them are
    then timed on every case against the plan's own choice. `attngen build SPEC --tuned FILE` applies the choices, each
    to its kernel; rows of `--tables` are for all kernels of the same work. A journal beside the file keeps what is
    done, so that an interrupted search can resume. Exits 1 if a kernel could not be searched.
    """
    from attngen.lab.tune import run

    directions = run.DIRECTIONS if passes == "both" else (passes,)
    options = run.TuneOptions(part, variants, directions, tokens, seqlens, rounds, seconds, jobs, restart, tables)
    if dry_run:
        rows = run.dry_run(spec, options)
        if as_json:
            fields = ("kernel", "plan", "candidates", "cases")
            print_json([dict(zip(fields, row, strict=True)) for row in rows])
        else:
            print_table(("kernel", "plan", "candidates", "cases"), rows)
            if not rows:
                click.echo("no dense kernel of the spec leaves tile, stages and warps open")
        return
    target = Path(f"{spec.name.split('.')[0]}.tuned.yaml") if out is None else out
    refuse_unwritable(target)

    def observe(row: Mapping[str, Any], done: int, total: int) -> None:
        click.echo(f"[{done}/{total}] {row['kernel']}: {_found(row)}", err=True)

    report = run.tune(spec, target, options, observe)
    if as_json:
        print_json(report.to_dict())
    else:
        _print(report, target)
        for file in report.tables.texts:
            kernels = [name for name, of in report.tables.rows.items() if of == file]
            click.echo(f"{tables and tables / file}: rows for {', '.join(kernels)}")
        for name, reason in report.tables.left_out.items():
            click.echo(f"no row for {name}: {reason}")
    if any(row["problem"] for row in report.rows):
        context.exit(cli.EXIT_FAILURE)


def _found(row: Mapping[str, Any]) -> str:
    if row["problem"]:
        return str(row["problem"])
    if not row["choice"]:
        return f"the plan's own is the fastest of {row['candidates']}"
    return f"{row['speedup']:.3f} times as fast with {_said(row['choice'])}"


def _said(choice: Mapping[str, Any]) -> str:
    """Write choices in one line: ``tile n 64, pipeline stages 2``."""

    def parts(fields: Mapping[str, Any]) -> str:
        return " ".join(f"{k} {parts(v) if isinstance(v, Mapping) else v}" for k, v in fields.items())

    return ", ".join(f"{name} {parts(fields)}" for name, fields in choice.items())


def _print(report: TuneReport, target: Path) -> None:
    columns = ("kernel", "candidates", "not compiled", "speedup", "choice")
    rows = [
        (
            row["kernel"],
            row["candidates"],
            row["refused"],
            f"{row['speedup']:.3f}",
            row["problem"] or _said(row["choice"]) or "the plan's",
        )
        for row in report.rows
    ]
    if rows:
        print_table(columns, rows)
    faster = sum(1 for row in report.rows if row["choice"])
    click.echo(
        f"{target}: {counted(faster, 'choice')} for {report.gpu}, of {counted(len(rows), 'kernel')} searched "
        f"in {report.seconds:.0f} s"
    )
    if report.left:
        click.echo(f"{counted(len(report.left), 'kernel')} left: the same command resumes with them")
