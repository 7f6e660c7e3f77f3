"""Constants of choices and of predicted times say where they were measured, or that they were not."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]

#: Modules whose constants decide between kernels, tiles, orders and cuts, or predict times.
MODULES = [
    path.relative_to(ROOT / "attngen")
    for pattern in (
        "families/*/*.py", "plan/*.py", "parts/*.py", "parallel/*.py", "runtime/device/*.py", "runtime/geometry/*.py",
        "runtime/kernels/*.py", "runtime/launch/*.py", "runtime/registry/*.py", "runtime/operations/[!a]*/*.py",
        "runtime/operations/append/*.py", "runtime/operations/attention/beside.py",
        "runtime/operations/attention/mixed.py",
    )
    for path in sorted((ROOT / "attngen").glob(pattern))
]  # fmt: skip

#: Constants that follow from how kernels are built, from instructions, or from the limits of cards and of numbers.
STRUCTURAL = {
    "_ALIGNMENT", "_BACKWARD", "BARRIER_BYTES", "_BLOCK", "_BLOCK_ALIGNMENT", "BOX_COLUMNS", "_BYTES_OF_PARTS",
    "_CLEARED_AT_ONCE", "_CLUSTER", "_COLUMNS_OF_FEW_REGISTERS", "COLUMNS_OF_WORD", "_CONSUMERS",
    "_CONSUMER_BLACKWELL", "_COUNTERS", "_COUNTER_BYTES", "COUNT_BYTES", "DQ_BLOCK_BYTES", "DS_STEP_BYTES",
    "_ENTRY_BYTES", "_FILE", "_FLOAT", "_FLOAT32", "_FRAGMENT_KEYS", "GRANULARITIES", "_HEADS",
    "HEAD_DIMS", "_LARGE", "LEAST_SCALE", "LOOKUP_BYTES", "_MAX_HEAD_DIM", "MAX_ROWS", "MOST",
    "_MOST_BLOCKS", "MOST_LISTED", "_PAGE_DIGITS", "PART_BYTES", "PLAIN", "_POINTERS",
    "_PRODUCTS", "_PRODUCTS_IN_CUDA", "_P_TILES", "_QUERY_VALUES", "_RESERVED", "ROW_PADDING", "_SAMPLE_ADDRESSES",
    "_SAMPLE_EXTENTS", "_SCALE_BYTES", "_SCHEDULERS", "_SELDOM_BYTES", "SLOTS_OF_WORD", "SOURCES", "STEP_BYTES",
    "SUMS", "SUM_BYTES", "SWIZZLES", "_TILE", "_TILE_INFO_BYTES", "_TILE_ROWS", "_TILE_SCALES_BYTES",
    "_TRANSPOSERS", "UNFINISHED_BYTES", "_VALUE_BYTES", "_VALUE_SLOTS", "WALK_BYTES", "_WARPGROUP", "WARPGROUP",
    "_WARPGROUP_ROWS_PER_THREAD", "WARP_KEYS", "_WIDENED_BYTES", "_WORD", "_WORD_BITS", "WORK_BYTES", "_WRITERS",
}  # fmt: skip

_PLACE = re.compile(r'(docs/[\w/]+\.md), "([^"]+)"')

#: Documents of a limit, and numbers of an instruction.
_LIMIT = re.compile(r'(PTX ISA|CUDA C\+\+ Programming Guide|\(CUDA driver API), "|\b[MNK] of (wgmma|mma)')


def constants(text: str) -> Iterator[tuple[int, str, str]]:
    """Line, first name and comment of each number, group of numbers or table of tiles of a module: what stands above
    it, or behind it."""
    lines, comment, end = text.splitlines(), "", 0
    for statement in ast.parse(text).body:
        if not isinstance(statement, ast.Assign | ast.AnnAssign) or statement.value is None:
            continue
        first = statement.lineno - 1
        while lines[first - 1].startswith("#:"):
            first -= 1
        if first < statement.lineno - 1 or end < first:  # else it shares the comment of the one above
            comment = " ".join(line.removeprefix("#:").strip() for line in lines[first : statement.lineno - 1])
        end = statement.end_lineno or 0
        target = statement.target if isinstance(statement, ast.AnnAssign) else statement.targets[0]
        names = [node.id for node in ast.walk(target) if isinstance(node, ast.Name)]
        if all(re.fullmatch(r"_?[A-Z][A-Z0-9_]*", name) for name in names) and _is_numeric(statement.value):
            yield statement.lineno, names[0], f"{comment} {lines[end - 1].partition('  # ')[2]}".strip()


def _is_numeric(value: ast.expr) -> bool:
    """Whether an expression is made of numbers, named or in tiles."""
    parts = [node for node in ast.walk(value) if isinstance(node, ast.expr)]
    tiles = {node.func for node in parts if isinstance(node, ast.Call)}
    plain = ast.Constant | ast.BinOp | ast.UnaryOp | ast.Tuple | ast.Dict | ast.Call
    return all(
        isinstance(node, plain) or (node in tiles and isinstance(node, ast.Name) and node.id.endswith("Tile"))
        for node in parts
    ) and any(type(node.value) in (int, float) for node in parts if isinstance(node, ast.Constant))


def test_constants_say_where_they_were_measured() -> None:
    wrong = []
    for module, line, name, comment in _all():
        place = f"{module}:{line}: {name}"
        if name not in STRUCTURAL and not _says_where(comment):
            wrong.append(f"{place}: name the page and heading, or say 'Not measured'")
        for page, heading in _PLACE.findall(comment):
            if heading not in _headings(page):
                wrong.append(f"{place}: {page} has no heading '{heading}'")
    assert not wrong, "\n".join(wrong)


@cache
def _all() -> list[tuple[Path, int, str, str]]:
    return [(module, *row) for module in MODULES for row in constants((ROOT / "attngen" / module).read_text())]


@cache
def _headings(page: str) -> list[str]:
    return re.findall(r"^#+ (.*)$", (ROOT / page).read_text(), re.MULTILINE)


def _says_where(comment: str) -> bool:
    measured = r"\b([Nn]ot|was|were) (not )?measured|Measured on"
    return any(re.search(pattern, comment) for pattern in (_PLACE, _LIMIT, measured))


def test_each_structural_constant_is_one() -> None:
    assert {name for _, _, name, comment in _all() if not _says_where(comment)} == STRUCTURAL


def test_a_constant_without_a_place_is_noticed() -> None:
    text = (
        "#: Waves, at most.\n_A = 6\n#: Not measured.\n_B, _C = 1, 2.5\n_D = -3\n\n_E = (1, 2)\n_F = f(1)\ng = 1\n\n"
        "_H = 64  # rows: M of wgmma\n\n#: Tiles.\n_TABLE: Rows = ((64, _SomeTile(64, 2)),)\nKEYS = {'a': 1}\n"
        "NAMES = ('a',)\n"
    )
    assert [(name, _says_where(comment)) for _, name, comment in constants(text)] == [
        ("_A", False), ("_B", True), ("_D", True), ("_E", False), ("_H", True), ("_TABLE", False), ("KEYS", False),
    ]  # fmt: skip
