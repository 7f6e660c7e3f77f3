"""Keep emitted integer arithmetic exact: in int32 where it fits, after clamping where it can, in int64 otherwise."""

from __future__ import annotations

from attngen.lang.facts import Facts, reserved
from attngen.lang.intervals import Numbers, bounds, evaluate
from attngen.lang.ir import Const, Expr, Load, Op, Type, Var, rewrite
from attngen.lang.ranges import INT32, INT64
from attngen.lang.simplify import Linear, integer, linear, make


def _fits(expr: Expr, facts: Facts) -> bool:
    lo, hi = bounds(expr, facts)
    return INT32[0] <= lo and hi <= INT32[1]


def widen(expr: Expr, facts: Facts) -> Expr | None:
    """Mark exactly those operators ``wide`` whose result may leave int32; None where int64 is too narrow."""
    numbers = Numbers(facts)
    fits = True

    def rule(node: Expr) -> Expr | None:
        nonlocal fits
        if not isinstance(node, Const | Op) or node.type is not Type.INT:
            return None
        lo, hi = evaluate(node, numbers)
        fits = fits and INT64[0] <= lo and hi <= INT64[1]
        if isinstance(node, Const):
            return None
        return Op(node.op, node.args, node.type, not (INT32[0] <= lo and hi <= INT32[1]))

    widened = rewrite(expr, rule)
    return widened if fits else None


def saturate(end: Expr, length: Expr, facts: Facts) -> Expr:
    """Return an end of an interval that is the same once clipped to [0, length].

    A scalar is clamped at the size from which it alone decides on which side of the sequence the end lies: ``q_pos_lo -
    min(window, 2**30 - 1) + 1`` needs no int64 for any ``window``.
    """
    match end:
        case Op(op="min" | "max" as op, args=(a, b)):
            return make(op, saturate(a, length, facts), saturate(b, length, facts))
        case Op(op="select", args=(c, a, b)):
            return make("select", c, saturate(a, length, facts), saturate(b, length, facts))
        case Op(op="add" | "sub" | "neg") if not _fits(end, facts):
            total = linear(end)
            for term in total.terms:
                total = _saturated(total, term, length, facts)
            clamped = total.expr()
            return clamped if _fits(clamped, facts) else end
    return end


def _saturated(total: Linear, term: Expr, length: Expr, facts: Facts) -> Linear:
    """Clamp one declared term; the other terms decide how far it matters."""
    coefficient = total.terms[term]
    if not isinstance(term, Var | Load) or abs(coefficient) != 1 or (isinstance(term, Var) and reserved(term)):
        return total
    rest = Linear({t: c for t, c in total.terms.items() if t != term}, total.constant)
    before = bounds(rest.expr(), facts)  # end <= 0 while the term outweighs the rest
    beyond = bounds(rest.plus(linear(length), -1).expr(), facts)  # end >= length while it outweighs this
    low, high = (-before[1], -beyond[0]) if coefficient == 1 else (beyond[0], before[1])
    lo, hi = bounds(term, facts)
    clamped: Expr = term
    if hi > high:
        clamped = make("min", clamped, integer(int(high)))
    if lo < low:
        clamped = make("max", clamped, integer(int(low)))
    return Linear({clamped if t == term else t: c for t, c in total.terms.items()}, total.constant)
