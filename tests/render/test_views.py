"""Views hold facts and the user's mathematics; the CUDA around these stands in templates."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from attngen import families, parts

#: Statements, comparisons, casts, and names of kernels.
CUDA = re.compile(
    r"[;?]$|\bconst \w+ |_cast\b|_ptr\b|stride_|&&|\|\||\bwork\.|\bspans\.|\bmax\(|\bmin\(|% \d|\bk[A-Z]|::"
)
#: Functions of statements that are weighed, moved and left out with those of the user's mathematics.
STATEMENTS = {"int_constant", "int_constants", "constant", "statement", "written"}

#: Views of CUDA kernels, and the parts that they share.
VIEWS = sorted(
    path
    for folder, pattern in (
        (families, "**/*view.py"),
        (families, "*/files.py"),
        (parts, "re*.py"),
        (parts, "*_view.py"),
    )
    for path in Path(folder.__path__[0]).glob(pattern)
    if path.parent.name != "triton"
)


def texts(tree: ast.Module) -> list[str]:
    """Strings that are neither docstrings nor patterns of statements."""
    left_out: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in STATEMENTS:
            left_out.update(ast.walk(node))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            left_out.add(node.value)
    constants = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and node not in left_out)
    return [node.value for node in constants if isinstance(node.value, str)]


@pytest.mark.parametrize("path", VIEWS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_views_hold_no_cuda(path: Path) -> None:
    assert [text for text in texts(ast.parse(path.read_text("utf-8"))) if CUDA.search(text)] == []


def test_cuda_is_seen() -> None:
    lines = 'f"const int {name} = 1;", f"lse_ptr[{name}]", int_constant("max(1, 2)"), "Q and K"'
    assert [text for text in texts(ast.parse(lines)) if CUDA.search(text)] == ["const int ", " = 1;", "lse_ptr["]
