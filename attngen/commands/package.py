"""``attngen package``: a wheel of a spec's kernels, or a source distribution that compiles them later."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from attngen import resources
from attngen.commands.arguments import SPEC
from attngen.commands.filtering import filtering
from attngen.commands.output import Progress, print_json, print_table, warn
from attngen.drivers import drivers_text
from attngen.formats import VERSION

if TYPE_CHECKING:
    from attngen.build.kernel_filter import KernelFilter
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
@click.option("--wheel", is_flag=True, help="Make the wheel; the default without --sdist.")
@click.option("--sdist", is_flag=True, help="Make a source distribution, which compiles where it is installed.")
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
    only: KernelFilter,
    tuned: tuple[Path, ...],
    version: str,
    max_size: str | None,
    platforms: tuple[str, ...],
    licence: Path | None,
    jobs: int | None,
    as_json: bool,
) -> None:
    """Make a wheel of a spec's kernels: installed next to torch, it needs no compiler. Needs no GPU."""
    from attngen.packaging.make import package
    from attngen.packaging.project import Choices
    from attngen.packaging.settings import PLATFORMS, check_platforms, size_in_bytes

    most = None if max_size is None else size_in_bytes(max_size)
    measured = tuple(map(resources.tuned_file, tuned))
    choices = Choices(version, only, check_platforms(platforms) or PLATFORMS, licence, measured)
    targets = [name for name, wanted in (("wheel", wheel or not sdist), ("sdist", sdist)) if wanted]
    with Progress(shown=sys.stderr.isatty()) as progress:
        made = package(spec, out, choices, targets=targets, max_size=most, jobs=jobs, observer=progress)
    if as_json:
        print_json(made.to_dict())
    else:
        _print(made)


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
