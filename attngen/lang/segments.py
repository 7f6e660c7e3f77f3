"""Segments: the tiles that a kernel loops over, from bands: first those that need no mask code, then the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from attngen.lang.bands import Bands
from attngen.lang.facts import Facts
from attngen.lang.ir import Const, Expr, Op, names
from attngen.lang.overflow import widen
from attngen.lang.simplify import add, ceildiv, floordiv, integer, select, sub
from attngen.lang.spans import Interval
from attngen.lang.symbols import Symbols

Range = tuple[Expr, Expr]

#: Sorting networks by number of values: which two to exchange, in order.
_NETWORKS: tuple[tuple[tuple[int, int], ...], ...] = (
    (),
    (),
    ((0, 1),),
    ((0, 2), (0, 1), (1, 2)),
    ((0, 1), (2, 3), (0, 2), (1, 3), (1, 2)),
)

_ZERO: Expr = integer(0)
_EMPTY = Interval(_ZERO, _ZERO)


@dataclass(frozen=True, slots=True)
class Segments:
    """Ranges ``lo <= tile < hi`` of tiles, disjoint, ascending within each list; one with ``hi <= lo`` is empty.

    Every row sees all of a tile in ``full`` (as far as ``extent`` reaches), so it needs no mask; together with
    ``partial`` these are all tiles of which any row sees anything, each once. ``lo >= 0`` and ``hi <= tiles``.
    """

    full: tuple[Range, ...]
    partial: tuple[Range, ...]


def segments(bands: Bands, tile: int | Expr, extent: Expr, facts: Facts | None = None) -> Segments:
    """Cut bands into tiles of ``tile`` positions, of which ``extent`` positions (at most the length) are looped over.

    A caller that treats a ragged last tile separately passes an ``extent`` that is a multiple of ``tile``. Operators
    whose result may leave int32 are marked wide; a range that is not empty fits.
    """
    return _segments(bands, integer(tile) if isinstance(tile, int) else tile, extent, facts or Facts())


@lru_cache(maxsize=256)  # the kernels of a spec share a few masks and tiles
def _segments(bands: Bands, tile: Expr, extent: Expr, facts: Facts) -> Segments:
    cutter = _Cutter(bands, tile, extent, facts)
    full, partial = cutter.matched() or cutter.sorted()
    return Segments(cutter.finish(full), cutter.finish(partial))


class _Cutter:
    def __init__(self, bands: Bands, tile: Expr, extent: Expr, facts: Facts) -> None:
        self._bands = bands
        self._tile = tile
        self._extent = extent
        self._facts = facts.of_tiles(names(extent), names(tile))
        self._order = Symbols(self._facts, {})
        self._tiles = ceildiv(extent, tile)

    def finish(self, ranges: Iterable[Range]) -> tuple[Range, ...]:
        """Drop ranges that are always empty; keep arithmetic exact."""
        finished = []
        for lo, hi in ranges:
            if not self._at_most(hi, lo):
                first, last = widen(lo, self._facts), widen(hi, self._facts)
                assert first is not None and last is not None, "ends of bands fit int64"  # noqa: PT018
                finished.append((first, last))
        return tuple(finished)

    def matched(self) -> tuple[list[Range], list[Range]] | None:
        """Cut interval by interval, where it is known which full one lies in which, and in what order they are."""
        visible = self._bands.visible
        full = self._bands.full or (_EMPTY,) * len(visible)
        if len(visible) != len(full):
            return None
        if len(visible) > 1 and not all(self._inside(f, v) for f, v in zip(full, visible, strict=True)):
            return None
        if not all(self._starts_before(a, b) for a, b in pairwise(visible)):
            return None
        inner, outer = [], []
        done: Expr = _ZERO  # all tiles before this one belong to earlier intervals
        for v, f in zip(visible, full, strict=True):
            lo, hi = self._outward(v)
            lo = self._max(lo, done)
            done = self._max(hi, lo)
            if f is _EMPTY:
                outer.append((lo, hi))
                continue
            first, last = self._inward(f)
            first = self._max(first, lo)
            if not self._at_most(last, done):
                last = self._min(last, hi)
            inner.append((first, last))
            outer += [(lo, first if self._at_most(first, done) else self._min(first, hi)), (self._max(last, first), hi)]
        return inner, outer

    def sorted(self) -> tuple[list[Range], list[Range]]:
        """Cut intervals in unknown order.

        Disjoint ranges in ascending order have ascending starts and ascending ends, so the two are sorted separately.
        What is visible but not full starts where a visible range does, or where a full one ends.
        """
        visible = self._disjoint([self._outward(v) for v in self._bands.visible])
        room = len(_NETWORKS) - 1 - len(visible)  # a full interval beyond that is run as partial
        full = self._disjoint([self._inward(f) for f in self._bands.full[:room]])
        starts = self._ascending([lo for lo, _ in visible] + [hi for _, hi in full])
        ends = self._ascending([hi for _, hi in visible] + [lo for lo, _ in full])
        return full, list(zip(starts, ends, strict=True))

    def _disjoint(self, ranges: list[Range]) -> list[Range]:
        ranges = [(lo, self._max(hi, lo)) for lo, hi in ((self._min(lo, self._tiles), hi) for lo, hi in ranges)]
        starts, ends = self._ascending([r[0] for r in ranges]), self._ascending([r[1] for r in ranges])
        return [(self._max(lo, done), hi) for lo, hi, done in zip(starts, ends, [_ZERO, *ends], strict=False)]

    def _ascending(self, values: list[Expr]) -> list[Expr]:
        """Sort; each exchange is a minimum and a maximum, unless the order is known."""
        values = list(values)
        for n, m in _NETWORKS[len(values)]:
            x, y = values[n], values[m]
            values[n], values[m] = self._min(x, y), self._max(x, y)
        return values

    def _outward(self, interval: Interval) -> Range:
        """Return the tiles that an interval touches: ``lo >= 0``, ``hi <= tiles``."""
        lo = _ZERO if interval.lo is None else self._max(self._first(interval.lo), _ZERO)
        return lo, self._last(interval.hi, ceildiv)

    def _first(self, position: Expr) -> Expr:
        """The tile that a position lies in; one beyond the extent is clipped if rounding it could overflow int64."""
        first = floordiv(position, self._tile)
        if widen(first, self._facts) is None:
            beyond = sub(add(self._extent, self._tile), integer(1))
            first = floordiv(self._min(position, beyond), self._tile)
        return first

    def _inward(self, interval: Interval) -> Range:
        """Return the tiles that lie in an interval as far as the extent reaches: ``lo >= 0``, ``hi <= tiles``."""
        if interval.lo is None:
            return _ZERO, self._last(interval.hi, floordiv)
        lo = ceildiv(self._reachable(interval.lo), self._tile)
        return self._max(lo, _ZERO), self._last(interval.hi, floordiv)

    def _last(self, end: Expr | None, divide: Callable[[Expr, Expr], Expr]) -> Expr:
        match end:
            case None:
                return self._tiles
            case Op(op="select", args=(c, x, Const(value=0))):  # an interval that exists only under a condition
                return select(c, self._last(x, divide), _ZERO)
        return self._min(divide(self._reachable(end), self._tile), self._tiles)

    def _reachable(self, position: Expr) -> Expr:
        """Clip a position to the extent if rounding it up to a tile could overflow."""
        rounded = ceildiv(position, self._tile)
        return position if widen(rounded, self._facts) == rounded else self._min(position, self._extent)

    def _inside(self, a: Interval, b: Interval) -> bool:
        return (b.lo is None or (a.lo is not None and self._at_most(b.lo, a.lo))) and (
            b.hi is None or (a.hi is not None and self._at_most(a.hi, b.hi))
        )

    def _starts_before(self, a: Interval, b: Interval) -> bool:
        return a.lo is None or (b.lo is not None and self._at_most(a.lo, b.lo))

    def _at_most(self, x: Expr, y: Expr) -> bool:
        return x == y or self._order.holds("le", x, y)

    def _max(self, x: Expr, y: Expr) -> Expr:
        return self._order.call("max", x, y)

    def _min(self, x: Expr, y: Expr) -> Expr:
        return self._order.call("min", x, y)
