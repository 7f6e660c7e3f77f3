"""Traces of which the language takes the expression for certain: its check can wait for the first call.

What is not listed here may be taken as well, and is checked when the mask is made.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from attngen.integrations.flex.trace import CapturedTensor, Trace, TraceStep

#: Most steps beside the arguments, the longest expression, and most axes of a tensor: the language
#: allows more.
_MOST_STEPS, _LONGEST, _AXES = 24, 1500, 8

#: Integers of at most so many bits stay within int64, whatever the numbers; those that indices and int32 have.
_WIDEST, _INT32 = 60, 32

#: A name of a tensor, of which those of its extents are made, too.
_NAME = re.compile(r"[a-z][a-z0-9_]{0,50}")

_LOGIC = frozenset({"bitwise_and", "bitwise_or", "logical_and", "logical_or", "bitwise_not", "logical_not"})
_COMPARISONS = frozenset({"lt", "le", "gt", "ge", "eq", "ne"})
_SAME = frozenset({"abs", "neg", "maximum", "minimum"})
_CONSTANTS = frozenset({"new_ones", "new_zeros"})

#: Dtypes of tensors whose elements are taken, and the bits of these; 0 of what is no integer.
_LEAVES = {
    torch.bool: 0, torch.float32: 0, torch.int64: 64,
    **dict.fromkeys((torch.int8, torch.uint8, torch.int16, torch.int32), _INT32),
}  # fmt: skip


def plain(trace: Trace) -> bool:
    """Whether the language takes a mask for certain, whichever numbers its tensors hold."""
    steps = trace.steps
    bits: dict[TraceStep, int] = {}  # of each step that is an integer, with its sign; 0 of others
    if len(steps) > _MOST_STEPS + 4:
        return False
    for step in steps:
        if step.shape:
            return False
        width = _INT32 if step.name == "argument" else _bits(step, bits)
        if width is None:
            return False
        bits[step] = width
    return type(trace.result) is TraceStep and trace.result.dtype is torch.bool


def _bits(step: TraceStep, known: Mapping[TraceStep, int]) -> int | None:
    """Return the bits of a step, or None if it is not known that the language takes it."""
    name, args = step.name, step.args
    width: int
    if name == "index":
        return _element(*args[:2])
    if name in _CONSTANTS:
        return 0 if step.dtype is torch.bool else None
    sizes = [size for one in args if (size := _size(one, known)) is not None]
    if step.kwargs or len(sizes) < len(args):
        return None
    dtypes = [one.dtype for one in args if type(one) is not int]
    if name in _LOGIC:
        return 0 if len(dtypes) == len(args) and all(dtype is torch.bool for dtype in dtypes) else None
    if torch.bool in dtypes:
        return None
    if name in _COMPARISONS:
        return 0
    if step.dtype.is_floating_point:
        return 0 if name in ("add", "sub", "mul") else None
    if name in ("floor_divide", "remainder"):
        width = max(sizes) if type(args[1]) is int and args[1] > 0 else _WIDEST + 1
    elif name in ("add", "sub", *_SAME):
        width = max(sizes) + 1
    else:
        width = sum(sizes) if name == "mul" else _WIDEST + 1
    return width if width <= _WIDEST else None


def _size(operand: Any, known: Mapping[TraceStep, int]) -> int | None:
    """Return the bits of an operand: a step, a number, or a captured tensor of one number."""
    if type(operand) is TraceStep:
        return known[operand]
    if type(operand) is int:
        return operand.bit_length() + 1 if operand.bit_length() <= _WIDEST else None
    number = type(operand) is CapturedTensor and not operand.shape and not operand.requires_grad
    return _LEAVES.get(operand.dtype) if number else None


def _element(tensor: Any, indices: Sequence[Any]) -> int | None:
    """Return the bits of an element of a captured tensor at indices that are integers or numbers."""
    if type(tensor) is not CapturedTensor or tensor.requires_grad or not 0 < len(indices) == len(tensor.shape) <= _AXES:
        return None
    integers = all(type(i) is int or (type(i) is TraceStep and i.dtype in (torch.int32, torch.int64)) for i in indices)
    return _LEAVES.get(tensor.dtype) if integers else None


def legal(expression: str, names: Sequence[str]) -> bool:
    """Whether an expression is short, and names of tensors are such as the language takes."""
    return len(expression) <= _LONGEST and all(map(_NAME.fullmatch, names))
