"""Inclusive numeric ranges of all names before a call, the base of all interval reasoning.

A range is a pair of numbers in which ``-inf`` and ``inf`` mean "not bounded". Names of indices, box symbols,
scalars and tensors share one mapping, since no declared name equals one of the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from attngen.lang.ir import MAX_SEQLEN, POSITION

if TYPE_CHECKING:
    from attngen.lang.declared import Scalar, Tensor

Range = tuple[float, float]  # ints stay ints inside; only the infinities are floats

INT32: Range = (-(2**31), 2**31 - 1)
INT64: Range = (-(2**63), 2**63 - 1)


def truncated(value: float) -> int:
    """The int32 that a number becomes: rounded toward zero, NaN to 0, what int32 cannot hold to its nearer end."""
    return 0 if value != value else int(min(max(value, INT32[0]), INT32[1]))


#: More heads than any model has; keeps ``h * seqlen`` within int64.
MAX_HEADS = 2**20

_LAST = MAX_SEQLEN - 1
_ALIGNED: Range = (1 - MAX_SEQLEN, _LAST)  # q + seqlen_k - seqlen_q for 0 <= q < seqlen_q

#: Ranges of the names of ``ir.INDEX_NAMES`` and of the box symbols that the tile analysis adds. Lengths start at 1,
#: because an expression is only evaluated for a query and a key that exist.
INDEX_RANGES: Mapping[str, Range] = MappingProxyType(
    {
        "b": (0, _LAST),
        "h": (0, MAX_HEADS - 1),
        "hk": (0, MAX_HEADS - 1),
        "q": (0, _LAST),
        "kv": (0, _LAST),
        "q_pos": _ALIGNED,
        "q_global": (0, _LAST),
        POSITION.name: (0, _LAST),
        "kv_global": (0, _LAST),
        "seqlen_q": (1, MAX_SEQLEN),
        "seqlen_k": (1, MAX_SEQLEN),
        "total_q": (1, MAX_SEQLEN),
        "total_k": (1, MAX_SEQLEN),
        "heads": (1, MAX_HEADS),
        "kv_heads": (1, MAX_HEADS),
        "q_lo": (0, _LAST),
        "q_hi": (0, _LAST),
        "kv_lo": (0, _LAST),
        "kv_hi": (0, _LAST),
        "q_pos_lo": _ALIGNED,
        "q_pos_hi": _ALIGNED,
        "h_lo": (0, MAX_HEADS - 1),
        "h_hi": (0, MAX_HEADS - 1),
    }
)

#: Extents that a tensor's shape may name, besides names bound at the call, with the range of each.
EXTENTS: Mapping[str, Range] = MappingProxyType(
    {
        "b": (1, MAX_SEQLEN),
        "h": (1, MAX_HEADS),
        "hk": (1, MAX_HEADS),
        "heads": (1, MAX_HEADS),
        "kv_heads": (1, MAX_HEADS),
        "seqlen_q": (1, MAX_SEQLEN),
        "seqlen_k": (1, MAX_SEQLEN),
        "total_q": (1, MAX_SEQLEN),
        "total_k": (1, MAX_SEQLEN),
    }
)

#: Ranges of the elements of each dtype.
DTYPE_RANGES: Mapping[str, Range] = MappingProxyType(
    {
        "bool": (0, 1),
        "int8": (-128, 127),
        "uint8": (0, 255),
        "int16": (-(2**15), 2**15 - 1),
        "int32": INT32,
        "int64": INT64,
        "fp16": (-math.inf, math.inf),
        "bf16": (-math.inf, math.inf),
        "fp32": (-math.inf, math.inf),
    }
)


def limit(bound: int | float | str | None, side: int, otherwise: float) -> float:
    """Return the number that a declared bound stands for; ``side`` is 0 for a minimum, 1 for a maximum.

    A name stands for an extent, of which only the general range is known here; None gives ``otherwise``.
    """
    if bound is None:
        return otherwise
    if isinstance(bound, str):
        return EXTENTS.get(bound, (0, MAX_SEQLEN))[side]
    return bound


def declared_ranges(scalars: Iterable[Scalar], tensors: Iterable[Tensor]) -> dict[str, Range]:
    """Return the ranges of all names that an expression over these declarations may hold."""
    ranges: dict[str, Range] = dict(INDEX_RANGES)
    ranges["s"] = (-math.inf, math.inf)
    for scalar in scalars:
        low, high = DTYPE_RANGES[scalar.dtype]
        ranges[scalar.name] = (limit(scalar.min, 0, low), limit(scalar.max, 1, high))
    for tensor in tensors:
        low, high = DTYPE_RANGES[tensor.dtype]
        least, most = tensor.range if tensor.range is not None else (None, None)
        ranges[tensor.name] = (limit(least, 0, low), limit(most, 1, high))
    return ranges
