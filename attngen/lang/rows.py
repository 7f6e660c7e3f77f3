"""Keys that a single query row sees, as intervals in closed form: a comparison per end, not a whole mask."""

from __future__ import annotations

from collections.abc import Callable

from attngen.lang.bands import bands
from attngen.lang.facts import Facts, index
from attngen.lang.ir import Expr, Op, Search, Var, rewrite, walk
from attngen.lang.simplify import TRUE, and_, make
from attngen.lang.spans import Interval

#: The corners of a box of one row.
_CORNERS = {"q_lo": index("q"), "q_hi": index("q"), "q_pos_lo": index("q_pos"), "q_pos_hi": index("q_pos")}


def own_intervals(
    mask: Expr, facts: Facts, accepts: Callable[[Expr], bool] = lambda end: True
) -> tuple[tuple[Interval, ...], Expr]:
    """Return one or two intervals of keys over ``q`` and ``q_pos``, and a condition on the keys in them.

    The condition is TRUE where the intervals are the whole mask. It may reach a load outside its extent that a term of
    the mask guarded which is now an interval: there the load must give some value, and not fault. Terms with an end
    that the caller does not accept stay in the condition.
    """

    def closed_by(mask: Expr) -> tuple[Interval, ...] | None:
        intervals = _closed(mask, facts)
        ends = (end for each in intervals or () for end in (each.lo, each.hi) if end is not None)
        return intervals if all(map(accepts, ends)) else None

    whole = closed_by(mask)
    if whole is not None:
        return whole, TRUE
    closed: Expr = TRUE
    rest: Expr = TRUE
    for term in _terms(mask):
        intervals = closed_by(and_(closed, term))
        if intervals is not None and len(intervals) == 1:
            closed = and_(closed, term)
        else:
            rest = and_(rest, term)
    intervals = _closed(closed, facts)
    assert intervals is not None
    return intervals, rest


def _terms(mask: Expr) -> list[Expr]:
    match mask:
        case Op(op="and", args=(a, b)):
            return [*_terms(a), *_terms(b)]
    return [mask]


def _closed(mask: Expr, facts: Facts) -> tuple[Interval, ...] | None:
    """Return the keys that a single row sees, if one or two intervals without a search are exactly those.

    They are exact if the visible and the full intervals of a box of one row are the same.
    """
    of_row = bands(mask, facts, over="kv")
    may, must = ([Interval(_of_row(i.lo), _of_row(i.hi)) for i in kind] for kind in (of_row.visible, of_row.full))
    ends = [end for interval in may for end in (interval.lo, interval.hi) if end is not None]
    searched = any(isinstance(node, Search) for end in ends for node in walk(end))
    return tuple(may) if may == must and 1 <= len(may) <= 2 and not searched else None


def _of_row(end: Expr | None) -> Expr | None:
    """Return the end of an interval for a box of one row."""

    def rule(node: Expr) -> Expr | None:
        if isinstance(node, Var):
            return _CORNERS.get(node.name)
        return make(node.op, *node.args, wide=node.wide) if isinstance(node, Op) else None

    return None if end is None else rewrite(end, rule)
