"""``attngen package``: a wheel of a spec's kernels, a source distribution that compiles them later, or a Hub kernel."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attngen import resources
from attngen.commands.arguments import SPEC
from attngen.commands.filtering import filtering
from attngen.commands.output import Progress, print_json, print_table, warn
from attngen.drivers import drivers_text
from attngen.formats import VERSION

if TYPE_CHECKING:
    from attngen.build.kernel_filter import KernelFilter
    from attngen.packaging.hub import HubKernel
    from attngen.packaging.make import PackageFiles


@click.command()
@click.argument("spec", type=SPEC)
@click.option(
    "--out", "-o",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("dist"),
    show_default=True,
    help="The folder that the files go to.",
)  # fmt: skip
@click.option("--wheel", is_flag=True, help="Make the wheel; the default without --sdist and --hub.")
@click.option("--sdist", is_flag=True, help="Make a source distribution, which compiles where it is installed.")
@click.option("--hub", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
              help="Write a kernel for the Hugging Face Hub into this folder.")  # fmt: skip
@filtering
@click.option("--tuned", multiple=True, type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="Choices of `attngen tune` for kernels that leave them open; a file, or h100.")  # fmt: skip
@click.option("--version", default=VERSION, show_default=True, metavar="VERSION",
              help="Version of the package; by default attngen's.")  # fmt: skip
@click.option("--max-size", metavar="SIZE", help="Refuse a larger wheel than this, such as '8 MB', and say why.")
@click.option("--platform", "platforms", multiple=True, metavar="TAG",
              help="Platform tag of the wheel; may be repeated. Default: Linux on x86_64 and on aarch64.")  # fmt: skip
@click.option("--licence", type=click.Path(path_type=Path, dir_okay=False), help="A file with your own licence.")
@click.option("--jobs", "-j", type=click.IntRange(min=1), help="Compiles at once; default: as cores and memory allow.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def command(
    spec: Path,
    out: Path,
    wheel: bool,
    sdist: bool,
    hub: Path | None,
    only: KernelFilter,
    tuned: tuple[Path, ...],
    version: str,
    max_size: str | None,
    platforms: tuple[str, ...],
    licence: Path | None,
    jobs: int | None,
    as_json: bool,
) -> None:
    """Make a wheel of a spec's kernels: installed next to torch, it needs no compiler. Needs no GPU.

    With --hub, make a kernel for the Hugging Face Hub of the same files.
    """
    from attngen.packaging.hub import hub_kernel
    from attngen.packaging.make import package
    from attngen.packaging.project import Choices
    from attngen.packaging.settings import PLATFORMS, check_platforms, size_in_bytes

    most = None if max_size is None else size_in_bytes(max_size)
    measured = tuple(map(resources.tuned_file, tuned))
    choices = Choices(version, only, check_platforms(platforms) or PLATFORMS, licence, measured)
    wheel = wheel or not (sdist or hub)
    targets = [name for name, wanted in (("wheel", wheel), ("sdist", sdist)) if wanted]
    if hub is not None and not wheel and (max_size is not None or platforms):
        option = "--platform" if max_size is None else "--max-size"
        raise click.UsageError(f"{option} is about a wheel, and --hub alone makes none; add --wheel, or leave it out")
    made, kernel = None, None
    with Progress(shown=sys.stderr.isatty()) as progress:
        if targets:
            made = package(spec, out, choices, targets=targets, max_size=most, jobs=jobs, observer=progress)
        if hub is not None:
            kernel = hub_kernel(spec, hub, choices, jobs=jobs, observer=progress)
    if as_json:
        print_json(_report(made, kernel))
        return
    if made is not None:
        _print(made)
    if kernel is not None:
        _print_hub(kernel, said=made is not None and bool(made.drivers))


def _report(made: PackageFiles | None, kernel: HubKernel | None) -> dict[str, Any]:
    """The report that ``--json`` prints; ``hub`` is null without --hub."""
    from attngen.packaging.make import PackageFiles

    if kernel is None:
        assert made is not None
        return {**made.to_dict(), "hub": None}
    made = made or PackageFiles(kernel.package, ())
    return {**made.to_dict(), "drivers": dict(kernel.drivers), "hub": kernel.to_dict()}


_COLUMNS = ("variant", "head_dim", "arch", "kernels", "cubin B", "in the wheel B")


def _print(made: PackageFiles) -> None:
    if made.sizes is not None:
        rows: list[tuple[object, ...]] = [
            (share.variant, share.head_dim, share.arch, share.kernels, share.cubin_bytes, share.wheel_bytes)
            for share in made.sizes.shares
        ]
        print_table(_COLUMNS, [*rows, ("(runtime, stubs, metadata)", "", "", 0, 0, made.sizes.rest)])
    for path in made.files:
        click.echo(f"{path}: {path.stat().st_size:,} B")
    if made.drivers:
        click.echo(f"The wheel needs an NVIDIA driver: {drivers_text(made.drivers)}.")
    if made.note:
        warn(made.note)


def _print_hub(kernel: HubKernel, *, said: bool) -> None:
    """Print what was written; the drivers and the note, too, unless the lines of the wheel said them."""
    for build in kernel.builds:
        click.echo(f"{build.folder}: {build.files} files, {build.bytes:,} B")
    if said:
        return
    click.echo(f"The kernels need an NVIDIA driver: {drivers_text(kernel.drivers)}.")
    if kernel.note:
        warn(kernel.note)
