"""Small tables that a score reads at indices computed for each pair: kernels hold the entries of a head in shared
memory.

The place of an entry is a sum, whose terms of the row and whose terms of the key are computed once for each: a pair is
left with their difference, and with the bounds of each index that is clamped.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod

from attngen.dtypes import DTYPES
from attngen.lang.biases import is_of_pair
from attngen.lang.intervals import bounds
from attngen.lang.ir import Const, Expr, Load, Op, Type, Var, names, rewrite, walk
from attngen.lang.literals import fold_literals
from attngen.lang.ranges import INT32, Range
from attngen.lang.separate import KEYS, ROWS
from attngen.lang.simplify import Linear, integer, linear
from attngen.lang.variant import Variant

#: Most entries of all tables of a kernel, and bytes of each in shared memory.
MOST_ENTRIES, ENTRY_BYTES = 4096, 4
_OF_TILE = frozenset({"b", "h", "hk"})
_ENTRY = Var("s", Type.FLOAT)


@dataclass(frozen=True, slots=True)
class Table:
    """Entries that a score reads: the ``load``, the axes of its computed indices, the numbers of entries along these,
    from 0 on, and the ``place`` of the entry of a pair, in bytes from the first one."""

    load: Load
    axes: tuple[int, ...]
    extents: tuple[int, ...]
    place: Expr

    @property
    def entries(self) -> int:
        """Number of entries."""
        return prod(self.extents)

    @property
    def parts(self) -> tuple[Expr, ...]:
        """The place, or its parts of which it is the sum: all clamped indices but the last, and the rest."""
        match self.place:
            case Op(op="add", args=(first, last)) if _is_of_pair(first) and _is_of_pair(last):
                return first, last
        return (self.place,)

    def entry(self, number: Expr) -> Load:
        """The load of an entry by its number."""
        indices, below = list(self.load.indices), self.entries
        for axis, extent in zip(self.axes, self.extents, strict=True):
            above, below = below, below // extent
            index = number if above == self.entries else Op("mod", (number, integer(above)), Type.INT)
            indices[axis] = index if below == 1 else Op("floordiv", (index, integer(below)), Type.INT)
        return Load(self.load.tensor, tuple(indices), self.load.type)


def tables(value: Expr, variant: Variant, others: Collection[Expr] = ()) -> tuple[Table, ...]:
    """The tables that a value reads, as many as there is room for; ``others`` are loads that kernels make otherwise."""
    narrow = {tensor.name for tensor in variant.tensors if _is_narrow_float(tensor.dtype)}
    held: list[Table] = []
    left = MOST_ENTRIES
    for load in dict.fromkeys(node for node in walk(rewrite(value, fold_literals)) if isinstance(node, Load)):
        if load.tensor not in narrow or load in others or is_of_pair(load):
            continue
        table = _table(load, variant.ranges)
        if table is not None and table.entries <= left:
            held.append(table)
            left -= table.entries
    return tuple(held)


def without_tables(value: Expr, held: Collection[Table]) -> Expr:
    """The value with a symbol for each entry that it reads."""
    loads = {table.load for table in held}
    return rewrite(rewrite(value, fold_literals), lambda node: _ENTRY if node in loads else None)


def with_places(value: Expr, held: Collection[Table]) -> Expr:
    """The value with the place of each entry for the entry itself: what kernels compute for each pair."""
    places = {table.load: Op("to_float", (table.place,), Type.FLOAT) for table in held}
    return rewrite(rewrite(value, fold_literals), lambda node: places.get(node) if isinstance(node, Load) else None)


def _is_narrow_float(dtype: str) -> bool:
    return DTYPES[dtype].kind == "float" and DTYPES[dtype].bytes <= ENTRY_BYTES


def _table(load: Load, ranges: Mapping[str, Range]) -> Table | None:
    """The table of a load whose index is computed from the query and the key, and has bounds; else None."""
    axes = tuple(axis for axis, index in enumerate(load.indices) if not _is_of_tile(index))
    computed = [rewrite(load.indices[axis], lambda node: _from_begin(node, ranges)) for axis in axes]
    read = frozenset[str]().union(*map(names, computed))
    if not (read & ROWS and read & KEYS) or any(isinstance(node, Load) for each in computed for node in walk(each)):
        return None
    extents = []
    for index in computed:
        low, high = bounds(index, ranges)
        if low < 0 or high >= MOST_ENTRIES:
            return None
        extents.append(int(high) + 1)
    place = _place(computed, extents, ranges)
    return Table(load, axes, tuple(extents), place) if _fits(place, ranges) else None


def _from_begin(node: Expr, ranges: Mapping[str, Range]) -> Expr | None:
    """An index as it is, where negative ones count from the end and it is never negative."""
    match node:
        case Op(op="select", args=(Op(op="lt", args=(index, Const(value=0))), _, other)) if index == other:
            return index if bounds(index, ranges)[0] >= 0 else None
    return None


def _place(indices: Collection[Expr], extents: Collection[int], ranges: Mapping[str, Range]) -> Expr:
    """Bytes from the first entry to the one at ``indices``: sums of these together, and each that is clamped apart."""
    parts, sums = [], Linear()
    factor = prod(extents) * ENTRY_BYTES
    for index, extent in zip(indices, extents, strict=True):
        factor //= extent
        part = _scaled(index, factor, 0)
        if not _is_clamped(part):
            sums = sums.plus(linear(index), factor)
        elif _fits(part, ranges):
            parts.append(part)
        else:
            parts.append(Op("mul", (_scaled(index, 1, 0), integer(factor)), Type.INT))
    if sums.terms or sums.constant or not parts:
        parts.append(_separated(sums))
    place = parts[0]
    for part in parts[1:]:
        place = Op("add", (place, part), Type.INT)
    return place


def _fits(value: Expr, ranges: Mapping[str, Range]) -> bool:
    """Whether no part of an integer needs more than 32 bits."""
    parts = [node for node in walk(value) if node.type is Type.INT]
    limits = [bounds(node, ranges) for node in parts]
    wide = any(isinstance(node, Op) and node.wide for node in parts)
    return not wide and all(INT32[0] <= low and high <= INT32[1] for low, high in limits)


def _is_of_tile(index: Expr) -> bool:
    return isinstance(index, Const) or (isinstance(index, Var) and index.name in _OF_TILE)


def _is_of_pair(node: Expr) -> bool:
    read = names(node)
    return bool(read & ROWS and read & KEYS)


def _is_clamped(node: Expr) -> bool:
    return isinstance(node, Op) and node.op in ("min", "max")


def _scaled(node: Expr, factor: int, more: int) -> Expr:
    """``factor * node + more``, computed inside the bounds of what is clamped: a pair takes no operators but these and
    the difference of a value of its row and one of its key."""
    total = linear(node).scaled(factor)
    total = Linear(total.terms, total.constant + more, total.wide)
    match list(total.terms.items()):
        case [(Op(op="min" | "max" as op, args=args), coefficient)] if coefficient > 0:
            return _lower_last(op, *(_scaled(each, coefficient, total.constant) for each in args))
    return _separated(total)


def _lower_last(op: str, a: Expr, b: Expr) -> Expr:
    """``op(a, b)``, with ``min(max(x, low), high)`` as ``max(min(x, high), low)``, which is one instruction with the
    difference ``x`` if ``low`` is 0."""
    match op, a, b:
        case "min", Op(op="max", args=(x, Const(value=low) as lower)), Const(value=high) if low <= high:
            return Op("max", (Op("min", (x, b), Type.INT), lower), Type.INT)
    return Op(op, (a, b), Type.INT)


def _separated(total: Linear) -> Expr:
    """A sum as terms of the row, with the constant, then terms of the key, then of both."""
    row, key, pair = Linear({}, total.constant), Linear(), Linear()
    for term, coefficient in total.terms.items():
        part = pair if _is_of_pair(term) else key if names(term) & KEYS else row
        part.terms[term] = coefficient
    parts = [each for each in (row, key, pair) if each.terms or each.constant]
    result = parts[0].expr() if parts else integer(0)
    for each in parts[1:]:
        negative = all(coefficient < 0 for coefficient in each.terms.values())
        result = Op("sub" if negative else "add", (result, (each.scaled(-1) if negative else each).expr()), Type.INT)
    return result
