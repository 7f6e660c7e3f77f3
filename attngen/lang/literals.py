"""Constant folding: operators whose arguments are all literals are computed at build time, not in the target."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

from attngen.lang.ir import Const, Expr, Op, Type, is_zero, rewrite
from attngen.lang.parser import FLOAT32_MAX
from attngen.lang.simplify import make


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


#: Functions that ``simplify`` does not fold, since their values are inexact.
_FUNCTIONS: dict[str, Callable[..., float]] = {
    "exp": math.exp,
    "exp2": lambda x: 2.0**x,
    "log": math.log,
    "log2": math.log2,
    "expm1": math.expm1,
    "log1p": math.log1p,
    "erf": math.erf,
    "tanh": math.tanh,
    "sigmoid": _sigmoid,
    "silu": lambda x: x * _sigmoid(x),
    "sqrt": math.sqrt,
    "rsqrt": lambda x: 1 / math.sqrt(x),
    "sin": math.sin,
    "cos": math.cos,
    "tan": math.tan,
    "atan2": math.atan2,
}


#: Operators that one literal condition decides or removes; Python's own ``~True`` would be -2 in generated code.
_LOGICAL = frozenset({"and", "or", "xor", "not", "select", "eq", "ne"})


_SMALLEST_NORMAL = 2.0**-126
#: Operators whose result is 0, for arguments other than 0, only by underflow.
_SCALING = frozenset({"mul", "truediv", "pow", "exp", "exp2"})


def fold_literals(node: Expr) -> Expr | None:
    """Fold an operator over literals, or one that a literal condition decides (a rule for ``ir.rewrite``).

    A value that float32 cannot hold becomes inf or 0 at each step, as it would in a kernel. None if there is nothing to
    fold.
    """
    folded = node if isinstance(node, Const) else _folded(node)
    if isinstance(folded, Const) and folded.type is Type.FLOAT:
        value = _float32(folded.value)
        if value != folded.value and value == value:
            folded = Const(value, Type.FLOAT)
    return None if folded is node else folded


def beyond_float32(expr: Expr) -> list[tuple[Expr, float]]:
    """Literal subexpressions that float32 cannot hold, with the value that they become: an infinity or 0."""
    replaced: dict[Expr, float] = {}

    def fold(node: Expr) -> Expr | None:
        value = fold_literals(node)
        if not isinstance(value, Const) or value.type is not Type.FLOAT:
            return value
        values = [arg.value for arg in node.args if isinstance(arg, Const)] if isinstance(node, Op) else [1.0]
        if math.isinf(value.value) and all(math.isfinite(v) for v in values):
            replaced[node] = value.value
        scales = isinstance(node, Const) or (isinstance(node, Op) and node.op in _SCALING)
        small = all(math.isfinite(v) for v in values) and (
            0 not in values or getattr(node, "op", "") in ("exp", "exp2")
        )
        if value.value == 0 and scales and small:
            replaced[node] = 0.0
        return value

    rewrite(expr, fold)
    return list(replaced.items())


def _float32(value: float) -> float:
    """Return a number as float32 holds it if it overflows or is subnormal, any other number as it is."""
    if math.isfinite(value) and abs(value) >= FLOAT32_MAX:
        return math.copysign(math.inf, value)
    if 0 < abs(value) < _SMALLEST_NORMAL:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    return value


def _folded(node: Expr) -> Expr | None:
    if not isinstance(node, Op):
        return None
    if node.op in _LOGICAL and any(isinstance(a, Const) and a.type is Type.BOOL for a in node.args):
        return make(node.op, *node.args, wide=node.wide)
    if node.op == "pow" and is_zero(node.args[1]):  # 1, even of NaN
        return Const(1, node.type)
    if not all(isinstance(arg, Const) for arg in node.args):
        return None
    if node.op in _FUNCTIONS:
        try:
            values = [argument.value for argument in node.args if isinstance(argument, Const)]
            return Const(_FUNCTIONS[node.op](*values), Type.FLOAT)
        except OverflowError:
            return Const(math.inf, Type.FLOAT) if node.op in ("exp", "exp2", "expm1") else None
        except (ArithmeticError, ValueError):  # log(-1): left to the target
            return None
    value = make(node.op, *node.args, wide=node.wide)
    return value if isinstance(value, Const) else None
