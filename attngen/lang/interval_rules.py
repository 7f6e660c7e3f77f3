"""Interval rules, one per operator, over an algebra of endpoints: numbers (intervals.py), expressions (symbols.py).

An interval is a pair (lo, hi), inclusive. A BOOL interval is (must, may): whether the value is true everywhere
and whether it is true anywhere, so that False <= True orders it like a number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from attngen.lang.ranges import INT32

Interval = tuple[Any, Any]  # of numbers or of expressions: whatever the algebra computes with


def _add(alg: Any, a: Interval, b: Interval) -> Interval:
    return alg.call("add", a[0], b[0]), alg.call("add", a[1], b[1])


def _neg(alg: Any, a: Interval) -> Interval:
    return alg.call("neg", a[1]), alg.call("neg", a[0])


def _sub(alg: Any, a: Interval, b: Interval) -> Interval:
    return alg.call("sub", a[0], b[1]), alg.call("sub", a[1], b[0])


def _positive(alg: Any, a: Interval) -> bool:
    return bool(alg.holds("gt", a[0], alg.literal(0)))


def _nonnegative(alg: Any, a: Interval) -> bool:
    return bool(alg.holds("ge", a[0], alg.literal(0)))


def _infinite(alg: Any, *intervals: Interval) -> bool:
    return any(end in alg.unbounded for interval in intervals for end in interval)


def _corners(alg: Any, op: str, a: Interval, b: Interval) -> Interval:
    """Extremes of an operator that is monotone in each argument while the other is fixed."""
    points = [alg.call(op, x, y) for x in dict.fromkeys(a) for y in dict.fromkeys(b)]
    lo = hi = points[0]
    for point in points[1:]:
        lo, hi = alg.call("min", lo, point), alg.call("max", hi, point)
    return lo, hi


def _mul(alg: Any, a: Interval, b: Interval) -> Interval:
    for x, y in ((a, b), (b, a)):
        if alg.is_point(y):
            if _nonnegative(alg, y):
                return alg.call("mul", x[0], y[0]), alg.call("mul", x[1], y[0])
            if _nonnegative(alg, _neg(alg, y)):
                return alg.call("mul", x[1], y[0]), alg.call("mul", x[0], y[0])
    if _nonnegative(alg, a) and _nonnegative(alg, b):
        return alg.call("mul", a[0], b[0]), alg.call("mul", a[1], b[1])
    if _infinite(alg, a, b):
        return alg.unbounded
    return _corners(alg, "mul", a, b)


def _floordiv(alg: Any, a: Interval, b: Interval) -> Interval:
    if _positive(alg, _neg(alg, b)):
        return _floordiv(alg, _neg(alg, a), _neg(alg, b))
    if not _positive(alg, b):
        return alg.unbounded
    if alg.is_point(b):
        return alg.call("floordiv", a[0], b[0]), alg.call("floordiv", a[1], b[0])
    return _corners(alg, "floordiv", a, b)


def _mod(alg: Any, a: Interval, b: Interval) -> Interval:
    """A box within one period keeps its order; any other takes all remainders."""
    zero = alg.literal(0)
    if _positive(alg, _neg(alg, b)):
        return alg.call("add", b[0], alg.literal(1)), zero
    if not _positive(alg, b):
        return alg.unbounded
    last = alg.call("sub", b[1], alg.literal(1))
    if _infinite(alg, a) or not alg.is_point(b):
        return zero, alg.call("min", a[1], last) if _nonnegative(alg, a) else last
    divisor = b[0]
    within = alg.call("eq", alg.call("floordiv", a[0], divisor), alg.call("floordiv", a[1], divisor))
    return (
        alg.call("select", within, alg.call("mod", a[0], divisor), zero),
        alg.call("select", within, alg.call("mod", a[1], divisor), last),
    )


def _truediv(alg: Any, a: Interval, b: Interval) -> Interval:
    if not (_positive(alg, b) or _positive(alg, _neg(alg, b))):
        return alg.unbounded
    return _corners(alg, "truediv", a, b)


def _pow(alg: Any, a: Interval, b: Interval) -> Interval:
    if not isinstance(b[0], int | float):
        return alg.unbounded
    if not alg.is_point(b):
        return _float_power(alg, a, b)
    exponent = b[0]
    if _infinite(alg, a):
        return (alg.literal(0), alg.unbounded[1]) if exponent in range(2, 65, 2) else alg.unbounded
    if exponent != int(exponent) or not 0 <= exponent <= 64:
        ok = a[0] > 0 or (a[0] >= 0 and exponent > 0)
        return _corners(alg, "pow", a, b) if ok and abs(exponent) <= 64 else alg.unbounded
    base = _abs(alg, a) if exponent % 2 == 0 else a
    return _corners(alg, "pow", base, b)


def _float_power(alg: Any, a: Interval, b: Interval) -> Interval:
    """Numbers only: a power whose exponent varies, of a base that is not negative."""
    if a[0] < 0:
        return alg.unbounded
    if a[0] == 0 or _infinite(alg, a, b):
        return 0.0, math.inf
    powers = [y * math.log2(x) for x in a for y in b]
    apart = 1e-4 + 1e-6 * max(abs(b[0]), abs(b[1]))  # as far as kernels may round the logarithm and the product
    lo, hi = (2.0 ** min(max(power, -1000.0), 1000.0) for power in (min(powers) - apart, max(powers) + apart))
    return lo, hi


def _abs(alg: Any, a: Interval) -> Interval:
    zero = alg.literal(0)
    negated = _neg(alg, a)
    return alg.call("max", alg.call("max", a[0], negated[0]), zero), alg.call("max", a[1], negated[1])


def _pairwise(op: str) -> Callable[[Any, Interval, Interval], Interval]:
    return lambda alg, a, b: (alg.call(op, a[0], b[0]), alg.call(op, a[1], b[1]))


def _bitand(alg: Any, a: Interval, b: Interval) -> Interval:
    ends = [x[1] for x in (a, b) if _nonnegative(alg, x)]
    if not ends:
        return alg.envelope(*a, *b)
    return alg.literal(0), ends[0] if len(ends) == 1 else alg.call("min", *ends)


def _bitor(alg: Any, a: Interval, b: Interval) -> Interval:
    if not (_nonnegative(alg, a) and _nonnegative(alg, b)):
        return alg.envelope(*a, *b)
    return alg.call("max", a[0], b[0]), alg.call("add", a[1], b[1])


def _bitxor(alg: Any, a: Interval, b: Interval) -> Interval:
    return (
        (alg.literal(0), _bitor(alg, a, b)[1]) if _nonnegative(alg, a) and _nonnegative(alg, b) else _bitor(alg, a, b)
    )


def _of_bits(op: str, rule: Callable[..., Interval]) -> Callable[..., Interval]:
    """An operator on bits, of which more is known where both sides are single values, as in a run of equal ids."""

    def bits(alg: Any, a: Interval, b: Interval) -> Interval:
        lo, hi = rule(alg, a, b)
        single = alg.single(a, b)
        if single == alg.false:
            return lo, hi
        ends = (lo, hi)
        if _infinite(alg, ends):
            ends = tuple(map(alg.literal, INT32))
            if not all(alg.holds("ge", x[0], ends[0]) and alg.holds("le", x[1], ends[1]) for x in (a, b)):
                return lo, hi
        value = alg.call(op, a[0], b[0])
        return alg.call("select", single, value, ends[0]), alg.call("select", single, value, ends[1])

    return bits


def _invert(alg: Any, a: Interval) -> Interval:
    return _sub(alg, (alg.literal(-1),) * 2, a)


def _shift(rule: Callable[[Any, Interval, Interval], Interval]) -> Callable[..., Interval]:
    """A shift is a multiplication or a floor division by a power of two."""

    def shift(alg: Any, a: Interval, b: Interval) -> Interval:
        low, high = (alg.value(end) for end in b)
        if low is None or high is None or low < 0 or high > 63:
            return alg.unbounded
        return rule(alg, a, (alg.literal(2 ** int(low)), alg.literal(2 ** int(high))))

    return shift


def _not(alg: Any, a: Interval) -> Interval:
    return alg.call("not", a[1]), alg.call("not", a[0])


def _xor(alg: Any, a: Interval, b: Interval) -> Interval:
    if alg.is_point(a) and alg.is_point(b):
        return (alg.call("xor", a[0], b[0]),) * 2
    return _hull_or(alg, _both(alg, a, _not(alg, b)), _both(alg, _not(alg, a), b))


def _both(alg: Any, a: Interval, b: Interval) -> Interval:
    return alg.call("and", a[0], b[0]), alg.call("and", a[1], b[1])


def _hull_or(alg: Any, a: Interval, b: Interval) -> Interval:
    return alg.call("or", a[0], b[0]), alg.call("or", a[1], b[1])


def _less(op: str) -> Callable[[Any, Interval, Interval], Interval]:
    return lambda alg, a, b: (alg.call(op, a[1], b[0]), alg.call(op, a[0], b[1]))


def _greater(op: str) -> Callable[[Any, Interval, Interval], Interval]:
    return lambda alg, a, b: (alg.call(op, a[0], b[1]), alg.call(op, a[1], b[0]))


def _eq(alg: Any, a: Interval, b: Interval) -> Interval:
    if alg.is_point(a) and alg.is_point(b):
        return (alg.call("eq", a[0], b[0]),) * 2
    must, may = _both(alg, _less("le")(alg, a, b), _greater("ge")(alg, a, b))
    return must, alg.call("and", may, alg.may_equal(a, b))


def _select(alg: Any, c: Interval, a: Interval, b: Interval) -> Interval:
    """The arm that the condition picks where it is constant, the hull of both elsewhere."""
    ends = []
    for side, hull in ((0, "min"), (1, "max")):
        mixed = alg.call(hull, a[side], b[side])
        otherwise = alg.call("select", c[1], mixed, b[side]) if not alg.is_point(c) else b[side]
        ends.append(alg.call("select", c[0], a[side], otherwise))
    return ends[0], ends[1]


def _increasing(function: Callable[[float], float]) -> Callable[[Any, Interval], Interval]:
    """Numbers only: an increasing float function; outside its domain nothing is known."""

    def end(x: float) -> float:
        try:
            return function(x)
        except OverflowError:
            return math.inf
        except ValueError:
            return math.nan

    return lambda alg, a: (end(a[0]), end(a[1]))


def _at_ends(op: str) -> Callable[[Any, Interval], Interval]:
    return lambda alg, a: (alg.call(op, a[0]), alg.call(op, a[1]))


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


def _rsqrt(alg: Any, a: Interval) -> Interval:
    if a[0] < 0:
        return alg.unbounded
    lo, hi = (math.inf if x == 0 else 1 / math.sqrt(x) for x in (a[1], a[0]))
    return lo, hi


def _atan2(alg: Any, y: Interval, x: Interval) -> Interval:
    """Numbers only: increasing in y, and monotone in x for each y, right of the origin; else anything."""
    if x[0] <= 0:
        return -math.pi, math.pi
    ends = [math.atan2(b, a) for b in y for a in x]
    return min(ends), max(ends)


def _log1p(x: float) -> float:
    return -math.inf if x == -1 else math.log1p(x)


def _log(x: float) -> float:
    return -math.inf if x == 0 else math.log(x)


RULES: dict[str, Callable[..., Interval]] = {
    "add": _add,
    "sub": _sub,
    "mul": _mul,
    "neg": _neg,
    "truediv": _truediv,
    "floordiv": _floordiv,
    "mod": _mod,
    "pow": _pow,
    "bitand": _of_bits("bitand", _bitand),
    "bitor": _of_bits("bitor", _bitor),
    "bitxor": _of_bits("bitxor", _bitxor),
    "invert": _invert,
    "lshift": _shift(_mul),
    "rshift": _shift(_floordiv),
    "lt": _less("lt"),
    "le": _less("le"),
    "gt": _greater("gt"),
    "ge": _greater("ge"),
    "eq": _eq,
    "ne": lambda alg, a, b: _not(alg, _eq(alg, a, b)),
    "and": _both,
    "or": _hull_or,
    "xor": _xor,
    "not": _not,
    "select": _select,
    "min": _pairwise("min"),
    "max": _pairwise("max"),
    "abs": _abs,
    "floor": _at_ends("floor"),
    "ceil": _at_ends("ceil"),
    "trunc": _at_ends("trunc"),
    "round": _at_ends("round"),
    "exp": _increasing(math.exp),
    "exp2": _increasing(lambda x: 2.0**x),
    "log": _increasing(_log),
    "log2": _increasing(lambda x: _log(x) / math.log(2)),
    "expm1": _increasing(math.expm1),
    "log1p": _increasing(_log1p),
    "erf": _increasing(math.erf),
    "tanh": _increasing(math.tanh),
    "sigmoid": _increasing(_sigmoid),
    "silu": lambda alg, a: (-0.2784645 if a[0] < 0 else 0.0, max(a[1], 0.0)),
    "sqrt": _increasing(math.sqrt),
    "rsqrt": _rsqrt,
    "sin": lambda alg, a: (-1.0, 1.0),
    "cos": lambda alg, a: (-1.0, 1.0),
    "tan": lambda alg, a: alg.unbounded,
    "atan2": _atan2,
    "to_float": _at_ends("to_float"),
    "to_int": _at_ends("to_int"),
}
