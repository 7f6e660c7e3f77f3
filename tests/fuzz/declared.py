"""Declarations of random variants: scalars and tensors, each by a name that tells what it holds."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

from pydantic import ValidationError

from attngen.schema.models import MonotoneModel

#: Integers that a scalar of the call may hold, so that a bound made of it shows some pairs of a short sequence.
_REACHES = ("min: 0", "min: 1", "max", "const", "int64", "open")


class Declared:
    """The declarations of one variant, which its expressions fill while they are written."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.scalars: dict[str, dict[str, Any]] = {}
        self.tensors: dict[str, dict[str, Any]] = {}

    def reach(self) -> str:
        """Return a distance: a literal, or the name of an integer scalar that is not negative."""
        kind = self.chance.choice(("literal", "literal", *_REACHES))
        if kind == "literal":
            return str(self.chance.choice((0, 1, 5, 16, 63, 64, 100, 300)))
        fields: dict[str, Any] = {"type": "int64" if kind == "int64" else "int32"}
        if kind == "const":
            fields["const"] = self.chance.choice((1, 17, 64, 128))
        elif kind == "max":
            fields |= {"min": 0, "max": self.chance.choice((40, "seqlen_k"))}
        elif kind != "open":
            fields["min"] = 1 if kind == "min: 1" else 0
        return self.scalar("width", fields)

    def divisor(self) -> str:
        """Return an integer that is at least 1: a literal or a scalar."""
        if self.chance.random() < 0.6:
            return str(self.chance.choice((2, 3, 4, 7, 16, 32, 64)))
        fields: dict[str, Any] = {"type": "int32", "min": 1}
        if self.chance.random() < 0.3:
            fields["const"] = self.chance.choice((3, 8, 48))
        return self.scalar("period", fields)

    def scalar(self, prefix: str, fields: dict[str, Any]) -> str:
        """Declare a scalar and return its name."""
        name = f"{prefix}_{len(self.scalars)}"
        self.scalars[name] = fields
        return name

    def tensor(self, prefix: str, dtype: str, shape: list[int | str], **facts: Any) -> str:
        """Declare a tensor and return its name."""
        name = f"{prefix}_{len(self.tensors)}"
        self.tensors[name] = {"dtype": dtype, "shape": shape, **facts}
        return name

    def integers(self) -> str:
        """Return the dtype of a tensor of positions."""
        return self.chance.choice(("int32", "int32", "int32", "int64", "int16"))

    def floats(self) -> str:
        """Return the dtype of a tensor of numbers."""
        return self.chance.choice(("float32", "float32", "float32", "bf16", "fp16"))

    def length(self, of: str) -> str:
        """Return an extent at least as large as ``of``: that one, or a name of its own, declared as a scalar or not."""
        kind = self.chance.choice(("same", "same", "same", "bound", "declared"))
        if kind == "same":
            return of
        if kind == "bound":
            return f"extent_{len(self.tensors)}"
        return self.scalar("extent", {"type": "int32", "min": 1})

    def monotone(self, axis: int) -> dict[str, Any]:
        """Return a declared fact about an axis, or none."""
        if self.chance.random() < 0.4:
            return {}
        return {"monotone": {"axis": axis, "order": self.chance.choice(orders())}}


@cache
def orders() -> tuple[str, ...]:
    """Return the orders that a spec may declare."""
    known = []
    for order in ("nondecreasing", "nonincreasing"):
        try:
            known.append(MonotoneModel(axis=0, order=order).order)
        except ValidationError:
            continue
    return tuple(known)
