"""Keep emitted integer arithmetic exact: in int32 where it fits, after clamping where it can, in int64 otherwise."""

from __future__ import annotations

from attngen.lang.facts import Facts, reserved
from attngen.lang.intervals import Numbers, bounds, evaluate
from attngen.lang.ir import Const, Expr, Load, Op, Type, Var, holds_int64, rewrite
from attngen.lang.ranges import INT32, INT64
from attngen.lang.simplify import Linear, add, integer, linear, make, minimum, sub


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


def narrow(end: Expr, length: Expr, tile: Expr, tiles: Expr, facts: Facts) -> Expr:
    """Rewrite a tile index with as few int64 operations as possible; clipped to [0, tiles] its value is the same.

    Minimum, maximum and the choice between two values commute with clipping. So what is too wide is clipped before
    them, and before a division by ``tile``, and is an int32 from there on.
    """
    if not holds_int64(end):
        return end
    match end:
        case Op(op="min" | "max" as op, args=(a, b)):
            parts = (narrow(each, length, tile, tiles, facts) for each in (a, b))
            return make(op, *parts)
        case Op(op="select", args=(c, a, b)):
            return make("select", c, *(narrow(each, length, tile, tiles, facts) for each in (a, b)))
        case Op(op="floordiv", args=(x, d)) if d == tile:
            return Op("floordiv", (_dividend(x, length, tile, facts), d), Type.INT)
    return _clipped(end, tiles, facts)


def _dividend(x: Expr, length: Expr, tile: Expr, facts: Facts) -> Expr:
    """Rewrite the dividend of ``tile``: positions are clipped to [0, length] before they are rounded up."""
    overhang = sub(tile, integer(1))
    match x:
        case Op(op="min" | "max" as op, args=(a, b)):
            a, b = _dividend(a, length, tile, facts), _dividend(b, length, tile, facts)
            return a if op == "max" and b == integer(0) and bounds(a, facts)[0] >= 0 else make(op, a, b)
        case Op(op="select", args=(c, a, b)):
            return make("select", c, _dividend(a, length, tile, facts), _dividend(b, length, tile, facts))
    if not holds_int64(x):
        return x
    rest = linear(x).plus(linear(overhang), -1)
    if tile not in linear(x).terms or tile in rest.terms:
        return _clipped(x, add(length, overhang), facts)
    position = widen(Linear(rest.terms, rest.constant).expr(), facts)
    assert position is not None, "ends of bands fit int64"
    position = _clipped(position, length, facts)
    rounded = widen(add(position, overhang), facts)
    return rounded if rounded is not None and not holds_int64(rounded) else add(minimum(position, length), overhang)


def _clipped(end: Expr, most: Expr, facts: Facts) -> Expr:
    """Clip the int64 terms of an integer to [0, most]; the integer clipped to that range stays the same."""
    if not holds_int64(end):
        return end
    match end:
        case Op(op="min", args=(a, b)) if most in (a, b):
            return _clipped(b if a == most else a, most, facts)
        case Op(op="min" | "max" as op, args=(a, b)):
            return make(op, _clipped(a, most, facts), _clipped(b, most, facts))
        case Op(op="select", args=(c, a, b)):
            return make("select", c, _clipped(a, most, facts), _clipped(b, most, facts))
    clipped = end if bounds(end, facts)[0] >= 0 else make("max", end, integer(0))
    clipped = make("min", clipped, most)
    exact = widen(clipped, facts)
    assert exact is not None, "ends of bands fit int64"
    return Op("to_int", (exact,), Type.INT)


def narrow_divisors(expr: Expr, facts: Facts) -> Expr:
    """Return an expression that divides int32 by int32 wherever only the divisor is wider.

    All divisors beyond a dividend give the same quotient, and the same remainder of one that is not negative. So
    ``i // (width * height)`` needs the product only as far as positions reach.
    """
    numbers = Numbers(facts)

    def rule(node: Expr) -> Expr | None:
        if not isinstance(node, Op) or node.op not in ("floordiv", "mod") or node.type is not Type.INT:
            return unmarked(node, numbers)
        x, divisor = node.args
        if not holds_int64(divisor) or holds_int64(x) or evaluate(divisor, numbers)[0] <= 0:
            return unmarked(node, numbers)
        low, high = evaluate(x, numbers)
        beyond = max(-low, high) + 1
        if beyond > INT32[1] or (node.op == "mod" and low < 0):
            return None
        least = Op("min", (divisor, integer(int(beyond))), Type.INT, wide=True)
        return Op(node.op, (x, Op("to_int", (least,), Type.INT)), Type.INT)

    return rewrite(expr, rule)


def unmarked(node: Expr, numbers: Numbers) -> Expr | None:
    """Remove ``wide`` from an operator whose arguments are int32 now and whose result fits; None for any other."""
    if not isinstance(node, Op) or not node.wide or any(map(holds_int64, node.args)):
        return None
    if node.type is Type.INT:
        low, high = evaluate(node, numbers)
        if low < INT32[0] or high > INT32[1]:
            return None
    return Op(node.op, node.args, node.type)


def saturate(end: Expr, length: Expr, facts: Facts) -> Expr:
    """Clamp a term of an end of an interval, so that the end clipped to [0, length] stays the same.

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


def _is_declared(term: Expr) -> bool:
    """Whether a term is a scalar, an element of a tensor, or a product of scalars."""
    match term:
        case Load():
            return True
        case Var():
            return not reserved(term)
        case Op(op="mul", args=args):
            return all(isinstance(each, Var) and not reserved(each) for each in args)
    return False


def _saturated(total: Linear, term: Expr, length: Expr, facts: Facts) -> Linear:
    """Clamp one term that only scalars and tensors decide; the other terms decide how far it matters."""
    coefficient = total.terms[term]
    if abs(coefficient) != 1 or not _is_declared(term):
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
    if not isinstance(term, Var | Load) and clamped is not term:
        exact = widen(clamped, facts)
        clamped = clamped if exact is None or not holds_int64(exact) else Op("to_int", (exact,), Type.INT)
    return Linear({clamped if t == term else t: c for t, c in total.terms.items()}, total.constant)
