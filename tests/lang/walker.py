"""The expression language a second time: a walk over Python's own syntax tree, value by value, on plain numbers.

It shares no code with ``attngen.lang``: Python parses, Python's integers are exact, and floats are numpy's float32 or
float64, rounded after each operation. What it says of an expression is what docs/language.md says.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

Value = Any  # bool, int, or a float of the chosen format

_NUMBERS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: lambda x, y: x + y,
    ast.Sub: lambda x, y: x - y,
    ast.Mult: lambda x, y: x * y,
}
_BITS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.BitAnd: lambda x, y: x & y,
    ast.BitOr: lambda x, y: x | y,
    ast.BitXor: lambda x, y: x ^ y,
}
_WHOLE: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.FloorDiv: lambda x, y: x // y,
    ast.Mod: lambda x, y: x % y,
    ast.LShift: lambda x, y: x << y,
    ast.RShift: lambda x, y: x >> y,
}
_COMPARISONS: Mapping[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: lambda x, y: x < y,
    ast.LtE: lambda x, y: x <= y,
    ast.Gt: lambda x, y: x > y,
    ast.GtE: lambda x, y: x >= y,
    ast.Eq: lambda x, y: x == y,
    ast.NotEq: lambda x, y: x != y,
}
_FUNCTIONS: Mapping[str, Callable[[float], float]] = {
    "floor": lambda x: np.floor(x),
    "ceil": lambda x: np.ceil(x),
    "exp": lambda x: np.exp(x),
    "exp2": lambda x: np.exp2(x),
    "log": lambda x: np.log(x),
    "log2": lambda x: np.log2(x),
    "tanh": lambda x: np.tanh(x),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "sqrt": lambda x: np.sqrt(x),
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sin": lambda x: np.sin(x),
    "cos": lambda x: np.cos(x),
    "tan": lambda x: np.tan(x),
    "atan": lambda x: np.arctan(x),
    "trunc": lambda x: np.trunc(x),
    "round": lambda x: np.rint(x),
    "expm1": lambda x: np.expm1(x),
    "log1p": lambda x: np.log1p(x),
    "erf": lambda x: math.erf(x),
}


class BeyondInt64(Exception):  # noqa: N818 (what happened, rather than an error of ours)
    """An integer left int64, which the language refuses before anything runs."""


class Walker:
    """Evaluates texts at one point: names to numbers, tensors to nested arrays, ``let`` to texts."""

    def __init__(
        self,
        names: Mapping[str, Value],
        tensors: Mapping[str, np.ndarray],
        let: Mapping[str, str],
        kinds: Mapping[str, str],
        real: type[np.floating[Any]],
    ) -> None:
        """``kinds`` says of each name and tensor whether it holds a bool, an int or a float."""
        self.names, self.tensors, self.kinds, self.real = names, tensors, kinds, real
        self.functions: dict[str, tuple[list[str], ast.expr]] = {}
        self.values: dict[str, ast.expr] = {}
        for head, text in let.items():
            parsed, body = _parse(head), _parse(text)
            if isinstance(parsed, ast.Call):
                parameters = [argument.id for argument in parsed.args if isinstance(argument, ast.Name)]
                self.functions[_name(parsed.func)] = (parameters, body)
            else:
                self.values[head] = body

    def evaluate(self, text: str) -> Value:
        """Return the value of an expression: a bool, an int, or a float of the chosen format."""
        with np.errstate(all="ignore"):
            return self.value(_parse(text), {})

    # --- types: what an expression is, whatever its values -------------------------------------------------

    def kind(self, node: ast.expr, bound: Mapping[str, ast.expr]) -> str:
        """Return ``bool``, ``int`` or ``float``."""
        match node:
            case ast.Constant(value=value):
                return type(value).__name__
            case ast.Name(id=name):
                if name in bound:
                    return self.kind(bound[name], {})
                if name in self.values:
                    return self.kind(self.values[name], {})
                return "float" if name == "inf" else self.kinds[name]
            case ast.Subscript(value=tensor):
                return self.kinds[_name(tensor)]
            case ast.Compare() | ast.BoolOp() | ast.UnaryOp(op=ast.Not()):
                return "bool"
            case ast.UnaryOp(op=ast.Invert(), operand=operand):
                return self.kind(operand, bound)
            case ast.UnaryOp(operand=operand):
                return self.number([operand], bound)
            case ast.IfExp(body=body, orelse=orelse):
                kinds = {self.kind(body, bound), self.kind(orelse, bound)}
                return "bool" if kinds == {"bool"} else self.number([body, orelse], bound)
            case ast.BinOp(op=ast.Div()):
                return "float"
            case ast.BinOp(op=ast.Pow(), left=left, right=right):
                exponent = right.value if isinstance(right, ast.Constant) else None  # a literal is never negative
                whole = self.kind(left, bound) != "float" and isinstance(exponent, int) and exponent >= 0
                return "int" if whole else "float"
            case ast.BinOp(op=op, left=left, right=right):
                if type(op) in _BITS:
                    kinds = {self.kind(left, bound), self.kind(right, bound)}
                    return "bool" if kinds == {"bool"} else "int"
                return "int" if type(op) in _WHOLE else self.number([left, right], bound)
            case ast.Call(func=func, args=args):
                name = _name(func)
                if name in self.functions:
                    parameters, body = self.functions[name]
                    return self.kind(self.inlined(body, dict(zip(parameters, args, strict=True)), bound), {})
                if name in ("min", "max", "clamp", "abs", "sign"):
                    return self.number(args, bound)
                if name == "isnan":
                    return "bool"
                return "int" if name == "int" else "float"
        raise AssertionError(ast.dump(node))

    def number(self, parts: Sequence[ast.expr], bound: Mapping[str, ast.expr]) -> str:
        """The one type of numbers side by side."""
        return "float" if any(self.kind(part, bound) == "float" for part in parts) else "int"

    # --- values ---------------------------------------------------------------------------------------------

    def value(self, node: ast.expr, bound: Mapping[str, ast.expr]) -> Value:
        """Return the value of a node at this point."""
        number = self.raw(node, bound)
        if isinstance(number, int) and not isinstance(number, bool) and not -(2**63) <= number < 2**63:
            raise BeyondInt64(ast.unparse(node))
        return number

    def raw(self, node: ast.expr, bound: Mapping[str, ast.expr]) -> Value:
        match node:
            case ast.Constant(value=value):
                return self.real(value) if isinstance(value, float) else value
            case ast.Name(id=name):
                if name in self.values:
                    return self.value(self.values[name], {})
                if name == "inf":
                    return self.real(math.inf)
                if name in self.tensors:
                    return self.element(name, ())
                return self.real(self.names[name]) if self.kinds[name] == "float" else self.names[name]
            case ast.Subscript(value=tensor, slice=index):
                parts = index.elts if isinstance(index, ast.Tuple) else [index]
                return self.element(_name(tensor), tuple(int(self.value(part, bound)) for part in parts))
            case ast.BoolOp(op=ast.And(), values=values):
                return all(self.value(part, bound) for part in values)
            case ast.BoolOp(values=values):
                return any(self.value(part, bound) for part in values)
            case ast.Compare(left=left, ops=ops, comparators=comparators):
                return self.compared([left, *comparators], ops, bound)
            case ast.UnaryOp(op=op, operand=operand):
                return self.unary(op, self.value(operand, bound))
            case ast.IfExp(test=test, body=body, orelse=orelse):
                chosen = self.value(body if self.value(test, bound) else orelse, bound)
                return self.as_kind(chosen, self.kind(node, bound))
            case ast.BinOp(left=left, op=op, right=right):
                return self.binary(op, self.value(left, bound), self.value(right, bound), self.kind(node, bound))
            case ast.Call(func=func, args=args):
                return self.called(_name(func), args, bound, node)
        raise AssertionError(ast.dump(node))

    def element(self, name: str, index: tuple[int, ...]) -> Value:
        array = self.tensors[name]
        for place, extent in zip(index, array.shape, strict=True):
            if not 0 <= place < extent:
                raise IndexError(f"{name}[{place}] of {extent}")
        return self.as_kind(array[index].item(), self.kinds[name])

    def compared(self, parts: Sequence[ast.expr], ops: Sequence[ast.cmpop], bound: Mapping[str, ast.expr]) -> bool:
        """Whether a chain of comparisons holds; both sides of each are brought to one type."""
        for left, op, right in zip(parts, ops, parts[1:], strict=False):
            kinds = {self.kind(left, bound), self.kind(right, bound)}
            kind = "bool" if kinds == {"bool"} else self.number([left, right], bound)
            sides = (self.as_kind(self.value(side, bound), kind) for side in (left, right))
            if not bool(_COMPARISONS[type(op)](*sides)):
                return False
        return True

    def unary(self, op: ast.unaryop, value: Value) -> Value:
        match op:
            case ast.Not():
                return not value
            case ast.Invert():
                return not value if isinstance(value, bool) else ~value
            case ast.UAdd():
                return value
        return -(int(value) if isinstance(value, bool) else value)

    def binary(self, op: ast.operator, left: Value, right: Value, kind: str) -> Value:
        match op:
            case ast.Div():
                return self.as_kind(left, "float") / self.as_kind(right, "float")
            case ast.Pow():
                if kind == "int":
                    return int(left) ** right
                # the power of a float is one operation, rounded once
                return self.real(np.power(np.float64(self.as_kind(left, "float")), np.float64(right)))
        if type(op) in _BITS:
            return _BITS[type(op)](self.as_kind(left, kind), self.as_kind(right, kind))
        if type(op) in _WHOLE:
            return _WHOLE[type(op)](int(left), int(right))
        return _NUMBERS[type(op)](self.as_kind(left, kind), self.as_kind(right, kind))

    def called(self, name: str, args: Sequence[ast.expr], bound: Mapping[str, ast.expr], node: ast.expr) -> Value:
        if name in self.functions:
            parameters, body = self.functions[name]
            return self.value(self.inlined(body, dict(zip(parameters, args, strict=True)), bound), {})
        values = [self.value(part, bound) for part in args]
        if name == "int":
            return _whole(values[0]) if isinstance(values[0], np.floating) else int(values[0])
        if name == "isnan":
            return values[0] != values[0]
        if name == "atan2":
            y, x = (np.float64(self.as_kind(value, "float")) for value in values)
            return self.real(np.arctan2(y, x))
        if name == "float":
            return self.as_kind(values[0], "float")
        if name in _FUNCTIONS:
            return self.real(_FUNCTIONS[name](self.as_kind(values[0], "float")))
        kind = self.kind(node, bound)
        numbers = [self.as_kind(value, kind) for value in values]
        if name == "abs":
            return abs(numbers[0])
        if name == "sign":
            return self.as_kind(int(numbers[0] > 0) - int(numbers[0] < 0), kind)
        if name == "clamp":
            return _least([_most(numbers[:2]), numbers[2]])
        return _least(numbers) if name == "min" else _most(numbers)

    def inlined(self, body: ast.expr, given: Mapping[str, ast.expr], bound: Mapping[str, ast.expr]) -> ast.expr:
        """Return the body of a function with its arguments in place of its parameters."""
        assert not bound
        return _Replace(given).visit(_parse(ast.unparse(body)))

    def as_kind(self, value: Value, kind: str) -> Value:
        if kind == "float":
            if isinstance(value, np.floating):
                return value
            # an int64 is rounded once
            return self.real(np.int64(value) if isinstance(value, int) else value)
        return bool(value) if kind == "bool" else int(value)


def _whole(value: np.floating[Any]) -> int:
    """Toward zero, within int32; 0 for NaN."""
    if np.isnan(value):
        return 0
    if abs(value) >= 2**31:
        return 2**31 - 1 if value > 0 else -(2**31)
    return int(value)


class _Replace(ast.NodeTransformer):
    def __init__(self, given: Mapping[str, ast.expr]) -> None:
        self.given = given

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self.given.get(node.id, node)


def _least(values: Sequence[Value]) -> Value:
    """Return the least; NaN if one is NaN."""
    return next((value for value in values if value != value), None) if _any_nan(values) else min(values)


def _most(values: Sequence[Value]) -> Value:
    """Return the greatest; NaN if one is NaN."""
    return next((value for value in values if value != value), None) if _any_nan(values) else max(values)


def _any_nan(values: Sequence[Value]) -> bool:
    return any(value != value for value in values)


def _parse(text: str) -> ast.expr:
    return ast.parse(text.strip(), mode="eval").body


def _name(node: ast.expr) -> str:
    assert isinstance(node, ast.Name)
    return node.id
