"""Tile efficiency of a plan: how much of the work in the tiles that its kernel visits is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from attngen.lang.dropout import DROPOUT_P
from attngen.lang.variant import Bound, Scalar, Variant
from attngen.plan.model import Plan
from attngen.tools.cases import Case
from attngen.tools.values import Number, arguments_of
from attngen.tools.visits import Visits, visits

#: What an integer scalar is taken to be that has neither a default nor a given value: a window, a chunk, a width.
_ASSUMED = 256


def scalars_of(variant: Variant, given: Mapping[str, Number]) -> dict[str, Number]:
    """Return a value for each scalar of a call: the given one, else its default, else one of middling size."""
    return {s.name: given.get(s.name, assumed(s)) for s in variant.arguments}


def assumed(scalar: Scalar) -> Number:
    """Return the default of a scalar, or a value of middling size within its range."""
    if scalar.default is not None:
        return scalar.default
    if scalar == DROPOUT_P:
        return 0.1
    if scalar.dtype == "bool":
        return True
    value = 1.0 if scalar.dtype == "fp32" else _ASSUMED
    low, high = _number(scalar.min), _number(scalar.max)
    value = value if low is None else max(value, low)
    value = value if high is None else min(value, high)
    return float(value) if scalar.dtype == "fp32" else int(value)


def _number(bound: Bound) -> int | float | None:
    return None if isinstance(bound, str) else bound


def efficiency(plan: Plan, seqlens: Sequence[int], scalars: Mapping[str, Number]) -> tuple[Visits, ...]:
    """Count tiles and pairs of one head at each length; tensors hold random values that keep what is declared."""
    found = []
    for seqlen in seqlens:
        case = Case("explain", (seqlen,), (seqlen,), heads=1, kv_heads=1)
        generator = torch.Generator().manual_seed(0)
        arguments = arguments_of(plan.variant, case, plan.layout, generator, given=scalars)
        found.append(visits(plan, seqlen, arguments))
    return tuple(found)
