"""``import attngen`` brings nothing heavy along."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import attngen
from attngen.schema.names import RESERVED

HEAVY = ("torch", "triton", "cupy", "jinja2", "pydantic", "yaml", "numpy", "cuda")
BUILD_ONLY = ("triton", "cupy", "jinja2", "pydantic", "yaml")


def _imported(code: str, names: tuple[str, ...]) -> str:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}\nprint(*(n for n in {names!r} if n in sys.modules))"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.strip()


def test_import_is_light() -> None:
    assert _imported("import attngen", HEAVY) == ""


@pytest.mark.exhaustive
def test_a_call_imports_no_part_of_the_build() -> None:
    code = (
        "import attngen, torch\n"
        "assert attngen.attention and attngen.load and attngen.debug and attngen.tile_map and attngen.explain\n"
        "from attngen.lang.check import compile_variant\n"
        "q = torch.zeros(1, 2, 1, 16)\n"
        "attngen.attention(q, q, q, variant=compile_variant('causal', 'q_pos >= kv'))"
    )
    imported = set(_imported(code, BUILD_ONLY).split())
    assert not imported - {"triton"}, "torch itself may import triton"


def test_names() -> None:
    assert set(attngen.__all__) <= set(dir(attngen))
    assert attngen.errors.CallError
    with pytest.raises(AttributeError, match="no attribute 'atention'"):
        attngen.atention  # noqa: B018


@pytest.mark.parametrize("call", ["attention", "attention_paged", "attention_varlen", "explain", "tile_map"])
def test_a_spec_cannot_take_the_name_of_an_argument(call: str) -> None:
    parameters = inspect.signature(getattr(attngen, call)).parameters
    assert {name for name, p in parameters.items() if p.kind is not p.VAR_KEYWORD} <= RESERVED
