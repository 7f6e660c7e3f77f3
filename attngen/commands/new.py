"""``attngen new``: a commented spec that builds as it stands."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable
from pathlib import Path

import click

from attngen.cards import SUPPORT
from attngen.dtypes import ATTENTION_DTYPES
from attngen.errors import Location, SpecError, StoreError
from attngen.files import cause
from attngen.lang.ir import INDEX_NAMES
from attngen.lang.parser import CONSTANTS, FUNCTIONS


def _listed(title: str, words: Iterable[str], indent: str = "  ") -> str:
    """A comment that lists words, as wide as the others."""
    lines = textwrap.wrap(f"{title} {', '.join(words)}", 118 - len(indent), break_long_words=False)
    return "\n".join(f"{indent}# {line}" for line in lines)


_SCAFFOLD = """\
# Check with `attngen check {file}`, build with `attngen build {file}`.
schema: 1
package: {name}
{arches}
arch: [sm90a]

variants:
{variant}
kernels:                         # a list in a field makes one kernel for each of its values
  - variant: {name}
    head_dim: [64, 128]          # or {{qk: 192, v: 128}}
    dtype: bf16                  # {dtypes}
    layout: dense                # dense, varlen, paged
    # backend: triton            # left out: cuda, if the arch has it and it can do everything here; else triton
    # tile: {{m: 128, n: 64}}      # left out, the plan chooses these
    # pipeline: {{stages: 2}}
"""

#: Notes on expressions, above the variant.
_NOTES = f"""\
  # mask: true where query q sees key kv. q_pos is q counted so that the last query is at the last key.
  # score: the logit, from s. Leave out mask or score where there is none.
  # sink: a logit of each head that joins the softmax and has no value. dropout: true drops at the rate of the call.
{_listed("Names:", [*INDEX_NAMES, *CONSTANTS, "True", "False", "and those declared"])}
  # Operators: + - * / // % ** & | ^ << >> ~, comparisons, and or not, x if c else y.
{_listed("Functions:", FUNCTIONS)}
"""

_EXAMPLE = """\
  {name}:
    mask: "0 <= q_pos - kv and q_pos - kv < window"
    score: "s + slope[h] * (kv - q_pos)"
    scalars:                     # given at the call: attngen.attention(q, k, v, variant="{name}", window=256, ...)
      window: {{type: int32, min: 1}}
    tensors:
      slope: {{dtype: float32, shape: [h]}}
"""


def scaffold(name: str, preset: str | None, file: str) -> str:
    """Return the text of a spec with the one variant ``name``: a copy of a preset, or an example to change.

    Raises SpecError for a name that a variant or a package may not have, and for a preset that does not exist.
    """
    from attngen.schema.names import check_package_name

    try:
        check_package_name(name)
    except ValueError as error:
        raise SpecError(str(error), field="NAME") from error
    body = _EXAMPLE.format(name=name) if preset is None else _copy_of(preset, name)
    arches = "; ".join(f"{arch} ({row.cards})" for arch, row in SUPPORT.items())
    arches = _listed("arch:", [f"one or more of {arches}"], "")
    dtypes = ", ".join(ATTENTION_DTYPES)
    return _SCAFFOLD.format(name=name, file=file, arches=arches, dtypes=dtypes, variant=_NOTES + body)


def _copy_of(preset: str, name: str) -> str:
    """Return the lines of a preset's variant, under a new name, with the preset's opening comment above them."""
    from attngen import resources
    from attngen.schema.presets import declared_preset

    declared_preset(preset)  # refuses an unknown name, with the nearest preset
    text = (resources.specs_dir() / "presets" / f"{preset}.yaml").read_text(encoding="utf-8")
    comment = "".join(f"  {line}\n" for line in re.match(r"(#.*\n)*", text)[0].splitlines())  # type: ignore[index]
    declared = re.search(rf"^variants:\n  {preset}:\n((?:    .*\n|\n)*)", text, re.MULTILINE)
    assert declared is not None, f"{preset}.yaml does not declare its variant as the other presets do"
    return f"{comment}  {name}:\n{declared[1].rstrip()}\n"


@click.command()
@click.argument("name")
@click.option("--preset", metavar="P", help="Start from a preset variant, such as causal or sliding_window.")
@click.option("--out", metavar="FILE", type=click.Path(path_type=Path), help="The file; default: specs/NAME.yaml.")
def command(name: str, preset: str | None, out: Path | None) -> None:
    """Write a commented spec with one variant NAME, which builds as it stands. Never overwrites a file."""
    path = out or Path("specs") / f"{name}.yaml"
    text = scaffold(name, preset, path.name if out else path.as_posix())
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError as error:
        raise SpecError("exists already; name another file with --out", location=Location(str(path))) from error
    except OSError as error:
        raise StoreError(f"{path}: cannot be written: {cause(error)}") from error
    click.echo(f"wrote {path}; next: attngen check {path}")
