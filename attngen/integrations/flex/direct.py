"""Operations on numbers whose results are known beforehand, up to their values: a trace need not have torch run them.

Each is known by the functions of torch that call it, with a rule: from the dtypes of its tensors, which have no
dimensions, and its Python numbers to the dtype of its result, or None where torch is to say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Rule = Callable[[Sequence[torch.dtype], Sequence[float]], torch.dtype | None]

_INTEGERS = (torch.int32, torch.int64)
_NUMBERS = (*_INTEGERS, torch.float32)

#: Numbers from here on are left to torch, which may refuse them.
_LARGE = 2**31


def _small(numbers: Sequence[float]) -> bool:
    return all(-_LARGE < number < _LARGE for number in numbers)


def _compared(dtypes: Sequence[torch.dtype], numbers: Sequence[float]) -> torch.dtype | None:
    return torch.bool if len(dtypes) + len(numbers) == 2 and _small(numbers) else None


def _computed(dtypes: Sequence[torch.dtype], numbers: Sequence[float]) -> torch.dtype | None:
    if len(dtypes) + len(numbers) != 2 or not _small(numbers):
        return None
    first, second = dtypes[0], dtypes[-1]
    if first not in _NUMBERS or second not in _NUMBERS:
        return None
    if first is second:
        return first if first.is_floating_point or all(type(number) is int for number in numbers) else None
    return torch.float32 if torch.float32 in (first, second) else torch.int64


def _alike(dtypes: Sequence[torch.dtype], numbers: Sequence[float]) -> torch.dtype | None:
    same = len(dtypes) == 2 and not numbers and dtypes[0] is dtypes[1]
    return dtypes[0] if same and dtypes[0] in _NUMBERS else None


def _decided(dtypes: Sequence[torch.dtype], numbers: Sequence[float]) -> torch.dtype | None:
    return torch.bool if len(dtypes) == 2 and all(dtype is torch.bool for dtype in dtypes) else None


def _denied(dtypes: Sequence[torch.dtype], numbers: Sequence[float]) -> torch.dtype | None:
    return torch.bool if len(dtypes) == 1 and dtypes[0] is torch.bool and not numbers else None


def _divided(dtypes: Sequence[torch.dtype], numbers: Sequence[float]) -> torch.dtype | None:
    whole = len(dtypes) == len(numbers) == 1 and type(numbers[0]) is int and 0 < numbers[0] < _LARGE
    return dtypes[0] if whole and dtypes[0] in _INTEGERS else None


def _quotient(dtypes: Sequence[torch.dtype], numbers: Sequence[float]) -> torch.dtype | None:
    known = all(dtype is torch.float32 for dtype in dtypes) and _small(numbers)
    return torch.float32 if known and len(dtypes) + len(numbers) == 2 else None


def _signed(dtypes: Sequence[torch.dtype], numbers: Sequence[float]) -> torch.dtype | None:
    return dtypes[0] if len(dtypes) == 1 and not numbers and dtypes[0] in _NUMBERS else None


def _function(dtypes: Sequence[torch.dtype], numbers: Sequence[float]) -> torch.dtype | None:
    return torch.float32 if len(dtypes) == 1 and not numbers and dtypes[0] is torch.float32 else None


#: The rule of each operation, under its name in aten.
_BY_NAME: Mapping[str, Rule] = {
    **dict.fromkeys(("lt", "le", "gt", "ge", "eq", "ne"), _compared),
    **dict.fromkeys(("add", "sub", "mul"), _computed),
    **dict.fromkeys(("maximum", "minimum"), _alike),
    **dict.fromkeys(("bitwise_and", "bitwise_or", "logical_and", "logical_or"), _decided),
    **dict.fromkeys(("bitwise_not", "logical_not"), _denied),
    **dict.fromkeys(("floor_divide", "remainder"), _divided),
    "div": _quotient,
    **dict.fromkeys(("abs", "neg"), _signed),
    **dict.fromkeys(("exp", "exp2", "log", "log2", "tanh", "sigmoid", "sqrt", "rsqrt", "sin", "cos"), _function),
}  # fmt: skip

#: Python's operators that call an operation of another name.
_OPERATORS = {
    "__and__": "bitwise_and", "__or__": "bitwise_or", "__invert__": "bitwise_not", "__floordiv__": "floor_divide",
    "__mod__": "remainder", "__truediv__": "div", "__neg__": "neg", "__abs__": "abs",
    **{f"__{name}__": name for name in ("lt", "le", "gt", "ge", "eq", "ne", "add", "sub", "mul")},
}  # fmt: skip

#: Name and rule of an operation, by each function of torch that calls it.
DIRECT: Mapping[Any, tuple[str, Rule]] = {
    **{getattr(Tensor, spelled): (name, _BY_NAME[name]) for spelled, name in _OPERATORS.items()},
    **{getattr(holder, name): (name, rule) for name, rule in _BY_NAME.items() for holder in (Tensor, torch)},
}
