"""Lines that hide pairs of a CUDA kernel: comparisons with the ends of a row's keys, cases, and bits of a tile map."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from attngen.lang.blocks import Block, at_corner
from attngen.lang.emit import Binding
from attngen.lang.folding import KV_FIRST
from attngen.lang.intervals import bounds
from attngen.lang.ir import MAX_SEQLEN, Expr, Op, Type
from attngen.lang.ranges import INT32
from attngen.lang.separate import asked
from attngen.lang.simplify import TRUE, integer, maximum, minimum
from attngen.lang.statements import Code, Statement, joined, reads, statement, written
from attngen.plan.model import Plan
from attngen.plan.traits import costly_query_values, key_divisions
from attngen.render.cuda_statements import int_constant
from attngen.render.expressions import CUDA, KEYS, SEQLEN_K, Along, emit_for, facts_of, known_ranges

#: Number of an element of a lane, by the two loops over these, and what it is in its word of bits.
ELEMENT = "4 * ({i} % 16 / 2) + 2 * {row} + {i} % 2"
HIDE_BY_BITS = statement(f"if (!({{visible}}[{{i}} / 16] >> {ELEMENT} & 1)) {{x}} = kMasked;")
HIDE_BY_BITS_OF_BLOCK = statement(f"if (!({{visible}}[{{half}}] >> {ELEMENT} & 1)) {{x}} = kMasked;")


def row_values(row: Sequence[Statement], element: Sequence[Statement]) -> tuple[tuple[str, str], ...]:
    """Values declared for each row that the statements of elements read: type and name of each."""
    read = reads(element)
    return tuple((each.type, name) for each in row for name in each.names if name in read)


#: A simpler test of an element, behind the comparisons, each of an end by its name, under which it is enough.
Case = tuple[tuple[tuple[str, str], ...], Code]


@dataclass(frozen=True, slots=True)
class Masking:
    """Lines that stand before the loop over keys or queries; those of what it goes along; those that say, by ``ends``,
    which keys a query sees; and whether an element is hidden. ``cases``: simpler tests that say the same in some tiles.
    ``costly``: the names of values that it divides for."""

    hoisted: Sequence[Statement]
    body: Sequence[Statement]
    ends: Sequence[Statement]
    hidden: Code
    cases: tuple[Case, ...]
    costly: tuple[str, ...]


def hide(hidden: Code) -> Statement:
    """Return the statement that masks an element if it is hidden."""
    return statement("if ({}) {x} = kMasked;", hidden)


def bit_of(hidden: Code, element: str) -> Statement:
    """Return the statement that sets the bit of an element, whose place is a pattern, if it is not hidden."""
    negated = written("!({})", hidden)
    return statement("bits |= static_cast<uint32_t>({}) << ({});", negated, written(element))


def masking(
    plan: Plan, bound: Mapping[str, Binding], taken: Iterable[str], *, key: str = "{key}", along: Along = KEYS
) -> Masking:
    """Return the lines that say whether an element is hidden: by the keys that its query sees, and what else the mask
    asks for.

    Ends are counted from the first key of a lane, so that an element compares them with constants: ``key`` is its
    distance from that.
    """
    variant = plan.variant
    if block := map_block(plan):
        variant = replace(variant, mask=at_corner(variant.mask, block))
    intervals, rest = asked(variant, facts_of(plan), along.axis)
    ends: dict[str, Expr] = {}
    seen: list[Code] = []
    hidden: list[Code] = []
    for number, interval in enumerate(intervals):
        suffix = f"_{number}" if len(intervals) > 1 else ""
        below, above = f"visible_from{suffix}", f"visible_to{suffix}"
        if interval.lo is not None:
            ends[below] = interval.lo
        ends[above] = SEQLEN_K if interval.hi is None else minimum(interval.hi, SEQLEN_K)
        low, high = f"{key} >= {{{below}}}", f"{key} < {{{above}}}"
        before, behind = f"{key} < {{{below}}}", f"{key} >= {{{above}}}"
        seen.append(written(f"{low} && {high}" if below in ends else high))
        hidden.append(written(f"{before} || {behind}" if below in ends else behind))
    exprs = [Op("sub", (from_zero(plan, end), KV_FIRST), Type.INT) for end in ends.values()]
    costly = costly_values_of(plan, along)
    code = emit_for(plan, CUDA, [*exprs, rest, *costly], bound, taken=taken, inner=along.axis)
    values, condition, named = code.results[: len(exprs)], code.results[len(exprs)], code.results[len(exprs) + 1 :]
    declarations = [int_constant(name, value) for name, value in zip(ends, values, strict=True)]
    if len(seen) == 1 and rest == TRUE:
        test = hidden[0]
    else:
        if len(seen) > 1:
            seen = [joined(" || ", (written("({})", each) if "&&" in each.text else each for each in seen))]
        if rest != TRUE:
            open_ended = "|" in condition.text or "?" in condition.text
            seen.append(written("({})", condition) if open_ended else condition)
        test = written("!({})", joined(" && ", seen))
    cases = _cases(ends, hidden) if len(hidden) == 2 and rest == TRUE and _has_cases(plan, along) else ()
    return Masking(code.hoisted, code.body, declarations, test, cases, tuple(value.text for value in named))


def _has_cases(plan: Plan, along: Along) -> bool:
    """Whether a kernel has simpler tests for partial tiles that hold one end of an interval: dense ones do."""
    plain = plan.layout == "dense" and plan.iteration == "ranges" and not (plan.pack_gqa or plan.split_kv)
    return plain and along == KEYS and plan.structure.finds_ends


def _cases(ends: Collection[str], hidden: Sequence[Code]) -> tuple[Case, ...]:
    """Simpler tests of two intervals: in most tiles rows see keys of one of them, and one of its ends."""
    if "visible_from_1" not in ends:
        return ()
    no_first, no_second = ("visible_to_0", "<= 0"), ("visible_from_1", ">= kBlockN")
    return (
        ((no_first, ("visible_from_1", "<= 0")), written("{key} >= {visible_to_1}")),
        ((no_first, ("visible_to_1", ">= kBlockN")), written("{key} < {visible_from_1}")),
        ((no_first,), hidden[1]),
        ((no_second,), hidden[0]),
    )


def of_rows(ends: Sequence[tuple[str, str]], row_values: Sequence[tuple[str, str]]) -> str:
    """Comparisons of ends for both rows of a lane; some ends are the same for all rows of a tile."""
    of_row = {name for _, name in row_values}
    same = [f"{name} {rest}" for name, rest in ends if name not in of_row]
    return " && ".join(same + [f"rows[{row}].{name} {rest}" for row in (0, 1) for name, rest in ends if name in of_row])


def map_block(plan: Plan) -> Block | None:
    """Queries and keys of a bit of the tile map, where a mask is constant on blocks and each consumer has a row of its
    own; else None."""
    rows, columns = plan.structure.map_rows, plan.structure.block_keys
    if not rows:
        return None
    return (rows, columns or plan.tile_n) if plan.direction == "forward" else (columns or plan.tile_m, rows)


def corners_of_block(plan: Plan) -> dict[str, Binding]:
    """Bindings of the first query and key of a bit of the tile map, which masks of blocks read."""
    return {name: Binding(name) for name in ("q_lo", "kv_lo")} if plan.structure.map_rows else {}


def costly_values_of(plan: Plan, along: Along) -> tuple[Expr, ...]:
    """Return the values of a key, or of a query for a block that goes along queries, which the mask divides for."""
    if along.axis == "q":
        return costly_query_values(plan.variant)
    return key_divisions(plan.variant, plan.box_heads)


def from_zero(plan: Plan, end: Expr) -> Expr:
    """Return the end of an interval such that any key can be subtracted from it in int32: all ends before the first key
    are alike, and so are all after the last one."""
    lowest, highest = bounds(end, known_ranges(plan))
    end = end if highest <= INT32[1] else minimum(end, SEQLEN_K)
    return end if lowest - MAX_SEQLEN >= INT32[0] else maximum(end, integer(0))
