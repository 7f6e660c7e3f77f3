"""The derivative of a score, as an expression: with respect to ``s``, to a scalar, or to each element it loads.

Where a function has no derivative the value is torch's: 0 for ``floor`` and its like and at the kink of ``abs``, one
half of each argument where ``min`` and ``max`` meet, 1 at both ends of ``clamp``. A branch that is not taken is
selected away, never multiplied by zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from attngen.lang.ir import Const, Expr, Load, Op, Type, Var, walk

ZERO = Const(0.0, Type.FLOAT)
ONE = Const(1.0, Type.FLOAT)


def differentiate(expr: Expr, wrt: str | Load) -> Expr:
    """Return d expr / d wrt, a FLOAT expression (``Const(0.0)`` where nothing depends on it).

    ``wrt`` is ``s``, the name of a float scalar or of a 0-d float tensor, or one ``Load`` as it stands in ``expr``.
    """
    if isinstance(wrt, Load):
        return _derivative(expr, wrt)
    leaves = {n for n in walk(expr) if (isinstance(n, Var) and n.name == wrt) or n == Load(wrt, (), Type.FLOAT)}
    assert len(leaves) <= 1
    return _derivative(expr, leaves.pop()) if leaves else ZERO


def _derivative(expr: Expr, leaf: Expr) -> Expr:
    derivative = _Derivative(leaf).of(expr)
    return ZERO if derivative is None else derivative.expr()


def differentiate_loads(expr: Expr, tensor: str) -> tuple[tuple[Load, Expr], ...]:
    """Return each distinct element of ``tensor`` that the expression reads, with the derivative with respect to it.

    An element read at two places counts once. Two different index expressions count separately, even where they name
    the same element, so that the sum of all contributions is right.
    """
    loads = dict.fromkeys(n for n in walk(expr) if isinstance(n, Load) and n.tensor == tensor)
    pairs = ((load, differentiate(expr, load)) for load in loads)
    return tuple((load, slope) for load, slope in pairs if slope != ZERO)


def as_clamp(node: Expr) -> tuple[Expr, Expr, Expr] | None:
    """Return (value, low, high) of ``clamp``, which the parser writes as ``min(max(value, low), high)``."""
    match node:
        case Op(op="min", args=(Op(op="max", args=(value, low)), high)):
            return value, low, high
    return None


@dataclass(frozen=True, slots=True)
class _Part:
    """A derivative that is ``value`` where ``live`` holds (None: everywhere), and 0 elsewhere whatever ``value`` is.

    The condition is carried to the end of the chain rule: otherwise an infinite derivative of an outer function, such
    as a root at 0, times an inner one that is 0 because its branch is not taken would be NaN.
    """

    value: Expr
    live: Expr | None = None

    def expr(self) -> Expr:
        """Return the derivative as one expression."""
        return self.value if self.live is None else _select(self.live, self.value)


class _Derivative:
    """Differentiates with respect to one leaf; None stands for a derivative that is zero everywhere."""

    def __init__(self, leaf: Expr) -> None:
        self.leaf = leaf
        self._known: dict[Expr, _Part | None] = {}

    def of(self, node: Expr) -> _Part | None:
        if node == self.leaf:
            return _Part(ONE)
        if not isinstance(node, Op) or node.type is not Type.FLOAT:
            return None
        if node not in self._known:
            self._known[node] = self._rule(node)
        return self._known[node]

    def _rule(self, node: Op) -> _Part | None:
        clamp = as_clamp(node)
        if clamp is not None:
            return self._clamp(*clamp)
        match node.op:
            case "select":
                condition, a, b = node.args
                return _choose(condition, self.of(a), self.of(b))
            case "min" | "max":
                return self._extremum(node)
            case "add" | "sub":
                da, db = (self.of(arg) for arg in node.args)
                return _sum(da, db if node.op == "add" else _neg(db))
            case "mul":
                a, b = node.args
                return _sum(_times(self.of(a), b), _times(self.of(b), a))
            case "truediv":
                return self._quotient(node)
            case "pow":
                return self._power(node)
            case op if op in _OUTER:
                inner = self.of(node.args[0])
                return None if inner is None else _times(inner, _OUTER[op](node, node.args[0]))
            case "atan2":
                return self._angle(*node.args)
            case _:  # to_float, floor, ceil, trunc, round: constant almost everywhere
                return None

    def _clamp(self, value: Expr, low: Expr, high: Expr) -> _Part | None:
        inside = _both(_op("ge", value, low), _op("le", value, high))
        below = _both(_op("lt", low, high), _op("lt", value, low))
        above = _either(_op("gt", value, high), _op("lt", high, low))
        parts = [
            _choose(inside, self.of(value), None),
            _choose(below, self.of(low), None),
            _choose(above, self.of(high), None),
        ]
        return _sum(_sum(parts[0], parts[1]), parts[2])

    def _extremum(self, node: Op) -> _Part | None:
        a, b = node.args
        da, db = self.of(a), self.of(b)
        if da is None and db is None:
            return None
        first, second = ("lt", "gt") if node.op == "min" else ("gt", "lt")
        meet = _times(_sum(da, db), Const(0.5, Type.FLOAT))  # equal arguments share; NaN makes all NaN anyway
        return _choose(_op(first, a, b), da, _choose(_op(second, a, b), db, meet))

    def _quotient(self, node: Op) -> _Part | None:
        a, b = node.args
        da, db = self.of(a), self.of(b)
        left = None if da is None else _Part(_op("truediv", da.value, b), da.live)
        right = None if db is None else _neg(_times(db, _op("truediv", node, b)))
        return _sum(left, right)

    def _power(self, node: Op) -> _Part | None:
        base, exponent = node.args
        inner = self.of(base)
        if not isinstance(exponent, Const):
            return _sum(self._by_base(node, inner), self._by_exponent(node, self.of(exponent)))
        power = float(exponent.value)
        if inner is None or power == 0:
            return None
        if power == 1:
            return inner
        lower = base if power == 2 else _op("pow", base, Const(power - 1, Type.FLOAT))
        return _times(inner, _op("mul", Const(power, Type.FLOAT), lower))

    @staticmethod
    def _by_base(node: Op, inner: _Part | None) -> _Part | None:
        base, exponent = node.args
        slope = _op("mul", exponent, _op("pow", base, _op("sub", exponent, ONE)))
        return _choose(_op("ne", exponent, ZERO), _times(inner, slope), None)

    @staticmethod
    def _by_exponent(node: Op, inner: _Part | None) -> _Part | None:
        base, exponent = node.args
        slope = _times(inner, _op("mul", node, _op("log", base)))
        if isinstance(base, Const) and base.value != 0:
            return slope
        flat = _both(_op("eq", base, ZERO), _op("ge", exponent, ZERO))  # where the logarithm is -inf
        return _choose(flat, None, slope)

    def _angle(self, y: Expr, x: Expr) -> _Part | None:
        radius = _op("add", _square(y), _square(x))
        by_y = _times(self.of(y), _op("truediv", x, radius))
        slope = _sum(by_y, _neg(_times(self.of(x), _op("truediv", y, radius))))
        if any(isinstance(side, Const) and side.value != 0 for side in (y, x)):
            return slope
        return _choose(_op("ne", radius, ZERO), slope, None)  # 0 at the origin, as in torch


def _square(x: Expr) -> Expr:
    return _number(x.value * x.value) if isinstance(x, Const) else _op("mul", x, x)


def _number(value: float) -> Const:
    return Const(value, Type.FLOAT)


def _op(op: str, *args: Expr) -> Op:
    compared = op in ("lt", "le", "gt", "ge", "eq", "ne")
    return Op(op, args, Type.BOOL if compared else Type.FLOAT)


def _both(a: Expr, b: Expr) -> Expr:
    return Op("and", (a, b), Type.BOOL)


def _either(a: Expr, b: Expr) -> Expr:
    return Op("or", (a, b), Type.BOOL)


def _not(a: Expr) -> Expr:
    return Op("not", (a,), Type.BOOL)


def _sum(a: _Part | None, b: _Part | None) -> _Part | None:
    if a is None or b is None:
        return b if a is None else a
    first, second = a.expr(), b.expr()
    live = None if a.live is None or b.live is None else _either(a.live, b.live)
    if isinstance(second, Op) and second.op == "neg":
        return _Part(_op("sub", first, second.args[0]), live)
    return _Part(_op("add", first, second), live)


def _neg(a: _Part | None) -> _Part | None:
    if a is None:
        return None
    if isinstance(a.value, Const):
        return _Part(_number(-a.value.value), a.live)
    return _Part(_op("neg", a.value), a.live)


def _times(a: _Part | None, b: Expr) -> _Part | None:
    """Return a * b for a derivative ``a``; a factor of one vanishes."""
    if a is None:
        return None
    if a.value == ONE:
        return _Part(b, a.live)
    return a if b == ONE else _Part(_op("mul", a.value, b), a.live)


def _choose(condition: Expr, a: _Part | None, b: _Part | None) -> _Part | None:
    """Return the derivative of a where the condition holds, and that of b elsewhere."""
    if a is None or b is None:
        part, chosen = (a, condition) if b is None else (b, _not(condition))
        if part is None:
            return None
        return _Part(part.value, chosen if part.live is None else _both(chosen, part.live))
    if a == b:
        return a
    value = a.value if a.value == b.value else Op("select", (condition, a.value, b.value), Type.FLOAT)
    if a.live is None and b.live is None:
        return _Part(value)
    if a.live is not None and b.live is None:
        return _Part(value, _either(_not(condition), a.live))
    if a.live is None and b.live is not None:
        return _Part(value, _either(condition, b.live))
    assert a.live is not None
    assert b.live is not None
    return _Part(value, Op("select", (condition, a.live, b.live), Type.BOOL))


def _select(condition: Expr, value: Expr) -> Expr:
    return Op("select", (condition, value, ZERO), Type.FLOAT)


def _sign(node: Op, x: Expr) -> Expr:
    negative = Op("select", (_op("lt", x, ZERO), _number(-1.0), ZERO), Type.FLOAT)
    return Op("select", (_op("gt", x, ZERO), ONE, negative), Type.FLOAT)


def _silu(node: Op, x: Expr) -> Expr:
    sigmoid = _op("sigmoid", x)
    return _op("mul", sigmoid, _op("add", ONE, _op("mul", x, _op("sub", ONE, sigmoid))))


#: Derivative of each function, from the node itself and its argument, so that values are reused.
_OUTER: dict[str, Callable[[Op, Expr], Expr]] = {
    "neg": lambda y, x: _number(-1.0),
    "abs": _sign,
    "exp": lambda y, x: y,
    "exp2": lambda y, x: _op("mul", y, _number(math.log(2))),
    "log": lambda y, x: _op("truediv", ONE, x),
    "log2": lambda y, x: _op("truediv", _number(1 / math.log(2)), x),
    "expm1": lambda y, x: _op("add", y, ONE),
    "log1p": lambda y, x: _op("truediv", ONE, _op("add", x, ONE)),
    "erf": lambda y, x: _op("mul", _number(2 / math.sqrt(math.pi)), _op("exp", _op("neg", _op("mul", x, x)))),
    "tanh": lambda y, x: _op("sub", ONE, _op("mul", y, y)),
    "sigmoid": lambda y, x: _op("mul", y, _op("sub", ONE, y)),
    "silu": _silu,
    "sqrt": lambda y, x: _op("truediv", _number(0.5), y),
    "rsqrt": lambda y, x: _op("mul", _number(-0.5), _op("mul", y, _op("mul", y, y))),
    "sin": lambda y, x: _op("cos", x),
    "cos": lambda y, x: _op("neg", _op("sin", x)),
    "tan": lambda y, x: _op("add", ONE, _op("mul", y, y)),
}
