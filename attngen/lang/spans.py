"""Unions and intersections of intervals of an axis, pruned by what can be proved about the order of their ends."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from attngen.lang.facts import Facts, index
from attngen.lang.ir import Expr
from attngen.lang.overflow import saturate, widen
from attngen.lang.simplify import FALSE, TRUE, and_, integer, select
from attngen.lang.symbols import Symbols

#: Most intervals that a kernel loops over; beyond that, their hull.
LIMIT = 4

_LOWEST, _HIGHEST = Symbols.unbounded


@dataclass(frozen=True, slots=True)
class Interval:
    """Positions ``lo <= x < hi`` of the axis; None is the axis' own end. Either may lie outside the axis."""

    lo: Expr | None = None
    hi: Expr | None = None


@dataclass(frozen=True, slots=True)
class Span:
    """An interval that exists only where a condition (constant over the box) holds; its ends may be infinite."""

    lo: Expr = _LOWEST
    hi: Expr = _HIGHEST
    when: Expr = TRUE


class Spans:
    """Operations on lists of spans over one axis (``kv`` or ``q``)."""

    def __init__(self, facts: Facts, axis: str) -> None:
        self._facts = facts
        self._order = Symbols(facts, {})
        self._length = index({"kv": "seqlen_k", "q": "seqlen_q"}[axis])

    def intersection(self, a: list[Span], b: list[Span]) -> list[Span]:
        """Intersection of two lists of spans."""
        spans = []
        for x, y in product(a, b):
            lo, hi = self._order.call("max", x.lo, y.lo), self._order.call("min", x.hi, y.hi)
            spans.append(Span(lo, hi, and_(x.when, y.when)))
        return self.union(spans, [])

    def union(self, a: list[Span], b: list[Span]) -> list[Span]:
        """Union of two lists of spans, in as few spans as can be proven to suffice."""
        spans: list[Span] = []
        for span in (*a, *b):
            added = self._clipped(span)
            if added.when == FALSE or self._empty(added):
                continue
            for other in tuple(spans):
                merged = self._merged(other, added)
                if merged is not None:
                    spans.remove(other)
                    added = merged
            spans.append(added)
        return spans

    def finish(self, spans: list[Span], *, outer: bool) -> tuple[Interval, ...]:
        """Return at most ``LIMIT`` intervals, ascending as far as that is known, whose ends do not overflow.

        With ``outer`` they may gain positions by that, otherwise they may only lose some.
        """
        if len(spans) > LIMIT:
            spans = [self._hull(spans)] if outer else spans[:LIMIT]
        intervals = []
        for span in self._ascending([self._resolved(s) for s in spans]):
            ends = [self._finite(end) for end in (span.lo, span.hi)]
            lost = (ends[0] is None and span.lo != _LOWEST) or (ends[1] is None and span.hi != _HIGHEST)
            if outer or not lost:
                intervals.append(Interval(*ends))
        return tuple(intervals)

    def _finite(self, end: Expr) -> Expr | None:
        if end in (_LOWEST, _HIGHEST):
            return None
        return widen(saturate(end, self._length, self._facts), self._facts)

    def _at_most(self, x: Expr, y: Expr) -> bool:
        return x == y or self._order.holds("le", x, y)

    def _empty(self, span: Span) -> bool:
        outside = self._at_most(span.hi, integer(0)) or self._at_most(self._length, span.lo)
        return outside or self._at_most(span.hi, span.lo)

    def _clipped(self, span: Span) -> Span:
        """Drop ends that certainly lie outside the axis."""
        lo = _LOWEST if self._at_most(span.lo, integer(0)) else span.lo
        return Span(lo, _HIGHEST if self._at_most(self._length, span.hi) else span.hi, span.when)

    def _merged(self, a: Span, b: Span) -> Span | None:
        """Return one span for two, if they certainly make one."""
        for x, y in ((a, b), (b, a)):
            if x.when in (TRUE, y.when) and self._at_most(x.lo, y.lo) and self._at_most(y.hi, x.hi):
                return x
        if a.when != b.when:
            if not a.lo == b.lo == _LOWEST:
                return None
            a, b = self._resolved(a), self._resolved(b)
        for x, y in ((a, b), (b, a)):
            if self._at_most(x.lo, y.lo) and self._at_most(y.lo, x.hi):
                return Span(x.lo, self._order.call("max", x.hi, y.hi), x.when)
        return None

    def _resolved(self, span: Span) -> Span:
        """Return a span without a condition: where it fails, the span ends at 0."""
        if span.when == TRUE:
            return span
        hi = self._length if span.hi == _HIGHEST else span.hi
        return Span(span.lo, select(span.when, hi, integer(0)))

    def _hull(self, spans: list[Span]) -> Span:
        hull, *others = (self._resolved(s) for s in spans)
        for span in others:
            hull = Span(self._order.call("min", hull.lo, span.lo), self._order.call("max", hull.hi, span.hi))
        return hull

    def _ascending(self, spans: list[Span]) -> list[Span]:
        ordered: list[Span] = []
        for span in spans:
            later = (n for n, other in enumerate(ordered) if self._at_most(span.lo, other.lo))
            ordered.insert(next(later, len(ordered)), span)
        return ordered
