"""Constants of choices and of predicted times say where they were measured, or that they were not."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

#: Modules whose constants decide between kernels, tiles, orders and cuts, or predict times.
MODULES = [
    path.relative_to(ROOT / "attngen")
    for pattern in (
        "families/hopper_*/*.py", "plan/choices.py", "plan/times.py", "plan/traits.py", "plan/allowances.py",
        "runtime/geometry/*.py", "runtime/launch/tile_map.py", "runtime/registry/order.py",
        "runtime/operations/attention/beside.py", "runtime/operations/attention/mixed.py", "parallel/*.py",
    )
    for path in sorted((ROOT / "attngen").glob(pattern))
]  # fmt: skip

#: Constants that follow from how kernels are built, from instructions, or from the limits of cards.
STRUCTURAL = {
    "_BACKWARD", "_BLOCK", "_CLUSTER", "_COLUMNS_OF_FEW_REGISTERS", "_CONSUMERS", "_FRAGMENT_KEYS", "_LEAST_KEYS",
    "_MOST_BLOCKS", "_MULTIPROCESSORS", "_POINTERS", "_QUERY_VALUES", "_TILE", "_TILE_INFO_BYTES", "_TILE_ROWS",
    "_TILE_SCALES_BYTES", "_TRANSPOSERS", "_VALUE_BYTES", "_WARPGROUP",
}  # fmt: skip

_PLACE = re.compile(r'(docs/[\w/]+\.md), "([^"]+)"')


def constants(text: str) -> Iterator[tuple[int, str, str]]:
    """Line, first name and comment of each private number, or group of numbers, of a module."""
    lines, comment, end = text.splitlines(), "", 0
    for statement in ast.parse(text).body:
        if not isinstance(statement, ast.Assign):
            continue
        first = statement.lineno - 1
        while lines[first - 1].startswith("#:"):
            first -= 1
        if first < statement.lineno - 1 or end < first:  # else it shares the comment of the one above
            comment = " ".join(line.removeprefix("#:").strip() for line in lines[first : statement.lineno - 1])
        end = statement.end_lineno or 0
        names = [node.id for node in ast.walk(statement.targets[0]) if isinstance(node, ast.Name)]
        if all(re.fullmatch(r"_[A-Z0-9_]+", name) for name in names) and _is_numeric(statement.value):
            yield statement.lineno, names[0], comment


def _is_numeric(value: ast.expr) -> bool:
    """Whether an expression is made of numbers alone."""
    parts = [node for node in ast.walk(value) if isinstance(node, ast.expr)]
    return all(isinstance(node, ast.Constant | ast.BinOp | ast.UnaryOp | ast.Tuple) for node in parts) and all(
        isinstance(node.value, int | float) and not isinstance(node.value, bool)
        for node in parts
        if isinstance(node, ast.Constant)
    )


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_constants_say_where_they_were_measured(module: Path) -> None:
    for line, name, comment in constants((ROOT / "attngen" / module).read_text()):
        place = f"{module}:{line}: {name}"
        assert name in STRUCTURAL or _says_where(comment), f"{place}: name the page and heading, or say 'Not measured'"
        for page, heading in _PLACE.findall(comment):
            headings = re.findall(r"^#+ (.*)$", (ROOT / page).read_text(), re.MULTILINE)
            assert heading in headings, f"{place}: {page} has no heading '{heading}'"


def _says_where(comment: str) -> bool:
    return bool(_PLACE.search(comment) or re.search(r"\b([Nn]ot|was|were) (not )?measured|Measured on", comment))


def test_a_constant_without_a_place_is_noticed() -> None:
    text = "#: Waves, at most.\n_A = 6\n#: Not measured.\n_B, _C = 1, 2.5\n_D = -3\n\n_E = (1, 2)\n_F = f(1)\nG = 1\n"
    assert [(name, _says_where(comment)) for _, name, comment in constants(text)] == [
        ("_A", False), ("_B", True), ("_D", True), ("_E", False),
    ]  # fmt: skip
