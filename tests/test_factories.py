"""Tensors that the code makes name their device, and floats their dtype: neither default of torch's has an effect."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

#: Functions of torch that make a tensor on the default device; ``as_tensor`` moves a tensor to it, too.
FACTORIES = frozenset({
    "arange", "as_tensor", "asarray", "empty", "empty_permuted", "empty_strided", "eye", "full", "linspace", "logspace",
    "nested_tensor", "ones", "rand", "randint", "randn", "randperm", "range", "scalar_tensor", "sparse_coo_tensor",
    "tensor", "tril_indices", "triu_indices", "zeros",
})  # fmt: skip
#: Those whose dtype is the default one, or that of a number that may be a float.
OF_FLOATS = frozenset({
    "empty", "empty_permuted", "eye", "full", "linspace", "logspace", "ones", "rand", "randn", "scalar_tensor", "zeros",
})  # fmt: skip


def lacking(program: str) -> Iterator[tuple[int, str, str]]:
    """Line, text and missing keyword of each call."""
    for node in ast.walk(ast.parse(program)) if "torch" in program else ():
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=name)) if name in FACTORIES:
                given = {keyword.arg for keyword in node.keywords}
                wanted = {"device"} | ({"dtype"} if name in OF_FLOATS else set())
                if None not in given:  # **options
                    yield from ((node.lineno, ast.unparse(node), missing) for missing in sorted(wanted - given))


FILES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "attngen").rglob("*.py"))


def test_every_tensor_names_its_device_and_floats_their_dtype() -> None:
    lacking_calls = [
        f"{path}:{line}: {call} lacks {keyword}"
        for path in FILES
        for line, call, keyword in lacking((ROOT / path).read_text())
    ]
    assert not lacking_calls, "\n".join(lacking_calls)


@pytest.mark.parametrize(
    ("program", "missing"),
    [
        ("torch.zeros(3)", ["device", "dtype"]), ("torch.arange(3)", ["device"]), ("torch.zeros_like(x)", []),
        ("torch.full((2,), 0.5, device=x.device)", ["dtype"]), ("x.new_zeros(3)", []),
        ("torch.rand(3, device='cpu', dtype=x.dtype)", []),
    ],
)  # fmt: skip
def test_what_is_found(program: str, missing: list[str]) -> None:
    assert [keyword for _, _, keyword in lacking(program)] == missing
