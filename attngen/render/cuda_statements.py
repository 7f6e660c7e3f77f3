"""Declarations of constants in CUDA, for what templates and the user's mathematics have in common."""

from __future__ import annotations

from collections.abc import Mapping

from attngen.lang.runs import positions
from attngen.lang.statements import Code, Statement, joined, statement, written
from attngen.plan.model import Plan
from attngen.plan.symbols import pointer_name

_TILE_MAP = "const int* tile_map = {tile_map_ptr} + {b} * {stride_tile_map_b} + {h} * {stride_tile_map_h} + {};"


def constant(kind: str, name: str, value: Code | str, *, comment: str = "") -> Statement:
    """Return the declaration of a constant; a value that is text is a pattern (see ``statements.written``)."""
    value = written(value) if isinstance(value, str) else value
    behind = f"  // {comment}" if comment else ""
    return statement(f"const {kind} {name} = {{}};{behind}", value, declares=name, type=kind)


def log2_scale(scale: str) -> Statement:
    """Statement of the factor that turns products into logits in units of log2."""
    return statement(f"const float scale_log2e = {{{scale}}} * kLog2e;", declares="scale_log2e", type="float")


#: The same where nothing else stands between products and logits.
SCALE = log2_scale("softmax_scale")


def int_constant(name: str, value: Code | str, *, comment: str = "") -> Statement:
    """Return the declaration of an int."""
    return constant("int", name, value, comment=comment)


def int_constants(values: Mapping[str, str]) -> Statement:
    """Return one declaration of several ints by patterns, of which later ones may read earlier ones."""
    parts = [written("{} = {}", name, written(pattern)) for name, pattern in values.items()]
    return statement("const int {};", joined(", ", parts), declares=tuple(values), type="int")


def words_of_map(place: str) -> tuple[Statement, ...]:
    """Return the statements that read two words of the tile map; ``place`` is a pattern for those of this block."""
    return (
        statement(_TILE_MAP, written(place), declares="tile_map", type="const int*"),
        constant("uint32_t", "partial_word", "{tile_map}[{words} + {word}]"),
        constant("uint32_t", "visible_word", "{tile_map}[{word}] | {partial_word}"),
    )


def words_of_votes(seen: Code, whole: Code) -> tuple[Statement, ...]:
    """Return the statements in which a warp makes words of the tiles that are ``seen``, and not seen ``whole``."""
    return (
        constant("bool", "seen", seen),
        constant("uint32_t", "visible_word", "__ballot_sync(~0u, {seen})"),
        constant("uint32_t", "partial_word", written("__ballot_sync(~0u, !({}))", whole)),
    )


def number_queries(read: frozenset[str], position: str = "") -> list[Statement]:
    """Return the statements that number a query in other ways than by its row, as far as these are read; ``position``
    is the pattern of where it lies, if a tensor says so."""
    lines = []
    if "position" in read:
        lines.append(int_constant("position", position))
    if "q_pos" in read:
        lines.append(int_constant("q_pos", "{q_row} + ({seqlen_k} - {seqlen_q})"))
    if "q_packed" in read:
        lines.append(int_constant("q_packed", "{q_begin} + {q_row}"))
    return lines


def positions_name(plan: Plan) -> str | None:
    """The name in a kernel of the tensor that says where rows lie, if there is one."""
    load = positions(plan.variant)
    return None if load is None else pointer_name(load.tensor)


def position_of(plan: Plan, row: str) -> str:
    """The pattern of where a row lies that a kernel has a name for."""
    return f"{positions_name(plan)}[{{{row}}}]"


def row_shift(plan: Plan) -> list[Statement]:
    """Return the statements that find how far rows lie from their numbers: all rows of a tile as far as the first one
    of the lane, or if that is after the end, the last one."""
    return [
        int_constant("some_row", "min({q_first}, {seqlen_q} - 1)"),
        int_constant("row_shift", f"{position_of(plan, 'some_row')} - {{some_row}}"),
    ]
