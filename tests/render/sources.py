"""Rendered sources, and what the syntax trees of those in Python say about names."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache

from attngen.plan import Plan, plan
from attngen.render import Source, render
from attngen.resources import specs_dir
from attngen.schema import expand, load_spec

#: Shipped specs; the golden set holds all but those that only repeat others at more head dims.
SHIPPED = tuple(sorted(path.stem for path in specs_dir().glob("*.yaml")))
GOLDEN = tuple(name for name in SHIPPED if not name.endswith("_all"))
#: Those with kernels in Python; what holds for CUDA is in tests/render/test_cuda_sources.py.
_IN_CUDA = (
    "ada", "ampere", "blackwell_consumer", "fp8", "hopper", "hopper_all", "index", "ladder", "mla", "serving",
    "training",
)  # fmt: skip
TRITON = tuple(name for name in SHIPPED if name not in _IN_CUDA)


@cache
def rendered(name: str) -> tuple[tuple[Plan, Source], ...]:
    """Return every Triton kernel of a shipped spec with its source."""
    plans = [plan(spec) for spec in expand(load_spec(specs_dir() / f"{name}.yaml"))]
    here = tuple((planned, render(planned)) for planned in plans if planned.backend == "triton")
    assert here, f"{name} has no Triton kernel"
    return here


def assigned(function: ast.FunctionDef) -> set[str]:
    """Return every name that a function binds beside its parameters."""
    return {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def functions(text: str) -> Iterator[ast.FunctionDef]:
    """Yield the functions of a source."""
    yield from (node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef))


def kernels(text: str) -> Iterator[ast.FunctionDef]:
    """Yield the kernels of a source; helper functions have names of their own scope."""
    yield from (
        function for function in functions(text) if function.name.startswith(("fwd_", "bwd_", "jvp_", "classify_"))
    )


def parameters(function: ast.FunctionDef) -> list[str]:
    """Return the names of a function's parameters."""
    return [argument.arg for argument in function.args.args]
