"""Bands: which keys a tile of queries can see (and which queries a tile of keys), as intervals in closed form.

A mask is taken apart at ``and``, ``or`` and ``not``; each comparison is solved for the axis. Every step keeps two
sets of intervals: ``visible`` covers each position that some row of the box sees, ``full`` holds only positions
that all rows see. ``classify`` answers for one tile instead, with the same interval rules.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal

from attngen.lang.facts import Facts, aligned, index, local
from attngen.lang.intervals import bounds, evaluate
from attngen.lang.ir import Const, Expr, Load, Op, Search, Type, Var, names, rewrite
from attngen.lang.overflow import widen
from attngen.lang.proof import larger
from attngen.lang.simplify import COMPLEMENT, FALSE, TRUE, Linear, ceildiv, integer, linear, make, neg, not_
from attngen.lang.spans import LIMIT, Interval, Span, Spans
from attngen.lang.statistics import Separated, Statistic
from attngen.lang.symbols import NODES, Symbols

__all__ = ["Bands", "Facts", "Interval", "bands", "classify"]

Axis = Literal["kv", "q"]
Heads = Literal["single", "packed"]

#: Prefix of the names of conditions about which nothing is known; no name of a spec has a question mark.
_OPAQUE = "?"

#: Most comparisons that are solved for one mask; nested ``min``, ``select`` and ``!=`` double their number.
_STEPS = 200

#: Most nodes in an endpoint of an interval.
_NODES = 100


@dataclass(frozen=True, slots=True)
class Bands:
    """Intervals of one axis, at most four each, over the corners of a box of the other (``q_lo``, ``q_pos_hi`` …).

    Every position that any row of the box sees lies in ``visible``; every row sees all of ``full``. Intervals may
    overlap or be empty. ``exact``: all of the mask was bounded, so that looking at single tiles gains nothing.
    """

    visible: tuple[Interval, ...]
    full: tuple[Interval, ...]
    exact: bool


def bands(mask: Expr, facts: Facts | None = None, over: Axis = "kv", heads: Heads = "single") -> Bands:
    """Return the bands of a mask: of keys for a box of queries (``over="kv"``), or of queries for a box of keys.

    ``heads="packed"`` means that a box spans the heads ``h_lo`` to ``h_hi``; otherwise ``h`` is a symbol.
    """
    return _bands(mask, facts or Facts(), over, heads)


@lru_cache(maxsize=256)  # the kernels of a spec share a few masks
def _bands(mask: Expr, facts: Facts, over: Axis, heads: Heads) -> Bands:
    facts = facts.of_tiles()
    mask = local(mask)
    if over == "q":
        mask = rewrite(mask, lambda node: aligned() if node == index("q_pos") else None)
    spans = Spans(facts, over)
    mask = _plain(mask, facts)
    symbols = Symbols(facts, _corners(mask, "q" if over == "kv" else "k", heads))
    region = _Solver(facts, over, spans, symbols).region(mask, False)
    visible, full = spans.finish(region.visible, outer=True), spans.finish(region.full, outer=False)
    return Bands(visible, full, region.exact and len(region.visible) <= LIMIT)


def classify(
    mask: Expr, facts: Facts | None = None, heads: Heads = "single", nodes: int = NODES,
    statistics: tuple[Statistic, ...] = (),
) -> tuple[Expr, Expr]:  # fmt: skip
    """Return (may, must) over the corners of a tile: if not ``may``, no row sees any key; if ``must``, all see all.

    A condition whose bounds have more than ``nodes`` tells nothing. ``statistics`` are those that the mask names.
    """
    may, must, _ = _classes(mask, facts or Facts(), heads, nodes, statistics)
    return may, must


def has_short_bounds(mask: Expr, facts: Facts | None = None, heads: Heads = "single") -> bool:
    """Whether ``classify`` keeps all that the interval rules know of a mask: no condition is given up for its size."""
    return _classes(mask, facts or Facts(), heads, NODES)[2]


@lru_cache(maxsize=256)  # the kernels of a spec share a few masks
def _classes(
    mask: Expr, facts: Facts, heads: Heads, nodes: int, statistics: tuple[Statistic, ...] = ()
) -> tuple[Expr, Expr, bool]:
    facts = facts.of_tiles()
    if statistics:
        facts = Facts({**facts.ranges, **Separated(mask, statistics).ranges}, facts.tensors)
    mask = _plain(local(mask), facts)
    corners = _corners(mask, "qk", heads) | {each.name.name: each.ends for each in statistics}
    symbols = Symbols(facts, corners, nodes)
    must, may = evaluate(mask, symbols)
    return widen(may, facts) or TRUE, widen(must, facts) or FALSE, not symbols.dropped


def _corners(mask: Expr, boxes: str, heads: Heads) -> dict[str, tuple[Expr, Expr]]:
    """Least and greatest value of each name that varies over a box of queries (``q``), keys (``k``), or both."""
    varying = [("q", "q_pos")] * ("q" in boxes) + [("kv",)] * ("k" in boxes) + [("h",)] * (heads == "packed")
    corners = {name: (index(f"{name}_lo"), index(f"{name}_hi")) for group in varying for name in group}
    return corners | {name: (FALSE, TRUE) for name in names(mask) if name.startswith(_OPAQUE)}


def _plain(mask: Expr, facts: Facts) -> Expr:
    """Simplify, and write shifts and bit masks by constants as arithmetic.

    A comparison whose int64 arithmetic may wrap around cannot be analysed: an opaque name takes its place.
    """
    opaque: dict[Expr, Expr] = {}

    def wraps(node: Expr) -> Expr | None:
        decides = isinstance(node, Op | Load) and node.type is Type.BOOL
        if not decides or widen(node, facts) is not None:
            return None
        return opaque.setdefault(node, Var(f"{_OPAQUE}{len(opaque)}", Type.BOOL))

    def rule(node: Expr) -> Expr | None:
        match node:
            case Op(op="lshift", args=(x, Const(value=n))) if 0 <= n < 63:
                return make("mul", x, integer(2 ** int(n)))
            case Op(op="rshift", args=(x, Const(value=n))) if 0 <= n < 63:
                return make("floordiv", x, integer(2 ** int(n)))
            case Op(op="bitand", args=(x, Const(value=n))) if n > 0 and int(n) & (int(n) + 1) == 0:
                return make("mod", x, integer(int(n) + 1))
            case Op(op="invert", args=(x,)):
                return make("sub", integer(-1), x)
            case Op(op=op, args=args):
                return make(op, *args)
        return None

    return rewrite(rewrite(mask, wraps), rule)


@dataclass(frozen=True, slots=True)
class _Region:
    """Visible and full positions of an axis; by default nothing is known."""

    visible: list[Span] = field(default_factory=lambda: [Span()])
    full: list[Span] = field(default_factory=list)
    exact: bool = False


class _Solver:
    """Solves the comparisons of one mask for one axis."""

    def __init__(self, facts: Facts, axis: Axis, spans: Spans, symbols: Symbols) -> None:
        self._facts = facts
        self._axis = index(axis)
        self._spans = spans
        self._symbols = symbols
        self._steps = 0

    def region(self, mask: Expr, negate: bool) -> _Region:
        """Return the region where ``mask`` (or its negation) holds."""
        if not self._on_axis(mask):
            must, may = evaluate(mask, self._symbols)
            return self._condition(not_(may), not_(must)) if negate else self._condition(must, may)
        match mask:
            case Op(op="not", args=(a,)):
                return self.region(a, not negate)
            case Op(op="and" | "or" as op, args=(a, b)):
                combine = self._both if (op == "and") != negate else self._either
                return combine(self.region(a, negate), self.region(b, negate))
            case Op(op="xor", args=(a, b)):  # exactly one of the two
                one, other = make("and", a, not_(b)), make("and", not_(a), b)
                return self.region(make("or", one, other), negate)
            case Op(op="select", args=(c, a, b)):
                return self._choice(c, self.region(a, negate), self.region(b, negate))
            case Op(op=op, args=(a, b)) if op in COMPLEMENT and a.type is Type.INT and b.type is Type.INT:
                return self._comparison(COMPLEMENT[op] if negate else op, linear(a).plus(linear(b), -1))
        return _Region()

    def _on_axis(self, expr: Expr) -> bool:
        return self._axis.name in names(expr)

    def _condition(self, must: Expr, may: Expr) -> _Region:
        return self._solved(Span(when=may), Span(when=must), (must, may) != (FALSE, TRUE))

    def _both(self, a: _Region, b: _Region) -> _Region:
        meet = self._spans.intersection
        return self._limited(_Region(meet(a.visible, b.visible), meet(a.full, b.full), a.exact and b.exact))

    def _either(self, a: _Region, b: _Region) -> _Region:
        join = self._spans.union
        return self._limited(_Region(join(a.visible, b.visible), join(a.full, b.full), a.exact and b.exact))

    @staticmethod
    def _limited(region: _Region) -> _Region:
        """Give up the visible or full spans if they would take too much code to compute."""

        def fits(spans: list[Span]) -> bool:
            parts = (end for span in spans for end in (span.lo, span.hi, span.when))
            return len(spans) <= 2 * LIMIT and not any(larger(end, _NODES) for end in parts)

        visible, full = fits(region.visible), fits(region.full)
        return _Region(
            region.visible if visible else [Span()], region.full if full else [], region.exact and visible and full
        )

    def _choice(self, condition: Expr, a: _Region, b: _Region) -> _Region:
        return self._either(self._both(self.region(condition, False), a), self._both(self.region(condition, True), b))

    def _comparison(self, op: str, total: Linear) -> _Region:
        """Region where ``total`` compares as ``op`` to 0."""
        one = Linear({}, 1)
        match op:
            case "ge":
                return self._nonnegative(total)
            case "gt":
                return self._nonnegative(total.plus(one, -1))
            case "le":
                return self._nonnegative(total.scaled(-1))
            case "lt":
                return self._nonnegative(total.scaled(-1).plus(one, -1))
            case "eq":
                met = self._both(self._comparison("ge", total), self._comparison("le", total))
                return self._equal_element(total, met)
        return self._either(self._comparison("gt", total), self._comparison("lt", total))

    def _equal_element(self, total: Linear, met: _Region) -> _Region:
        """Region where ``T[i] == x``; the full interval reuses the searches of the visible one.

        Where x is the same for all rows of the box, that is the visible interval; elsewhere no key equals every x.
        """
        terms = {t: c for t, c in total.terms.items() if self._on_axis(t)}
        match list(terms), met.visible:
            case [Load() as load], [span] if abs(terms[load]) == 1:
                if not met.exact or self._facts.monotone_axis(load.tensor) is None or self._symbols.varies(load):
                    return met
                rest = Linear({t: c for t, c in total.terms.items() if t != load}, total.constant)
                lo, hi = evaluate(rest.scaled(-terms[load]).expr(), self._symbols)
                same = make("eq", lo, hi)
                full = self._spans.union([replace(span, when=make("and", span.when, same))], [])
                return _Region(met.visible, full, met.exact)
        return met

    def _nonnegative(self, total: Linear) -> _Region:
        """Region where ``total >= 0``: move all but the one term on the axis to the other side, and divide."""
        self._steps += 1
        terms = {t: c for t, c in total.terms.items() if self._on_axis(t)}
        rest = Linear({t: c for t, c in total.terms.items() if t not in terms}, total.constant)
        if not terms:
            lo, hi = evaluate(rest.expr(), self._symbols)
            zero = integer(0)
            return self._condition(self._symbols.call("ge", lo, zero), self._symbols.call("ge", hi, zero))
        if len(terms) > 1 or self._steps > _STEPS:
            return _Region()
        ((term, coefficient),) = terms.items()
        divisor = integer(abs(coefficient))
        if coefficient > 0:
            return self._at_least(term, ceildiv(rest.scaled(-1).expr(), divisor))
        return self._at_most(term, make("floordiv", rest.expr(), divisor))

    def _solved(self, visible: Span, full: Span, known: bool = True) -> _Region:
        return _Region(self._spans.union([visible], []), self._spans.union([full], []), known)

    def _at_least(self, term: Expr, bound: Expr) -> _Region:
        """Region where ``term >= bound``; only ``term`` depends on the axis."""
        if term == self._axis:
            lo, hi = evaluate(bound, self._symbols)
            return self._solved(Span(lo=lo), Span(lo=hi))
        return self._inverted(term, bound, "ge")

    def _at_most(self, term: Expr, bound: Expr) -> _Region:
        """Region where ``term <= bound``."""
        if term == self._axis:
            lo, hi = evaluate(make("add", bound, integer(1)), self._symbols)
            return self._solved(Span(hi=hi), Span(hi=lo))
        return self._inverted(term, bound, "le")

    def _inverted(self, term: Expr, bound: Expr, op: str) -> _Region:
        """Undo the outermost operator of ``term`` in ``term op bound``, where ``op`` is ge or le."""
        least = op == "ge"

        def solve(op: str, a: Expr, b: Expr) -> _Region:
            return self._comparison(op, linear(a).plus(linear(b), -1))

        match term:
            case Op(op="mul" | "floordiv", args=_):
                return self._scaled(term, bound, op)
            case Op(op="abs", args=(u,)):
                combine = self._either if least else self._both
                return combine(solve(op, u, bound), solve(op, neg(u), bound))
            case Op(op="min" | "max" as extremum, args=(u, v)):
                combine = self._both if (extremum == "min") == least else self._either
                return combine(solve(op, u, bound), solve(op, v, bound))
            case Op(op="select", args=(c, u, v)):
                return self._choice(c, solve(op, u, bound), solve(op, v, bound))
            case Op(op="to_int", args=(c,)) if c.type is Type.BOOL:
                return self._choice(c, solve(op, integer(1), bound), solve(op, integer(0), bound))
            case Load():
                return self._searched(term, bound, op)
        return _Region()

    def _scaled(self, term: Op, bound: Expr, op: str) -> _Region:
        """Solve ``u * d`` or ``u // d`` for u, where d does not depend on the axis and has a known sign."""
        u, d = term.args
        if term.op == "mul" and not self._on_axis(u):
            u, d = d, u
        if self._on_axis(d):
            return _Region()
        lo, hi = bounds(d, self._facts)
        if hi < 0:  # both operands change their sign, or the product does
            if term.op == "floordiv":
                return self._comparison(op, linear(make("floordiv", neg(u), neg(d))).plus(linear(bound), -1))
            u, d = neg(u), neg(d)
        elif lo <= 0:
            return _Region()
        if term.op == "floordiv":
            limit = make("mul", bound, d)  # u // d >= bound  <=>  u >= bound * d
            if op == "le":  # u // d <= bound  <=>  u <= bound * d + d - 1
                limit = make("sub", make("add", limit, d), integer(1))
        else:  # u * d >= bound  <=>  u >= ceil(bound / d)
            limit = ceildiv(bound, d) if op == "ge" else make("floordiv", bound, d)
        return self._comparison(op, linear(u).plus(linear(limit), -1))

    def _searched(self, term: Load, bound: Expr, op: str) -> _Region:
        """Solve for the index of a monotone tensor: ``T[i] >= x`` holds from the first element ``>= x`` on."""
        axis = self._facts.monotone_axis(term.tensor)
        if axis is None:
            return _Region()
        position = term.indices[axis]
        others = tuple(integer(0) if n == axis else i for n, i in enumerate(term.indices))
        length, exact = self._facts.extent(term.tensor, axis)
        if any(self._on_axis(i) or self._symbols.varies(i) for i in others):
            return _Region()
        if not exact and not self._symbols.holds("lt", position, length):
            return _Region()
        first = Search(term.tensor, axis, others, bound, op == "le", length)
        # T[i] <= x before the first element that is > x
        return self._comparison("ge" if op == "ge" else "lt", linear(position).plus(linear(first), -1))
