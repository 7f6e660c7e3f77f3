"""The typing of operators: the only place that converts arguments, or refuses their types."""

from __future__ import annotations

from collections.abc import Sequence

from attngen.lang.ir import OPERATORS, Const, Expr, Op, Type
from attngen.lang.ranges import truncated
from attngen.lang.source import ExpressionError

#: Spelling of each operator in error messages.
SPELLING: dict[str, str] = {
    "add": "+", "sub": "-", "mul": "*", "neg": "-", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**",
    "bitand": "&", "bitor": "|", "bitxor": "^", "invert": "~", "lshift": "<<", "rshift": ">>",
    "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=",
    "and": "and", "or": "or", "xor": "^", "not": "not", "select": "if", "to_float": "float", "to_int": "int",
}  # fmt: skip

_LOGICAL = {"bitand": "and", "bitor": "or", "bitxor": "xor", "invert": "not"}

#: Largest magnitude of the exponent of ``**``; no sensible kernel needs more.
MAX_EXPONENT = 64


def to_int(value: Expr) -> Expr:
    """Return a boolean as 0 or 1; an integer is returned as it is."""
    if value.type is not Type.BOOL:
        return value
    return Const(int(value.value), Type.INT) if isinstance(value, Const) else Op("to_int", (value,), Type.INT)


def to_float(value: Expr) -> Expr:
    """Return a value as float32; a literal is converted at once."""
    if value.type is Type.FLOAT:
        return value
    if isinstance(value, Const):
        return Const(float(value.value), Type.FLOAT)
    return Op("to_float", (to_int(value),), Type.FLOAT)


def promote(values: Sequence[Expr]) -> tuple[Expr, ...]:
    """Bring numbers to one type: FLOAT if any is, else INT; booleans count as 0 and 1."""
    if any(value.type is Type.FLOAT for value in values):
        return tuple(to_float(value) for value in values)
    return tuple(to_int(value) for value in values)


def typed(op: str, args: Sequence[Expr]) -> Expr:
    """Return the operator applied to ``args`` with the conversions that its types need.

    Raises ExpressionError for a number of arguments or a type that the operator does not take.
    """
    info, name = OPERATORS[op], SPELLING.get(op, op)
    least, most = info.arity
    if not least <= len(args) <= most:
        raise ExpressionError(f"'{name}' takes {least} argument{'s' if least > 1 else ''}, got {len(args)}")
    kinds = {arg.type for arg in args}
    if op in _LOGICAL and kinds == {Type.BOOL}:
        op = _LOGICAL[op]
        info = OPERATORS[op]
    if op in ("and", "or", "xor", "not"):
        _booleans(name, args)
        return Op(op, tuple(args), Type.BOOL)
    if op == "to_int":
        if Type.FLOAT not in kinds:
            return to_int(args[0])
        value = args[0]
        return Const(truncated(value.value), Type.INT) if isinstance(value, Const) else Op(op, (value,), Type.INT)
    if op == "to_float":
        return to_float(args[0])
    if op == "select":
        _booleans("if", args[:1])
        arms = tuple(args[1:])
        arms = arms if all(arm.type is Type.BOOL for arm in arms) else promote(arms)
        return Op(op, (args[0], *arms), arms[0].type)
    if op in ("eq", "ne") and kinds == {Type.BOOL}:
        return Op(op, tuple(args), Type.BOOL)
    if op in ("floordiv", "mod", "bitand", "bitor", "bitxor", "invert", "lshift", "rshift"):
        if Type.FLOAT in kinds:
            hint = "; write floor(x / y)" if op == "floordiv" else "; write int(x), which rounds toward zero"
            at_fault = next(n for n, arg in enumerate(args) if arg.type is Type.FLOAT)
            raise ExpressionError(f"'{name}' takes integers, got a float{hint}", at_fault)
        return Op(op, tuple(to_int(arg) for arg in args), Type.INT)
    if op == "pow":
        return _power(args[0], args[1])
    values = tuple(to_float(arg) for arg in args) if info.float_args else promote(args)
    if op == "neg" and isinstance(values[0], Const):
        return Const(-values[0].value, values[0].type)
    return Op(op, values, info.result or values[0].type)


def _booleans(name: str, args: Sequence[Expr]) -> None:
    for place, arg in enumerate(args):
        if arg.type is not Type.BOOL:
            raise ExpressionError(
                f"'{name}' takes a condition, got {_article(arg.type)}; write it as a comparison (x != 0)", place
            )


def _article(type: Type) -> str:
    return {Type.BOOL: "a condition", Type.INT: "an integer", Type.FLOAT: "a float"}[type]


def _power(base: Expr, exponent: Expr) -> Expr:
    if not isinstance(exponent, Const):
        return Op("pow", (to_float(base), to_float(exponent)), Type.FLOAT)
    power = exponent.value
    if abs(power) > MAX_EXPONENT:
        raise ExpressionError(f"the exponent of '**' must lie within -{MAX_EXPONENT} .. {MAX_EXPONENT}, got {power}", 1)
    if base.type is not Type.FLOAT and exponent.type is not Type.FLOAT and power >= 0:
        return Op("pow", (to_int(base), to_int(exponent)), Type.INT)
    return Op("pow", (to_float(base), to_float(exponent)), Type.FLOAT)
