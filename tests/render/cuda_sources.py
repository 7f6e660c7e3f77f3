"""CUDA sources by regular expression: their code without comments, kernels, parameters and identifiers."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache

from attngen.plan import Plan, plan
from attngen.render import Source, render
from attngen.resources import root
from attngen.schema import expand, load_spec

SPECS = ("specs/hopper.yaml", "specs/ladder.yaml", "specs/serving.yaml", "specs/mla.yaml", "tests/gpu/kernels.yaml")

_KERNEL = re.compile(
    r'extern "C" __global__ void (?:__cluster_dims__\([^)]*\) )?__launch_bounds__\([^)]*\) '
    r"(?P<name>\w+)\((?P<parameters>[^)]*)\) \{"
)
_COMMENT = re.compile(r"//[^\n]*")


@cache
def rendered(spec: str) -> tuple[tuple[Plan, Source], ...]:
    """Return every CUDA kernel of a spec, named from the root of the checkout, with its source."""
    plans = [plan(kernel) for kernel in expand(load_spec(root() / spec))]
    here = tuple((planned, render(planned)) for planned in plans if planned.backend == "cuda")
    assert here, f"{spec} has no CUDA kernel"
    return here


def code(text: str) -> str:
    """Return a source without its comments."""
    return _COMMENT.sub("", text)


def kernels(text: str) -> dict[str, list[str]]:
    """Return the names of the parameters of each kernel of a source, in order."""
    parameters = {}
    for match in _KERNEL.finditer(code(text)):
        declarations = [" ".join(part.split()) for part in match["parameters"].split(",")]
        parameters[match["name"]] = [re.split(r"[ *]+", declaration)[-1] for declaration in declarations]
    return parameters


def identifiers(text: str) -> Counter[str]:
    """Count of each identifier in the code of a source; directives and quoted texts hold none."""
    plain = re.sub(r'^ *#[^\n]*|"[^"\n]*"', "", code(text), flags=re.MULTILINE)
    return Counter(re.findall(r"(?<![\w.])[A-Za-z_]\w*", plain))
