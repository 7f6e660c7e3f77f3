"""``attngen build``: from a spec to kernels in the cache, or to rendered sources."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attngen import cli
from attngen.commands.arguments import SPEC
from attngen.commands.filtering import filtering
from attngen.commands.output import Progress, print_json, print_table, warn

if TYPE_CHECKING:
    from attngen.build.generate import Generated
    from attngen.build.kernel_filter import KernelFilter
    from attngen.build.pipeline import BuildReport


@click.command()
@click.argument("spec", type=SPEC)
@filtering
@click.option("--tuned", multiple=True, type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="Choices of `attngen tune` for kernels that leave them open; a file, or h100.")  # fmt: skip
@click.option("--jobs", "-j", type=click.IntRange(min=1), help="Compiles at once; default: as cores and memory allow.")
@click.option("--render-only", is_flag=True, help="Write the rendered sources instead of compiling them.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("generated"),
    show_default=True,
    help="Where --render-only writes, in a folder named after the spec.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.pass_context
def command(
    context: click.Context,
    spec: Path,
    only: KernelFilter,
    tuned: tuple[Path, ...],
    jobs: int | None,
    render_only: bool,
    out: Path,
    as_json: bool,
) -> None:
    """Compile the kernels of a spec; needs no GPU.

    A line on stderr names each kernel that is done. Exits 1 if one does not compile, 2 if the spec is wrong or asks for
    a kernel that cannot be planned; the others are built anyway.
    """
    if render_only:
        if tuned:
            raise click.UsageError("rendered sources are those of the plan's own choices; leave out --tuned")
        from attngen.build.generate import generate

        generated = generate(spec, out, only)
        if as_json:
            print_json(generated.to_dict())
        else:
            _print_generated(generated)
        return
    from attngen.build.pipeline import build

    with Progress(shown=sys.stderr.isatty()) as progress:
        report = build(spec, only=only, tuned=tuned, jobs=jobs, observer=progress)
    if as_json:
        print_json(report.to_dict())
    else:
        _print(report)
    for warning in report.warnings:
        warn(warning)
    for count, failure in enumerate(report.failures):
        if count < _FULL_ERRORS:
            cli.print_error(failure.error)
        else:
            click.secho(str(failure.error).splitlines()[0], fg="red", err=True)
    if report.failures:
        context.exit(cli.exit_code_of(failure.error for failure in report.failures))


def _print(report: BuildReport) -> None:
    if report.up_to_date:
        click.echo(f"{report.package}: {_kernels(len(report.kernels))} up to date, nothing to do")
        return
    built = [kernel for kernel in report.kernels if kernel.origin == "built"]
    if built:
        print_table(_COLUMNS, (_row(kernel.name, kernel.manifest["resources"]) for kernel in built))
    for kernel in built:
        own = [row for row in kernel.refused if row["name"] == kernel.name]  # refused at first, then the least slow
        others = [row for row in kernel.refused if row["name"] != kernel.name]
        for row in own:
            why = "the other choices are slower" if others else "the plan has no other choice"
            click.echo(f"{kernel.name}: {row['reason']}; {why}")
        for count, row in enumerate(others):
            click.echo(f"{f'{kernel.name}: in place of' if count == 0 else '  and of'} {row['name']}: {row['reason']}")
        if kernel.advice:
            click.echo(f"  {kernel.manifest['backend']}, not {kernel.refused[0]['backend']}: {kernel.advice}")
    size = sum(kernel.manifest["resources"]["cubin_bytes"] for kernel in report.kernels)
    click.echo(
        f"{report.package}: {_kernels(len(report.kernels))}, {len(built)} built in {report.seconds:.1f} s, "
        f"{len(report.kernels) - len(built)} from the cache, {size / 1e6:.1f} MB"
        + (f"; {len(report.failures)} failed" if report.failures else "")
    )


#: Errors that are printed whole; of the others the first line, which names the kernel.
_FULL_ERRORS = 3

_COLUMNS = ("kernel", "registers", "spills B", "shared B", "cubin B", "seconds")


def _row(name: str, used: Mapping[str, Any]) -> Sequence[object]:
    figures = ("registers", "spills", "shared_memory", "cubin_bytes", "compile_seconds")
    return (name, *(used[figure] for figure in figures))


def _kernels(count: int) -> str:
    return f"{count} kernel{'' if count == 1 else 's'}"


def _print_generated(generated: Generated) -> None:
    for name in generated.changed:
        click.echo(f"wrote {generated.folder / name}")
    for name in generated.removed:
        click.echo(f"removed {generated.folder / name}")
    same = len(generated.kernels) - len(generated.changed)
    click.echo(
        f"{generated.folder}: {len(generated.changed)} written, {same} unchanged, {len(generated.removed)} removed"
    )
