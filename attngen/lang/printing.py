"""Canonical text of an expression: the language itself, so that it reads well and parses to the same IR."""

from __future__ import annotations

import math

from attngen.lang.ir import OPERATORS, Const, Expr, Load, Op, Search, Type, Var, spelled

# Binding strength in Python's grammar, loosest first.
_IF, _OR, _AND, _NOT, _COMPARE, _BITOR, _BITXOR, _BITAND, _SHIFT, _SUM, _PRODUCT, _SIGN, _POWER, _ATOM = range(14)

_BINARY: dict[str, tuple[str, int]] = {
    "or": ("or", _OR), "and": ("and", _AND),
    "bitor": ("|", _BITOR), "bitxor": ("^", _BITXOR), "xor": ("^", _BITXOR), "bitand": ("&", _BITAND),
    "lshift": ("<<", _SHIFT), "rshift": (">>", _SHIFT), "add": ("+", _SUM), "sub": ("-", _SUM),
    "mul": ("*", _PRODUCT), "truediv": ("/", _PRODUCT), "floordiv": ("//", _PRODUCT), "mod": ("%", _PRODUCT),
}  # fmt: skip
_COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
_SIGNS = {"neg": ("-", _SIGN), "invert": ("~", _SIGN), "not": ("not ", _NOT)}
#: Operators that bring their arguments to a common type, so that one float converts the other argument.
_PROMOTING = frozenset(("add", "sub", "mul", "min", "max", *_COMPARISONS))


def canonical(expr: Expr) -> str:
    """Return the text of an expression. What the parser can produce parses back to an equal expression.

    A ``Search``, which only the band analysis makes, prints as a call for people to read.
    """
    return _text(expr, _IF)


def _text(node: Expr, outer: int) -> str:
    """Print a node; in parentheses if it binds less tightly than ``outer`` asks for."""
    text, strength = _print(node)
    return f"({text})" if strength < outer else text


def _print(node: Expr) -> tuple[str, int]:
    match node:
        case Const():
            return _constant(node)
        case Var(name=name):
            return spelled(name), _ATOM
        case Load(tensor=tensor, indices=indices):
            if not indices:
                return tensor, _ATOM
            return f"{tensor}[{', '.join(_text(index, _IF) for index in indices)}]", _ATOM
        case Search(tensor=tensor, indices=indices, value=value, strict=strict, length=length, axis=axis):
            where = ", ".join(":" if i == axis else _text(index, _IF) for i, index in enumerate(indices))
            relation = ">" if strict else ">="
            return f"first({tensor}[{where}] {relation} {_text(value, _SUM)}, {_text(length, _IF)})", _ATOM
        case Op():
            return _operator(node)


def _constant(node: Const) -> tuple[str, int]:
    value = node.value
    if node.type is Type.BOOL:
        return str(bool(value)), _ATOM
    if node.type is Type.INT:
        return str(int(value)), _ATOM if value >= 0 else _SIGN
    number = float(value)
    text = repr(number)
    if math.isinf(number):
        text = "inf" if number > 0 else "-inf"
    return text, _SIGN if text.startswith("-") else _ATOM


def _operator(node: Op) -> tuple[str, int]:
    op, args = node.op, _implicit(node)
    if op in _COMPARISONS:  # comparisons chain: neither side may be one
        return f"{_text(args[0], _BITOR)} {_COMPARISONS[op]} {_text(args[1], _BITOR)}", _COMPARE
    if op in _BINARY:
        sign, strength = _BINARY[op]
        return f"{_text(args[0], strength)} {sign} {_text(args[1], strength + 1)}", strength
    if op == "pow":
        return f"{_text(args[0], _ATOM)} ** {_text(args[1], _SIGN)}", _POWER
    if op in _SIGNS:
        sign, strength = _SIGNS[op]
        # "-1" would read as a literal, so the sign of a literal stands apart from it
        operand = f"({_text(args[0], _IF)})" if isinstance(args[0], Const) else _text(args[0], strength)
        return f"{sign}{operand}", strength
    if op == "select":
        return f"{_text(args[1], _OR)} if {_text(args[0], _OR)} else {_text(args[2], _IF)}", _IF
    name = {"to_float": "float", "to_int": "int"}.get(op, op)
    return f"{name}({', '.join(_text(arg, _IF) for arg in args)})", _ATOM


def _implicit(node: Op) -> tuple[Expr, ...]:
    """Drop the conversions that the type check puts back by itself."""
    args = node.args
    if OPERATORS[node.op].float_args:
        return tuple(_strip(arg) for arg in args)
    if node.op == "pow":
        return (_strip(args[0]), args[1]) if args[1].type is Type.FLOAT else args
    first = 1 if node.op == "select" else 0
    if node.op in _PROMOTING or node.op == "select":
        left, right = args[first:]
        if right.type is Type.FLOAT and not _converted(right):
            left = _strip(left)
        elif left.type is Type.FLOAT:  # also where both are converted: one conversion implies the other
            right = _strip(right)
        return (*args[:first], left, right)
    return args


def _converted(node: Expr) -> bool:
    return isinstance(node, Op) and node.op == "to_float"


def _strip(node: Expr) -> Expr:
    """Operand of a ``to_float`` (or of the ``to_int`` below it that converts a bool); any other node as it is."""
    if isinstance(node, Op) and node.op == "to_float":
        return node.args[0]
    return node
