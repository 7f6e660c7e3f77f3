"""Bounds of keys as manifests hold them and as the host computes them: numbers, names, and lists of an operator and
what it is applied to, such as ``["add", "q_pos_hi", 1]``; None is the end of the axis.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import add, and_, eq, floordiv, ge, gt, le, lt, mod, mul, ne, neg, not_, or_, sub
from typing import Any

from attngen.lang.ir import Const, Expr, Op, Type, Var

#: Operators of bounds. All results are exact.
OPERATORS: Mapping[str, Callable[..., Any]] = {
    "add": add, "sub": sub, "mul": mul, "neg": neg, "floordiv": floordiv, "mod": mod, "min": min, "max": max,
    "abs": abs, "lt": lt, "le": le, "gt": gt, "ge": ge, "eq": eq, "ne": ne, "and": and_, "or": or_, "not": not_,
    "select": lambda condition, yes, no: yes if condition else no,
}  # fmt: skip
#: Number of operands; of operators that are missing here, two.
_OPERANDS = {"neg": 1, "abs": 1, "not": 1, "select": 3}

#: A scalar that only the call knows is assumed to be the number of keys over the first number, a small one over the
#: second.
KEYS_OF_SCALAR, KEYS_OF_SMALL = 4, 32

#: Lists within lists, and the largest number.
_DEEPEST, _LARGEST = 12, 2**63

#: An int, a name, or a list.
Bound = Any


def written(expr: Expr | None) -> Bound:
    """Return an integer expression as manifests hold it; None for what needs more than lengths and scalars."""
    match expr:
        case Const(value=value, type=Type.INT):
            return int(value)
        case Var(name=name, type=Type.INT):
            return name
        case Op(op=op, args=args) if op in OPERATORS:
            operation = [op, *map(written, args)]
            return operation if None not in operation and is_bound(operation) else None
    return None


def is_bound(value: Any, deepest: int = _DEEPEST) -> bool:
    """Whether a value of a manifest is a bound."""
    if value is None or isinstance(value, str):
        return True
    if type(value) is int:
        return -_LARGEST <= value < _LARGEST
    if not isinstance(value, list | tuple) or not value or deepest == 0:
        return False
    op, *given = value
    fits = isinstance(op, str) and op in OPERATORS and len(given) == _OPERANDS.get(op, 2)
    return fits and all(each is not None and is_bound(each, deepest - 1) for each in given)


def evaluate(bound: Bound, names: Mapping[str, Any], count: int) -> list[int] | None:
    """Return ``count`` values of a bound; None for the end of the axis, also where a name has no value, or what divides
    is 0.

    A name has a number, or a list of ``count`` of them.
    """
    if bound is None:
        return None
    if type(bound) is int:
        return [bound] * count
    if isinstance(bound, str):
        value = names.get(bound)
        return value if isinstance(value, list) else None if value is None else [int(value)] * count
    values: list[Any] = [evaluate(each, names, count) for each in bound[1:]]
    try:
        return None if None in values else list(map(OPERATORS[bound[0]], *values))
    except ZeroDivisionError:
        return None


def names_in(bound: Bound) -> set[str]:
    """Return the names of a bound."""
    if isinstance(bound, str):
        return {bound}
    return set().union(*map(names_in, bound[1:])) if isinstance(bound, list | tuple) else set()
