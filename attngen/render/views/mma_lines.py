"""Lines that the kernels by mma.sync share: rows and their heads, and ranges of tiles."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from attngen.lang.statements import Statement
from attngen.plan.model import Plan
from attngen.render.cuda_math import Sink, queries, sink
from attngen.render.cuda_tiles import Tiles
from attngen.render.expressions import CUDA, in_product

#: The ends of a range as text.
Ends = tuple[str, str]


def row_lines(plan: Plan, row: str) -> tuple[str, ...]:
    """Return the lines that name the query of a row of a work item and, if heads share the rows, its head."""
    return (f"const int q = work.q_start + {queries(plan, row)};", *head_lines(plan, row))


def head_lines(plan: Plan, row: str) -> tuple[str, ...]:
    """Return the line that names the head of a row of a work item, if heads share the rows."""
    return (f"const int h = (work.hk << group_bits) + ({row} & group - 1);",) if plan.pack_gqa else ()


def sink_of(plan: Plan, before: Iterable[Statement]) -> Sink | None:
    """Return the sink of a row, as a factor of a product."""
    logit = sink(plan, before)
    return None if logit is None else Sink(logit.lines, in_product(logit.value, CUDA))


def fields(pairs: Sequence[Ends], of: str) -> tuple[Ends, ...]:
    """Return ranges as fields of the variable ``of``."""
    return tuple((f"{of}.{lo}", f"{of}.{hi}") for lo, hi in pairs)


def values(span: Tiles, pairs: Sequence[Ends]) -> tuple[Ends, ...]:
    """Return ranges as the values of their ends."""
    return tuple((span.values[lo].text, span.values[hi].text) for lo, hi in pairs)


def count_of(ranges: Sequence[Ends]) -> str:
    """Return the number of tiles in disjoint ranges."""
    return " + ".join(map(_length, ranges)) or "0"


def inside(ranges: Sequence[Ends]) -> str:
    """The test for ``tile`` in one of the ranges."""
    tests = [f"tile >= {lo} && tile < {hi}" if lo != "0" else f"tile < {hi}" for lo, hi in ranges]
    return tests[0] if len(tests) == 1 else " || ".join(f"({test})" for test in tests) or "false"


def tile_lines(ranges: Sequence[Ends], place: str) -> tuple[str, ...]:
    """Return the lines that find a tile by its place, counted from 0 over all ranges."""
    first, *others = ranges
    if not others:
        return (f"const int tile = {_at(first, place)};",)
    lines = [f"int tile = {_at(first, place)}, before = {_length(first)};"]
    for number, each in enumerate(others):
        lines.append(f"if ({place} >= before) tile = {_at(each, f'{place} - before')};")
        if number < len(others) - 1:
            lines.append(f"before += {_length(each)};")
    return tuple(lines)


def _at(ends: Ends, place: str) -> str:
    return place if ends[0] == "0" else f"{ends[0]} + {place}"


def _length(ends: Ends) -> str:
    lo, hi = ends
    return f"max({hi} - {lo}, 0)" if lo != "0" else f"max({hi}, 0)"
