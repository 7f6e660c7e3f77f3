"""Masks and scores of texts, for all pairs of a sequence at once: Python parses, torch's int64 and floats compute.

Like ``tests.lang.walker``, which goes value by value, it shares no code with ``attngen.lang``. Integers are exact up to
int64, floats are rounded to ``real`` after each operation, and an index outside of a tensor reads 0, as in a kernel.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_ARITHMETIC: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
_BITS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
}
_SHIFTS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
}
_COMPARISONS: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}  # fmt: skip
_FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    name: getattr(torch, name) for name in ("floor", "ceil", "trunc", "round", "exp", "exp2", "log", "tanh", "sigmoid")
}


class Evaluator:
    """Evaluates texts over names and tensors; ``let`` has values and functions as texts, by their heads."""

    def __init__(
        self, names: Mapping[str, Any], tensors: Mapping[str, Tensor], let: Mapping[str, str], real: torch.dtype
    ) -> None:
        self.real, self.tensors = real, tensors
        self.names = {name: self.constant(value) for name, value in names.items()}
        self.functions: dict[str, tuple[list[str], ast.expr]] = {}
        for head, text in let.items():
            parsed, body = _parse(head), _parse(text)
            if isinstance(parsed, ast.Call):
                self.functions[_name(parsed.func)] = ([_name(part) for part in parsed.args], body)
            else:
                self.names[head] = self.value(body, self.names)

    def __call__(self, text: str) -> Tensor:
        """The value of an expression: bool, int64 or ``real``, of a shape that broadcasts to the pairs."""
        return self.value(_parse(text), self.names)

    def constant(self, value: Any) -> Tensor:
        """A Python number or a tensor as one of the three types; numbers stay on the CPU, which every device takes."""
        made = value if isinstance(value, Tensor) else torch.tensor(value)
        if made.dtype == torch.bool:
            return made
        return self.to_real(made) if made.is_floating_point() else made.long()

    def to_real(self, value: Tensor) -> Tensor:
        return value if value.dtype == self.real else value.to(self.real)

    def number(self, value: Tensor) -> Tensor:
        return value.long() if value.dtype == torch.bool else value

    def alike(self, *values: Tensor) -> list[Tensor]:
        """Values brought to one type: bool only if all are, a float if one is."""
        if all(value.dtype == torch.bool for value in values):
            return list(values)
        if any(value.is_floating_point() for value in values):
            return [self.to_real(value) for value in values]
        return [value.long() for value in values]

    def value(self, node: ast.expr, names: Mapping[str, Tensor]) -> Tensor:
        def of(part: ast.expr) -> Tensor:
            return self.value(part, names)

        match node:
            case ast.Constant(value=value):
                return self.constant(value)
            case ast.Name(id="inf"):
                return self.constant(math.inf)
            case ast.Name(id=name):
                return names[name] if name in names else self.element(name, ())
            case ast.Subscript(value=tensor, slice=index):
                parts = index.elts if isinstance(index, ast.Tuple) else [index]
                return self.element(_name(tensor), [of(part) for part in parts])
            case ast.BoolOp(op=op, values=values):
                joined = of(values[0])
                for part in values[1:]:
                    joined = joined & of(part) if isinstance(op, ast.And) else joined | of(part)
                return joined
            case ast.Compare(left=left, ops=ops, comparators=comparators):
                return self.compared([of(part) for part in (left, *comparators)], ops)
            case ast.UnaryOp(op=op, operand=operand):
                value = of(operand)
                if isinstance(op, ast.Not | ast.Invert):
                    return ~value
                return -self.number(value) if isinstance(op, ast.USub) else value
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return torch.where(of(test), *self.alike(of(body), of(orelse)))
            case ast.BinOp(left=left, op=op, right=right):
                return self.binary(op, of(left), of(right))
            case ast.Call(func=func, args=args):
                return self.called(_name(func), [of(part) for part in args])
        raise AssertionError(ast.dump(node))

    def element(self, name: str, index: Sequence[Tensor]) -> Tensor:
        tensor = self.tensors[name]
        if not index:
            return self.constant(tensor)
        inside = torch.tensor(True)
        for place, extent in zip(index, tensor.shape, strict=True):
            inside = inside & (place >= 0) & (place < extent)
        if 0 in tensor.shape:
            return self.constant(torch.zeros_like(inside, dtype=tensor.dtype))
        flat = torch.tensor(0)
        for place, extent in zip(index, tensor.shape, strict=True):
            flat = flat * extent + place.clamp(0, extent - 1)
        element_value = self.constant(tensor.reshape(-1).take(flat.to(tensor.device)))
        return torch.where(inside, element_value, torch.zeros_like(element_value))

    def compared(self, parts: Sequence[Tensor], ops: Sequence[ast.cmpop]) -> Tensor:
        holds = torch.tensor(True)
        for left, op, right in zip(parts, ops, parts[1:], strict=False):
            holds = holds & _COMPARISONS[type(op)](*self.alike(left, right))
        return holds

    def binary(self, op: ast.operator, left: Tensor, right: Tensor) -> Tensor:
        if isinstance(op, ast.Div):
            # torch on a GPU multiplies by the reciprocal of a number that lies on the CPU
            return self.to_real(left) / self.to_real(right).to(left.device)
        if isinstance(op, ast.FloorDiv | ast.Mod):
            divisor = torch.where(right == 0, 1, right.long())  # 0 only where a guard drops it
            if isinstance(op, ast.Mod):
                return torch.remainder(left.long(), divisor)
            return torch.div(left.long(), divisor, rounding_mode="floor")
        if type(op) in _BITS:
            return _BITS[type(op)](*self.alike(left, right))
        if type(op) in _SHIFTS:
            return _SHIFTS[type(op)](left.long(), right.long())
        return _ARITHMETIC[type(op)](*self.alike(self.number(left), self.number(right)))

    def called(self, name: str, args: Sequence[Tensor]) -> Tensor:
        if name in self.functions:
            parameters, body = self.functions[name]
            return self.value(body, {**self.names, **dict(zip(parameters, args, strict=True))})
        if name == "int":
            return args[0].trunc().clamp(-(2.0**31), 2.0**31 - 1).long()
        if name == "float":
            return self.to_real(args[0])
        if name in _FUNCTIONS:
            return _FUNCTIONS[name](self.to_real(args[0]))
        numbers = self.alike(*map(self.number, args))
        match name:
            case "abs":
                return numbers[0].abs()
            case "clamp":
                return torch.minimum(torch.maximum(*numbers[:2]), numbers[2])
            case "min" | "max":
                choose = torch.minimum if name == "min" else torch.maximum
                extreme = numbers[0]
                for number in numbers[1:]:
                    extreme = choose(extreme, number)
                return extreme
        raise AssertionError(name)


def names_of_sequence(
    b: int, rows: int, keys: int, first_row: int, first_key: int, heads: int, kv_heads: int, totals: tuple[int, int],
    device: torch.device | str,
) -> dict[str, Any]:  # fmt: skip
    """The index names for all pairs of a sequence; they broadcast to (heads, rows, keys)."""
    h = torch.arange(heads, device=device)[:, None, None]
    q = torch.arange(rows, device=device)[None, :, None]
    kv = torch.arange(keys, device=device)[None, None, :]
    return {
        "b": b, "h": h, "hk": h // (heads // kv_heads), "q": q, "kv": kv, "q_pos": q + (keys - rows),
        "q_global": q + first_row, "kv_global": kv + first_key, "seqlen_q": rows, "seqlen_k": keys,
        "total_q": totals[0], "total_k": totals[1], "heads": heads, "kv_heads": kv_heads,
    }  # fmt: skip


def _parse(text: str) -> ast.expr:
    return ast.parse(text.strip(), mode="eval").body


def _name(node: ast.expr) -> str:
    assert isinstance(node, ast.Name)
    return node.id
