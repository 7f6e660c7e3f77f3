"""The scalars of a prepared call, whose bounds are known: what is left is to check the values that it passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attngen.runtime.arguments import Call, Number, ScalarRule

#: Python type that a scalar of each dtype usually has; others go through the full check.
_PLAIN_TYPES = {"int32": int, "int64": int, "fp32": float, "bool": bool}


class Scalars:
    """Returns the checked values of a variant's scalars, in order of declaration."""

    __slots__ = ("_rules", "_variant")

    def __init__(self, call: Call) -> None:
        self._variant = call.variant.name
        self._rules: list[tuple[str, type | None, float, float, ScalarRule, Any]] = [
            (
                rule.name,
                _PLAIN_TYPES[rule.dtype] if rule.const is None else None,
                rule.low,
                rule.high,
                rule,
                rule.const if rule.const is not None else rule.default,
            )
            for rule in call.rules
        ]

    def __call__(self, arguments: Mapping[str, Any]) -> Sequence[Number]:
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
