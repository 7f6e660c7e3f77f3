"""Tensors and numbers that FlexAttention's functions capture, as the declarations of a variant."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from keyword import iskeyword
from typing import Any

import torch
from torch import Tensor

from attngen.integrations.flex.trace import CapturedTensor, Made, TraceStep
from attngen.lang.declarations import RESERVED
from attngen.lang.ranges import INT32

_INDICES = ("b", "h", "q", "kv")

#: Names of dtypes in the language; tensors of others are converted at each call.
DTYPES = {
    torch.bool: "bool", torch.uint8: "uint8", torch.int8: "int8", torch.int16: "int16", torch.int32: "int32",
    torch.int64: "int64", torch.float32: "float32", torch.bfloat16: "bf16", torch.float16: "fp16",
}  # fmt: skip
CONVERTED = {torch.float64: torch.float32}

#: Integers narrower than those of the language: torch computes in them modulo 2^8 or 2^16.
_NARROW = {torch.uint8: (0, 255), torch.int8: (-128, 127), torch.int16: (-(2**15), 2**15 - 1)}


@dataclass(eq=False)
class Captured:
    """A tensor that functions read: its name in the expressions, and the declared facts about its values.

    It is the captured one of ``slot``, or ``constant``, which was made inside of a function.
    """

    name: str
    slot: int | None
    constant: Tensor | None
    dtype: torch.dtype
    dims: int
    learned: bool
    monotone: bool = False  # along its last axis
    least: int | None = None
    narrow: bool = False  # an int64 of numbers that int32 holds
    entries: int | None = None  # along its last axis, of a small table that integers of other tensors are looked up in

    def fields(self) -> dict[str, Any]:
        """Return its declaration, as ``attngen.variant`` takes it."""
        shape: list[str | int] = [*extents(self.name, self.dims)] or [1]
        if self.entries is not None:
            shape[-1] = self.entries
        fields: dict[str, Any] = {"dtype": DTYPES[CONVERTED.get(self.dtype, self.dtype)], "shape": shape}
        if self.monotone:
            fields["monotone"] = {"axis": self.dims - 1}
        least = int(INT32[0]) if self.narrow and self.least is None else self.least
        if least is not None:
            fields["range"] = {"min": least, **({"max": int(INT32[1])} if self.narrow else {})}
        if self.learned:
            fields["grad"] = True
        return fields

    @property
    def converted(self) -> torch.dtype | None:
        """The dtype that a call passes it in, or None if that is its own."""
        return CONVERTED.get(self.dtype)


def extents(name: str, dims: int) -> tuple[str, ...]:
    """The names of a tensor's extents."""
    return tuple(f"{name}_{axis}" for axis in range(dims))


class Values:
    """The questions that a translation may ask about the values of captured tensors, and those that it asked."""

    def __init__(
        self, tensors: Sequence[Tensor], answer: Callable[[Tensor, str], bool], closed: frozenset[int]
    ) -> None:
        """``tensors`` are those of a reading; nothing is taken for granted of the ``closed`` ones."""
        self._tensors, self._answer, self.closed = tensors, answer, closed
        self.asked: dict[tuple[int, str], bool] = {}
        self.fixed: set[int] = set()  # those whose numbers are in the text

    def fact(self, slot: int, question: str) -> bool:
        """Return the answer to one of the questions of ``Look`` about a tensor; False where that may not be asked."""
        if slot in self.closed:
            return False
        answer = self.asked[slot, question] = self._answer(self._tensors[slot], question)
        return answer

    def number(self, slot: int) -> Any:
        """Return the number in a tensor that has one."""
        self.fixed.add(slot)
        return self._tensors[slot].item()


@dataclass
class Translation:
    """The tensors of a mask and of a score together; a tensor that both read has one name."""

    values: Values
    tensors: dict[Any, Captured] = field(default_factory=dict)

    def captured(self, operand: CapturedTensor | Made) -> Captured:
        """Return the entry of a tensor."""
        key = operand.slot if isinstance(operand, CapturedTensor) else id(operand)
        entry = self.tensors.get(key)
        if entry is None:
            taken = {name for one in self.tensors.values() for name in (one.name, *extents(one.name, one.dims))}
            name = plain = legal(operand.name if isinstance(operand, CapturedTensor) else "constant")
            number = 2
            while not taken.isdisjoint((name, *extents(name, len(operand.shape)))):
                name, number = f"{plain}_{number}", number + 1
            slot, constant = (operand.slot, None) if isinstance(operand, CapturedTensor) else (None, operand.tensor)
            learned = isinstance(operand, CapturedTensor) and operand.requires_grad
            entry = self.tensors[key] = Captured(name, slot, constant, operand.dtype, len(operand.shape), learned)
        return entry


def is_integer_of_tensor(operand: Any) -> bool:
    """Whether an index is an integer from another tensor, maybe converted to another dtype."""
    while isinstance(operand, TraceStep) and operand.name in ("_to_copy", "to", "convert_element_type"):
        operand = operand.args[0]
    return isinstance(operand, TraceStep) and operand.name == "index" and not operand.dtype.is_floating_point


def legal(name: str) -> str:
    """Return a name that a spec may give a tensor."""
    plain = re.sub(r"\W|__+", "_", name).strip("_").lower()
    return f"t_{plain}" if not plain or not plain[0].isalpha() or plain in RESERVED or iskeyword(plain) else plain
