"""Bounds of expressions: numeric (``bounds``), and as expressions over the corners of a tile (symbols.py).

Integers are exact here (overflow.py takes care of int32). A float interval holds for values that are not NaN; a
comparison that NaN could decide is never known.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from attngen.lang.facts import Facts, aligned
from attngen.lang.interval_rules import RULES, Interval
from attngen.lang.ir import MAX_SEQLEN, Const, Expr, Load, Op, Search, Type, Var
from attngen.lang.ranges import INT32, Range, truncated
from attngen.lang.simplify import COMPLEMENT, FOLD, Linear, linear, make

#: Float operators whose result is NaN only if an argument is.
_NAN_PRESERVING = frozenset({"neg", "abs", "min", "max", "floor", "ceil", "trunc", "round"})

#: Relative and absolute errors that the functions of kernels stay below, and what none of their results leaves.
_ERRORS = {
    "tanh": (2.0**-10, 0.0), "sigmoid": (0.0, 2.0**-11), "silu": (2.0**-11, 2.0**-6), "erf": (0.0, 2.0**-9),
    "exp": (2.0**-16, 0.0), "exp2": (2.0**-16, 0.0), "expm1": (2.0**-16, 2.0**-20), "pow": (2.0**-16, 0.0),
    **dict.fromkeys(("log", "log2", "log1p"), (2.0**-20, 2.0**-19)),
}  # fmt: skip
_WITHIN = {"tanh": (-1.0, 1.0), "erf": (-1.0, 1.0), "sigmoid": (0.0, 1.0)}

#: The length that each position is below.
_LENGTHS = {
    **dict.fromkeys(("q", "q_lo", "q_hi"), "seqlen_q"),
    **dict.fromkeys(("kv", "kv_lo", "kv_hi", "q_pos", "q_pos_lo", "q_pos_hi"), "seqlen_k"),
}

#: Operators whose result is never -0.0 unless it may be negative.
_NEVER_NEGATIVE = frozenset({"abs", "exp", "exp2", "sigmoid", "to_float"})

#: Float operators that do not round; the result of any other depends on how a compiler contracts it.
EXACT = _NAN_PRESERVING | {"select", "to_float"}


def bounds(expr: Expr, ranges: Mapping[str, Range] | Facts) -> Range:
    """Return inclusive numeric bounds of an expression; ±inf where there is none.

    ``ranges`` maps names of scalars and tensors (their elements) to (lo, hi); index names that it lacks have
    their default range. A BOOL expression gives (must, may). Sound for every value that is not NaN.
    """
    facts = ranges if isinstance(ranges, Facts) else Facts(ranges)
    return evaluate(expr, Numbers(facts))


def evaluate(expr: Expr, algebra: Any) -> Interval:
    """Return the interval of an expression in an algebra of endpoints (``Numbers``, ``Symbols``), memoized there."""
    known = algebra.memo.get(expr)
    if known is None:
        known = algebra.memo[expr] = algebra.refined(expr, _evaluate(expr, algebra))
    return known


def _evaluate(expr: Expr, algebra: Any) -> Interval:
    leaf = algebra.leaf(expr)
    if leaf is not None:
        return leaf
    match expr:
        case Load(indices=indices):
            return algebra.load(expr, tuple(evaluate(i, algebra) for i in indices))
        case Search(value=value, length=length):
            return algebra.search(expr, evaluate(value, algebra), evaluate(length, algebra))
        case Op(op="add" | "sub" | "neg" | "mul", type=Type.INT):
            total = linear(expr)
            if expr not in total.terms:
                return _sum(total, algebra)
        case Op(op=op, args=(a, b)) if op in COMPLEMENT:
            return _comparison(op, a, b, algebra)
        case Op(op="to_int", args=(value,)) if value.type is Type.FLOAT:
            return algebra.truncation(value)
    assert isinstance(expr, Op)
    args = [evaluate(a, algebra) for a in expr.args]
    if expr.op == "mul" and expr.args[0] == expr.args[1]:
        args = [RULES["abs"](algebra, args[0])] * 2
    interval = RULES[expr.op](algebra, *args)
    return algebra.rounded(expr.op, interval) if expr.type is Type.FLOAT else interval


def _sum(total: Linear, algebra: Any) -> Interval:
    """Add up the intervals of the terms; ``q`` and ``q_pos`` in one sum move together."""
    q_pos, q = Var("q_pos", Type.INT), Var("q", Type.INT)
    if q_pos in total.terms and q in total.terms:
        total = _without(total, q_pos).plus(linear(aligned()), total.terms[q_pos])
    total, result = algebra.paired(total)
    for term, coefficient in total.terms.items():
        factor = (algebra.literal(coefficient),) * 2
        result = RULES["add"](algebra, result, RULES["mul"](algebra, evaluate(term, algebra), factor))
    return RULES["add"](algebra, result, (algebra.literal(total.constant),) * 2)


def _without(total: Linear, *terms: Expr) -> Linear:
    return Linear({t: c for t, c in total.terms.items() if t not in terms}, total.constant)


def _comparison(op: str, a: Expr, b: Expr, algebra: Any) -> Interval:
    """Compare; sides that share a name are subtracted first, so that what they share cancels."""
    if a.type is Type.BOOL:
        unequal = RULES["xor"](algebra, evaluate(a, algebra), evaluate(b, algebra))
        return unequal if op == "ne" else RULES["not"](algebra, unequal)
    if Type.FLOAT in (a.type, b.type):
        if not (algebra.exact(a) and algebra.exact(b)):
            return (algebra.false, algebra.true)
    elif algebra.related(a, b):
        apart = evaluate(make("sub", a, b), algebra)
        return RULES[op](algebra, apart, (algebra.literal(0),) * 2)
    return RULES[op](algebra, evaluate(a, algebra), evaluate(b, algebra))


def exact(expr: Expr, numbers: Collection[str] = ()) -> bool:
    """Whether a float is never NaN by its form alone; it is then not rounded, either. ``numbers`` are names that are
    known not to be NaN."""
    match expr:
        case Const(value=value):
            return value == value
        case Var(name=name) if name in numbers:
            return True
        case Op(op="to_float"):
            return True
        case Op(op=op, args=args) if op in _NAN_PRESERVING:
            return all(exact(a, numbers) for a in args)
        case Op(op="select", args=(_, a, b)):
            return exact(a, numbers) and exact(b, numbers)
    return expr.type is not Type.FLOAT


def has_no_sign(node: Expr, low: float) -> bool:
    """Whether a float of at least ``low`` is neither negative nor -0.0, of which roots and odd powers have a sign."""
    return low > 0 or (low == 0 and isinstance(node, Op) and node.op in _NEVER_NEGATIVE)


def never_nan(expr: Expr, numbers: Numbers) -> bool:
    """Whether a float is never NaN, by its form or by the bounds of its parts."""
    if exact(expr):
        return True
    if not isinstance(expr, Op) or not all(never_nan(arg, numbers) for arg in expr.args if arg.type is Type.FLOAT):
        return False
    ends = [evaluate(arg, numbers) for arg in expr.args]
    finite = [math.isfinite(lo) and math.isfinite(hi) for lo, hi in ends]
    match expr.op:
        case "add" | "sub":
            return any(finite)
        case "truediv":
            return any(finite) and not ends[1][0] <= 0 <= ends[1][1]
        case "mul" | "silu" | "sin" | "cos" | "tan":
            return all(finite)
        case "pow":
            return all(finite) and ends[0][0] >= 0
        case "log" | "log2" | "sqrt" | "rsqrt":
            return ends[0][0] >= 0
        case "log1p":
            return ends[0][0] >= -1
    return True  # to_float, select, exp and others that take every number


class Numbers:
    """Endpoints are Python numbers; ±inf means unbounded."""

    unbounded: Interval = (-math.inf, math.inf)
    false, true = False, True

    def __init__(self, facts: Facts, *, approximate: bool = False) -> None:
        """``approximate`` allows for the errors of functions under ``fast_math``, too."""
        self._facts, self._approximate = facts, approximate
        self._approximated = self if approximate else None
        self.memo: dict[Expr, Interval] = {}

    @staticmethod
    def literal(value: float) -> float:
        """Return the endpoint that stands for a number."""
        return value

    def related(self, a: Expr, b: Expr) -> bool:
        """Return True: subtracting numbers loses nothing."""
        return True

    @staticmethod
    def single(*intervals: Interval) -> bool:
        """Return False: a range that is declared is seldom one value."""
        return False

    @staticmethod
    def may_equal(a: Interval, b: Interval) -> bool:
        """Return True: no more is known of a range that is declared."""
        return True

    @staticmethod
    def exact(expr: Expr) -> bool:
        """Whether a float is never NaN by its form."""
        return exact(expr)

    def leaf(self, node: Expr) -> Interval | None:
        """Return the declared range of a name or of the elements of a tensor."""
        match node:
            case Const(value=value):
                return (value, value)
            case Var(name=name, type=type):
                low, high = self._facts.range(name, type)
            case Load(tensor=tensor, type=type):
                low, high = self._facts.ranges.get(tensor, INT32 if type is Type.INT else self.unbounded)
            case _:
                return None
        return (low == 1, high != 0) if type is Type.BOOL else (low, high)

    def search(self, node: Search, value: Interval, length: Interval) -> Interval:
        """Return the whole tensor: a search may end anywhere in it."""
        return (0, length[1])

    def truncation(self, value: Expr) -> Interval:
        """Return the int32 that a float becomes in any kernel, since it may be an index; NaN becomes 0."""
        if self._approximated is None:
            self._approximated = Numbers(self._facts, approximate=True)
        lo, hi = (truncated(end) for end in evaluate(value, self._approximated))
        return (lo, hi) if never_nan(value, self._approximated) else (min(lo, 0), max(hi, 0))

    def paired(self, total: Linear) -> tuple[Linear, Interval]:
        """Take out what is below a length together with that length: ``kv - seqlen_k`` is in [-MAX_SEQLEN, -1]."""
        lo = hi = 0
        for term, coefficient in tuple(total.terms.items()):
            length = _LENGTHS.get(term.name) if isinstance(term, Var) else None
            opposite = total.terms.get(Var(length, Type.INT), 0) if length else 0
            if coefficient * opposite >= 0:
                continue
            count = min(abs(coefficient), abs(opposite)) * (1 if coefficient > 0 else -1)
            ends = sorted((-count, -count * MAX_SEQLEN))
            lo, hi = lo + ends[0], hi + ends[1]
            total = total.plus(Linear({term: 1, Var(str(length), Type.INT): -1}), -count)
        return total, (lo, hi)

    def refined(self, node: Expr, interval: Interval) -> Interval:
        """Bound ``x // n * n`` for positive n: at most x, and at least min(-n, 2 * x), or 0 if x is not negative. Drop
        the bounds of what may be the reciprocal of -0.0: the rules take a 0 for one without a sign."""
        match node:
            case Op(op="rsqrt" | "pow", args=(x, *exponent), type=Type.FLOAT) if not has_no_sign(
                x, evaluate(x, self)[0]
            ):
                inverts = not exponent or evaluate(exponent[0], self)[0] < 0
                return self.unbounded if inverts else interval
            case Op(op="mul", args=(a, b)):
                for quotient, n in ((a, b), (b, a)):
                    match quotient:
                        case Op(op="floordiv", args=(x, d)) if d == n and evaluate(n, self)[0] > 0:
                            lo, hi = evaluate(x, self)
                            least = 0 if lo >= 0 else -max(evaluate(n, self)[1], -2 * lo)
                            return max(interval[0], least), min(interval[1], hi)
        return interval

    def value(self, end: Any) -> float | None:
        """Return an endpoint as a number."""
        return end

    def call(self, op: str, *args: Any) -> Any:
        """Apply an operator to endpoints."""
        match op, args:
            case "mul", (x, y) if x == 0 or y == 0:  # 0 * inf: an unbounded factor is still finite
                return 0
            case "floordiv", (x, y) if math.isinf(x):
                return x if y > 0 else -x
            case "floordiv", (x, y) if math.isinf(y):
                return 0 if (x >= 0) == (y > 0) or x == 0 else -1
            case "mod", (x, y) if math.isinf(x) or math.isinf(y):
                return 0  # only computed where a select drops it
            case "pow", (x, y):
                try:
                    return FOLD[op](x, y)
                except OverflowError:
                    return -math.inf if x < 0 and y % 2 else math.inf
        return FOLD[op](*args)

    def holds(self, op: str, x: Any, y: Any) -> bool:
        """Whether a comparison of two endpoints is true."""
        return bool(FOLD[op](x, y))

    def is_point(self, interval: Interval) -> bool:
        """Whether an interval holds a single value."""
        return bool(interval[0] == interval[1])

    def rounded(self, op: str, interval: Interval) -> Interval:
        """Allow for rounding to float32, underflow and overflow of each operation."""
        lo, hi = interval
        if lo != lo or hi != hi:
            return self.unbounded
        if op in EXACT:
            return interval
        if self._approximate and op in _ERRORS:
            relative, absolute = _ERRORS[op]
            lo, hi = (
                end if math.isinf(end) else end + side * (abs(end) * relative + absolute)
                for end, side in ((lo, -1), (hi, 1))
            )
            least, most = _WITHIN.get(op, self.unbounded)
            lo, hi = max(lo, least), min(hi, most)
        return _loosened(lo, -1), _loosened(hi, 1)

    def envelope(self, *ends: Any) -> Interval:
        """Return the range of the narrowest two's complement numbers that hold the endpoints."""
        if any(math.isinf(e) for e in ends):
            return self.unbounded
        bits = max((~e if e < 0 else e).bit_length() for e in ends)
        return (-(2**bits), 2**bits - 1)


def _loosened(value: float, side: int) -> float:
    """Move a float endpoint outward by 2 parts per million, to 0 below the normal floats, to inf above."""
    if math.isinf(value):
        return value
    value += side * abs(value) * 2e-6
    if 0 < abs(value) < 1.2e-38:
        return 0.0 if (value > 0) != (side > 0) else side * 1.2e-38
    return math.copysign(math.inf, value) if abs(value) > 3.4e38 else value
