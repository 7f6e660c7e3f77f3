"""Operators whose arguments are all literals, computed at build time: target languages need not know them."""

from __future__ import annotations

import math
from collections.abc import Callable

from attngen.lang.ir import Const, Expr, Op, Type
from attngen.lang.simplify import make


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


#: What ``simplify`` leaves as it is, since it is inexact.
_FUNCTIONS: dict[str, Callable[[float], float]] = {
    "exp": math.exp,
    "exp2": lambda x: 2.0**x,
    "log": math.log,
    "log2": math.log2,
    "tanh": math.tanh,
    "sigmoid": _sigmoid,
    "silu": lambda x: x * _sigmoid(x),
    "sqrt": math.sqrt,
    "rsqrt": lambda x: 1 / math.sqrt(x),
    "sin": math.sin,
    "cos": math.cos,
    "tan": math.tan,
}


#: Operators that one literal condition decides or removes; Python's own ``~True`` would be -2 in generated code.
_LOGICAL = frozenset({"and", "or", "xor", "not", "select", "eq", "ne"})


def fold_literals(node: Expr) -> Expr | None:
    """Return an operator over literals as a literal, one with a literal condition without it (for ``ir.rewrite``).

    None if there is nothing to do.
    """
    if not isinstance(node, Op):
        return None
    if node.op in _LOGICAL and any(isinstance(a, Const) and a.type is Type.BOOL for a in node.args):
        return make(node.op, *node.args, wide=node.wide)
    if node.op == "pow" and node.args[1] == Const(0, node.type):  # 1, also of NaN
        return Const(1, node.type)
    if not all(isinstance(arg, Const) for arg in node.args):
        return None
    if node.op in _FUNCTIONS:
        try:
            argument = node.args[0]
            assert isinstance(argument, Const)
            return Const(_FUNCTIONS[node.op](argument.value), Type.FLOAT)
        except (ArithmeticError, ValueError):  # log(-1), exp(1e9): left to the target
            return None
    value = make(node.op, *node.args, wide=node.wide)
    return value if isinstance(value, Const) else None
