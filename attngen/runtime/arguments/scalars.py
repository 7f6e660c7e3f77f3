"""Run-time scalars: allowed values of each, and the check of the values that a call passes."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attngen.dtypes import SCALAR_TYPES
from attngen.errors import CallError
from attngen.lang.host import KEYS_OF_SCALAR
from attngen.lang.ir import identity_of

#: Largest finite float32.
FLOAT32_MAX = (2 - 2**-23) * 2.0**127

Number = bool | int | float


@dataclass(frozen=True, slots=True)
class ScalarRule:
    """Allowed values of one run-time scalar of a call, with all extents resolved."""

    name: str
    dtype: str
    low: float
    high: float
    default: Number | None
    const: Number | None

    def check(self, value: object, variant: str) -> Number:
        """Return the value as a plain number of the declared type, or raise CallError."""
        if isinstance(value, torch.Tensor):
            raise CallError(
                f"{variant}: scalar '{self.name}' must be a Python number, got a tensor: reading it would wait for the "
                "GPU; pass value.item(), or declare it as a tensor of shape []"
            )
        number = _as_number(value, self.dtype)
        if number is None:
            kind = {"bool": "True or False", "fp32": "a number of the range of float32"}.get(self.dtype, "an integer")
            raise CallError(f"{variant}: scalar '{self.name}' is {self.dtype}, so it must be {kind}, got {value!r}")
        if self.const is not None and identity_of(number) != identity_of(self.const):
            raise CallError(
                f"{variant}: scalar '{self.name}' was fixed to {self.const} when the kernels were built, got {value!r}"
            )
        if not self.low <= number <= self.high:
            raise CallError(
                f"{variant}: scalar '{self.name}' must lie within {_show(self.low)} .. {_show(self.high)}, "
                f"got {value!r}"
            )
        return number


def assumed(rule: ScalarRule, seqlen_k: int, keys: int = KEYS_OF_SCALAR) -> Number | None:
    """Return the value that a scalar is taken to have: what the variant fixes, or its default; of what only the call
    knows, such as a window, one key of so many ``keys``, if it may be that."""
    if rule.const is not None or rule.default is not None:
        return rule.default if rule.const is None else rule.const
    return min(max(seqlen_k // keys, rule.low), rule.high)


def _as_number(value: Any, dtype: str) -> Number | None:
    """Return a value as a number of the dtype, or None if it is not one. Other integer types (NumPy's) are taken."""
    if dtype == "bool":
        return value if isinstance(value, bool) else None
    if isinstance(value, bool):
        return None
    if dtype == "fp32":
        if not isinstance(value, numbers.Real) or math.isnan(float(value)):
            return None
        number = float(value)
        return number if math.isinf(number) or abs(number) <= FLOAT32_MAX else None
    try:
        return operator.index(value)
    except TypeError:
        return None


def _show(bound: float) -> str:
    return {math.inf: "inf", -math.inf: "-inf"}.get(bound, str(bound))


class Scalars:
    """The scalars of a prepared call, whose bounds are known: returns the checked values, in order of declaration."""

    __slots__ = ("_rules", "_variant")

    def __init__(self, variant: str, rules: Sequence[ScalarRule]) -> None:
        self._variant = variant
        self._rules: list[tuple[str, type | None, float, float, ScalarRule, Number | None]] = [
            (
                rule.name,
                SCALAR_TYPES[rule.dtype].python if rule.const is None else None,  # this type skips the full check
                rule.low,
                rule.high,
                rule,
                rule.const if rule.const is not None else rule.default,
            )
            for rule in rules
        ]

    def __call__(self, arguments: Mapping[str, object]) -> Sequence[Number]:
        """Return the values that the arguments of a call give, or the rules do. Raises CallError."""
        if not self._rules:
            return ()
        values: list[Number] = []
        for name, plain, low, high, rule, given in self._rules:
            value: Any = arguments.get(name)
            plainly = type(value) is plain
            if plainly and low <= value <= high:
                values.append(value)
            elif value is None and given is not None:
                values.append(given)
            else:
                values.append(rule.check(value, self._variant))
        return values
