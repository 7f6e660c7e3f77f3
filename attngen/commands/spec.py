"""``attngen spec``: a spec from what a program has already."""

from __future__ import annotations

import sys
from importlib import import_module

import click

from attngen.errors import SpecError


@click.command()
@click.option("--from-flex", "functions", multiple=True, required=True, metavar="MODULE:FUNCTION",
              help="A mask_mod or score_mod of FlexAttention; one of each may be given, for one variant.")  # fmt: skip
@click.option("--name", default=None, metavar="NAME", help="Of the variant; left out, that of the first function.")
@click.option("--arch", multiple=True, help="Of an entry that builds it; may be repeated. Left out, nothing is built.")
@click.option("--head-dim", type=int, multiple=True, help="Of that entry; may be repeated.  [default: 64, 128]")
@click.option("--training", is_flag=True, help="Build its backward, too.")
def command(
    functions: tuple[str, ...], name: str | None, arch: tuple[str, ...], head_dim: tuple[int, ...], training: bool
) -> None:
    """Print a spec with what functions written for FlexAttention compute.

    Facts that make bands are found in the tensors that the functions capture, and are promised from then on.
    """
    from attngen.integrations.flex_spec import flex_spec

    kernel: dict[str, object] = {"arch": list(arch), "head_dim": list(head_dim) or [64, 128]} if arch else {}
    if training and arch:
        kernel["passes"] = ["forward", "backward"]
    click.echo(flex_spec([_imported(place) for place in functions], name, kernel), nl=False)


def _imported(place: str) -> object:
    """Return a function by its place."""
    module, colon, path = place.partition(":")
    if not colon or not module or not path:
        raise SpecError(f"--from-flex takes MODULE:FUNCTION, got '{place}'")
    sys.path.insert(0, "")
    try:
        found: object = import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise SpecError(f"--from-flex {place}: {error}") from error
    finally:
        sys.path.remove("")
    return found
