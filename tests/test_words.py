"""Docstrings say the thing itself, and variables are called what they hold."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

#: Not yet rewritten: packages of attngen, and "tests". Remove a name when its last finding is gone.
EXEMPT = {
    "commands",
    "runtime", "render", "compile", "tools", "integrations", "tests",
}  # fmt: skip

_INDIRECT = re.compile(r"Return (what|how|which|where|whether)\b")


def package_of(path: Path) -> str:
    """Package of attngen that a file is in, ``top-level modules``, or ``tests``."""
    top, *below = path.relative_to(ROOT).parts
    return "tests" if top == "tests" else below[0] if len(below) > 1 else "top-level modules"


FILES: dict[str, list[Path]] = {}
for file in sorted([*(ROOT / "attngen").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]):
    FILES.setdefault(package_of(file), []).append(file)


def faults(text: str) -> Iterator[tuple[int, str]]:
    """Line and fault of each docstring that begins indirectly, and of each binding of ``found``."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Module() | ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                if _INDIRECT.match(ast.get_docstring(node) or ""):
                    yield (
                        node.body[0].lineno,
                        "begin the docstring with what is returned, or with a verb for what is done",
                    )
            case ast.Name(id="found", ctx=ast.Store()) | ast.arg(arg="found"):
                yield node.lineno, "call this variable what it holds, not 'found'"


@pytest.mark.parametrize("package", sorted(set(FILES) - EXEMPT))
def test_words(package: str) -> None:
    lines = [
        f"{path.relative_to(ROOT)}:{line}: {fault}"
        for path in FILES[package]
        for line, fault in faults(path.read_text())
    ]
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ('"""Return what a call takes."""', 1),
        ('def f():\n    """Return the arguments of a call."""\n    """Return what is no docstring."""', 0),
        ('class A:\n    """Return\n    how."""', 0),
        ("found = 1\nfound: int = 1\nfor found in x: pass\nif found := x: pass\ndef f(found): return found", 5),
    ],
)
def test_faults(text: str, count: int) -> None:
    assert len(list(faults(text))) == count
