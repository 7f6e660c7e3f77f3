"""Statistics of tiles: the least and the greatest value that a subexpression of a query alone takes over the queries of
a tile, or one of a key alone over its keys.

``id[q] == id[kv]`` reads tensors of which no declaration says what they hold in a tile. Where both ranges of values
over a tile are known, the interval rules still classify most tiles. An expression of one side alone counts as one
value, however long it is: ``start[id[kv]]``, ``q_pos - width[q]``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from typing import Literal

from attngen.lang.facts import Facts
from attngen.lang.intervals import EXACT, bounds
from attngen.lang.ir import Expr, Load, Op, Type, Var, children, names, own, walk
from attngen.lang.overflow import widen
from attngen.lang.ranges import INT32, Range
from attngen.lang.simplify import COMPLEMENT, TRUE, Linear, linear, make

#: The names that differ from query to query, and from key to key.
_SIDES: Mapping[Literal["q", "kv"], frozenset[str]] = {
    "q": frozenset({"q", "q_pos", "q_global"}),
    "kv": frozenset({"kv", "kv_global"}),
}
#: The first query and key of a block of pairs (``blocks.at_corner``), which differ from block to block.
_CORNERS = frozenset({"q_lo", "kv_lo"})
_LABELS = {"q": "of_queries", "kv": "of_keys"}

#: Most statistics of one mask: each takes a pass over the queries or the keys of every tile.
_MOST = 16

#: Begins the name of a condition that NaN decides, as opaque as those of ``bands``.
_NAN = "?nan"


@dataclass(frozen=True, slots=True)
class Statistic:
    """An expression of a query alone (``axis`` is q) or of a key alone, and its name in the mask.

    The least value of a condition says whether it holds for all positions, the greatest whether it holds for any. Ends
    of floats are valid only if no value is NaN, which ``numbers`` says. Only positions count that meet the ``guard``,
    another condition of the side alone: elsewhere the mask is false, whatever the value is. Where none of a tile meets
    it, both ends are ``anything``.
    """

    axis: Literal["q", "kv"]
    value: Expr
    name: Var
    range: Range  # of all values
    guard: Expr = TRUE

    @property
    def ends(self) -> tuple[Var, Var]:
        """The least and the greatest value over a tile."""
        return replace(self.name, name=f"{self.name.name}.least"), replace(self.name, name=f"{self.name.name}.greatest")

    @property
    def anything(self) -> int:
        """A value of the range, so that bounds which read it do not overflow."""
        low, high = self.range
        return int(min(max(0, low), high))

    @property
    def residues(self) -> Var:
        """A bit for each remainder by 32 of an integer's values over a tile: two tiles without a common one have no
        common value, however far their ranges overlap, as of ids that come back."""
        return Var(f"{self.name.name}.residues", Type.INT)

    @property
    def numbers(self) -> Var:
        """Whether no value over a tile is NaN."""
        return Var(f"{self.name.name}.numbers", Type.BOOL)


@dataclass(frozen=True, slots=True)
class Separated:
    """A mask in which names replace its one-sided parts, and the statistics that these names stand for."""

    mask: Expr
    statistics: tuple[Statistic, ...] = ()

    @property
    def ranges(self) -> dict[str, Range]:
        """Ranges of the names of statistics, of their ends and of their residues."""
        ranges = {name.name: each.range for each in self.statistics for name in (each.name, *each.ends)}
        return ranges | {each.residues.name: INT32 for each in self.statistics}


@lru_cache(maxsize=256)  # the launches of a kernel, and kernels of one variant, share a mask
def separated(mask: Expr, facts: Facts) -> Separated:
    """Replace the one-sided parts of a mask that read a tensor by statistics."""
    separation = _StatisticsSearch(facts)
    rest = separation.rewritten(mask)
    return Separated(rest, tuple(separation.statistics.values()))


def one_sided(expr: Expr, side: Literal["q", "kv"]) -> tuple[Expr, ...]:
    """The largest parts of an expression that depend on queries alone, or on keys alone."""
    if _side(expr) == side:
        return () if isinstance(expr, Var) else (expr,)
    return tuple(dict.fromkeys(part for child in children(expr) for part in one_sided(child, side)))


class _StatisticsSearch:
    """Finds the largest one-sided parts of a mask, from the outside in."""

    def __init__(self, facts: Facts) -> None:
        # a load outside of its tensor is 0, which may happen where the mask's guard is left out
        read = {name: facts.ranges[name] for name in facts.tensors if name in facts.ranges}
        zeros = {name: (min(low, 0), max(high, 0)) for name, (low, high) in read.items()}
        self._facts = Facts({**facts.ranges, **zeros}, facts.tensors)
        self.statistics: dict[tuple[str, Expr, Expr], Statistic] = {}
        self._guards: dict[str, Expr] = dict.fromkeys(_SIDES, TRUE)  # of what is rewritten
        self._opaque = 0

    def rewritten(self, node: Expr) -> Expr:
        """Replace the one-sided parts of an expression by names."""
        side = _side(node)
        if side is not None and _reads(node):
            name = self._named(side, node)
            if name is not None:
                return name
        match node:
            case Op(op="and") if side is None:
                return self._conjunction(_conjuncts(node))
            case Op(op=op, args=(a, b)) if op in COMPLEMENT and a.type is b.type is Type.INT:
                return self._comparison(op, a, b)
            case Op(op=op, args=args) if node.type is not Type.FLOAT and any(a.type is Type.FLOAT for a in args):
                return self._of_floats(node) if op in COMPLEMENT else node
            case Op(op=op, args=args):
                return Op(op, tuple(map(self.rewritten, args)), node.type, node.wide)
        return node

    def _conjunction(self, parts: Sequence[Expr]) -> Expr:
        """Rewrite conditions that hold together: those of one side alone guard the statistics of the others."""
        own = [part for part in parts if _side(part) is not None and _reads(part)]
        rewritten = {part: self.rewritten(part) for part in own}
        outer = self._guards
        self._guards = {side: _all([outer[side], *(one for one in own if _side(one) == side)]) for side in _SIDES}
        rewritten |= {part: self.rewritten(part) for part in parts if part not in rewritten}
        self._guards = outer
        return _all([rewritten[part] for part in parts])

    def _comparison(self, op: str, a: Expr, b: Expr) -> Expr:
        """Compare integers: the terms of one side are summed into one statistic."""
        total = linear(a).plus(linear(b), -1)
        sums = {side: {t: c for t, c in total.terms.items() if _side(t) == side} for side in _SIDES}
        parts: dict[Expr, int] = {}
        for term, coefficient in total.terms.items():
            side = _side(term)
            if side is None or not any(map(_reads, sums[side])):
                parts[term if side is not None else self.rewritten(term)] = coefficient
        for side, terms in sums.items():
            if not any(map(_reads, terms)):
                continue
            sign = 1 if next(iter(terms.values())) > 0 else -1
            whole = Linear(terms).scaled(sign)
            name = self._named(side, whole.expr())
            added = Linear({name: sign}) if name is not None else Linear(terms)
            parts = Linear(parts).plus(added).terms
        left = Linear({t: c for t, c in parts.items() if c > 0}, max(total.constant, 0))
        right = Linear({t: -c for t, c in parts.items() if c < 0}, max(-total.constant, 0))
        return make(op, left.expr(), right.expr())

    def _of_floats(self, node: Op) -> Expr:
        """Compare floats: NaN makes the comparison false, whatever the ends are."""
        compared = Op(node.op, tuple(map(self.rewritten, node.args)), node.type)
        read = names(compared)
        known: Expr = TRUE
        for each in self.statistics.values():
            if each.name.name in read and each.name.type is Type.FLOAT:
                known = each.numbers if known is TRUE else Op("and", (known, each.numbers), Type.BOOL)
        if known is TRUE:
            return compared
        opaque = Var(f"{_NAN}{self._opaque}", Type.BOOL)
        self._opaque += 1
        return Op("select", (known, compared, opaque), Type.BOOL)

    def _named(self, side: Literal["q", "kv"], value: Expr) -> Var | None:
        """The name of the statistic of a value; None if the value must not be computed apart from the mask."""
        guard = widen(self._guards[side], self._facts) or TRUE
        known = self.statistics.get((side, value, guard))
        if known is not None:
            return known.name
        rounds = any(isinstance(n, Op) and n.type is Type.FLOAT and n.op not in EXACT for n in walk(value))
        if (value.type is Type.FLOAT and rounds) or len(self.statistics) == _MOST:
            return None  # a rounded result may differ in its last bit between the two places that compute it
        exact = widen(value, self._facts)
        if exact is None:
            return None
        number = sum(1 for each in self.statistics.values() if each.axis == side)
        name = own(f"{_LABELS[side]}_{number}", value.type)
        low, high = bounds(value, self._facts)
        self.statistics[side, value, guard] = Statistic(side, exact, name, (low, high), guard)
        return name


def _side(node: Expr) -> Literal["q", "kv"] | None:
    """The one side that an expression depends on; None if it depends on both, on neither, or on a block."""
    read = names(node)
    if read & _CORNERS:
        return None
    sides = [side for side, positions in _SIDES.items() if read & positions]
    return sides[0] if len(sides) == 1 else None


def _conjuncts(node: Expr) -> list[Expr]:
    """The conditions of which an expression is the conjunction; those of one side stay together."""
    match node:
        case Op(op="and", args=(a, b)) if _side(node) is None:
            return _conjuncts(a) + _conjuncts(b)
    return [node]


def _all(parts: Sequence[Expr]) -> Expr:
    """The conjunction of conditions."""
    return reduce(lambda a, b: b if a is TRUE else Op("and", (a, b), Type.BOOL), parts)


def _reads(node: Expr) -> bool:
    """Whether a one-sided expression reads a tensor at a position; pure arithmetic has bounds in closed form."""
    positions = frozenset[str]().union(*_SIDES.values())
    return any(isinstance(each, Load) and names(each) & positions for each in walk(node))
