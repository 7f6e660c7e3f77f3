"""``attngen spec``: a spec from what a program has already."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from pathlib import Path

import click

from attngen.arch import ARCHES
from attngen.commands.output import warn
from attngen.dtypes import HEAD_DIM_STEP, HEAD_DIMS, WIDE_HEAD_DIMS
from attngen.errors import SpecError, StoreError, suggest
from attngen.files import cause


@click.command()
@click.option("--from-flex", "functions", multiple=True, metavar="MODULE:FUNCTION",
              help="A mask_mod or score_mod of FlexAttention; one of each may be given, for one variant.")  # fmt: skip
@click.option("--model", type=click.Path(path_type=Path), metavar="CONFIG",
              help="The config.json of a model of transformers, or the folder that holds it.")  # fmt: skip
@click.option("--name", default=None, metavar="NAME",
              help="Name of the variant, or of the model's package; default: the function's, the model's.")  # fmt: skip
@click.option("--arch", multiple=True,
              help="Architecture; may be repeated.  [default: sm90a]")  # fmt: skip
@click.option("--head-dim", type=int, multiple=True,
              help="Head dimension of functions' kernels; may be repeated.  [default: 64, 128]")  # fmt: skip
@click.option("--training", "--backward", is_flag=True, help="Also build the backward kernels that training needs.")
@click.option("--dtype", multiple=True, type=click.Choice(["bf16", "fp16", "fp32"]),
              help="dtype for a model; may be repeated. Default: that of its configuration.")  # fmt: skip
@click.option("--serving", is_flag=True,
              help="Also build what serving a model needs: kernels over pages, and split-KV kernels.")  # fmt: skip
@click.option("--max-size", metavar="SIZE",
              help="The largest wheel for a model, such as '8 MB'; a plain number is in MiB.")  # fmt: skip
@click.option("--out", "-o", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="Where to write it; default: standard output.")  # fmt: skip
def command(
    functions: tuple[str, ...],
    model: Path | None,
    name: str | None,
    arch: tuple[str, ...],
    head_dim: tuple[int, ...],
    training: bool,
    dtype: tuple[str, ...],
    serving: bool,
    max_size: str | None,
    out: Path | None,
) -> None:
    """Print a spec for what a program has already: functions written for FlexAttention, or a model.

    Facts that bound a kernel's loops are read from the tensors that functions capture; the spec declares them, and
    calls must keep to them. A model runs without weights, and its spec has the kernels that its layers need; nothing is
    downloaded.
    """
    if bool(functions) == (model is not None):
        raise click.UsageError("give --from-flex or --model, and not both")
    if model is None:
        options = {"--dtype": dtype, "--serving": serving, "--max-size": max_size}
    else:
        options = {"--head-dim": head_dim}
    for option, given in options.items():
        if given:
            raise click.UsageError(f"{option} cannot be combined with {'--model' if model else '--from-flex'}")
    if model is None:
        text = _of_functions(functions, name, arch or ("sm90a",), head_dim, training)
    else:
        text = _of_model(model, name, arch or ("sm90a",), training, dtype, serving, max_size)
    if out is None:
        click.echo(text, nl=False)
        return
    try:
        out.write_text(text, "utf-8")
    except OSError as error:
        raise StoreError(f"{out}: cannot be written: {cause(error)}") from error
    click.echo(f"wrote {out}; next: attngen check {out}")


def _of_functions(
    functions: tuple[str, ...], name: str | None, arch: tuple[str, ...], head_dim: tuple[int, ...], training: bool
) -> str:
    """Return the spec of functions written for FlexAttention."""
    from attngen.integrations.flex.spec import flex_spec

    for dim in head_dim:
        if dim not in (*HEAD_DIMS, *WIDE_HEAD_DIMS):
            least, most = HEAD_DIMS[0], WIDE_HEAD_DIMS[-1]
            raise SpecError(f"--head-dim: found {dim}; allowed: multiples of {HEAD_DIM_STEP} from {least} to {most}")
    kernel: dict[str, object] = {
        "arch": list(dict.fromkeys(arch)), "head_dim": list(dict.fromkeys(head_dim)) or [64, 128],
    }  # fmt: skip
    if training:
        kernel["passes"] = ["forward", "backward"]
    return flex_spec([_imported(place) for place in functions], name, kernel)


def _of_model(
    model: Path, name: str | None, arch: tuple[str, ...], training: bool, dtype: tuple[str, ...], serving: bool,
    max_size: str | None,
) -> str:  # fmt: skip
    """Return the spec of a model; remarks go to standard error."""
    from attngen.commands.spec_model import Wish, model_spec
    from attngen.integrations.transformers.model_config import dtype_of, read_config
    from attngen.integrations.transformers.model_requests import requests_of
    from attngen.packaging.settings import size_in_bytes
    from attngen.schema.names import check_package_name

    if name is not None:
        try:
            check_package_name(name)
        except ValueError as error:
            raise SpecError(f"--name: {error}") from None
    for one in arch:
        if one not in ARCHES:
            raise SpecError(f"--arch: found '{one}'{suggest(one, ARCHES)}; allowed: {', '.join(ARCHES)}")
    most = None
    if max_size is not None:
        most = size_in_bytes(f"{max_size} MiB" if max_size.strip().replace(".", "", 1).isdigit() else max_size)
    config = read_config(model)
    dtypes = tuple(dict.fromkeys(dtype))
    if not dtypes:
        named = dtype_of(config)
        if named is None:
            warn("the configuration names no dtype: the spec is for bf16; --dtype says otherwise")
        dtypes = (named or "bf16",)
    asking = [requests_of(config, each, training=training, serving=serving) for each in dtypes]
    package = name or re.sub("[^a-z0-9]+", "_", f"attention_{config.model_type}".lower())
    made = model_spec(
        asking, Wish(tuple(dict.fromkeys(arch)), training, serving), package=package, source=type(config).__name__,
        max_size=most,
    )  # fmt: skip
    for remark in made.remarks:
        warn(remark)
    return made.text


def _imported(place: str) -> object:
    """Return the function of ``MODULE:FUNCTION``."""
    module, colon, path = place.partition(":")
    if not colon or not module or not path:
        raise SpecError(f"--from-flex takes MODULE:FUNCTION, got '{place}'")
    if not all(part.isidentifier() for part in module.split(".")):
        raise SpecError(
            f"--from-flex takes MODULE:FUNCTION, and '{module}' is not the name of a module, as 'import' takes it"
        )
    sys.path.insert(0, "")
    try:
        value: object = import_module(module)
        for part in path.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError) as error:
        raise SpecError(f"--from-flex {place}: {error}") from error
    except (Exception, SystemExit) as error:  # whatever the module does when it is imported
        raise SpecError(f"--from-flex {place}: importing {module} raises {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove("")
    return value
