"""Operands of machine code as places of a state: registers, predicates, constants, the bank of parameters."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from attngen.compile.emulate.program import MACHINE, NOWHERE, Machine
from attngen.compile.emulate.values import LONG, UNKNOWN, WORD, bits_of_float
from attngen.compile.ptx import PARAMETER_BLOCK

_NUMBER = re.compile(r"-?0x[0-9a-f]+|-?\d+")
_FLOAT = re.compile(r"[+-]?(?:\d+\.?\d*(?:e[+-]?\d+)?|INF|QNAN)", re.IGNORECASE)
_REGISTER = re.compile(r"(UR|R)(\d+|Z)")
_PREDICATE = re.compile(r"U?P[\dT]")
_BANK = re.compile(r"c\[0x0\]\[(0x[0-9a-f]+)\]")
_ADDRESS = re.compile(r"(?:desc\[UR\d+\])?\[(.*)\]")
_TERM = re.compile(r"(?P<sign>[+-]{0,2})(?P<what>U?R(?:\d+|Z)|0x[0-9a-f]+|\d+)(?P<scale>\.64|\.X4|\.X8|\.X16|\.U32)?")

#: The stack of a thread ends here; spills lie below.
_STACK_END = 0x00FF_F000
_STACK_POINTER = 0x28

Transform = Callable[[Any], Any]


class Source(NamedTuple):
    """A place that is read, and a transform of its value."""

    slot: int
    transform: Transform | None = None


def negated(value: int) -> int:
    """Return the two's complement of a word as adders build it: with the carry that the negation of 0 makes."""
    return (value ^ WORD) + 1


def inverted(value: int) -> int:
    """Return a word with each bit flipped."""
    return value ^ WORD


class Operands:
    """The places of one kernel's registers and constants, made as they are named."""

    def __init__(self) -> None:
        self.initial: list[Any] = [None, UNKNOWN]
        self._slots: dict[str, int] = {}
        for name in ("RZ", "URZ", "SRZ"):
            self._slots[name] = self.constant(0)
        for name in ("PT", "UPT"):
            self._slots[name] = self.constant(True)

    def constant(self, value: Any) -> int:
        """Return the place of a constant."""
        self.initial.append(value)
        return len(self.initial) - 1

    def _slot(self, name: str) -> int:
        if name not in self._slots:
            self._slots[name] = self.constant(UNKNOWN)
        return self._slots[name]

    # --- results --------------------------------------------------------------------------------------------

    def result(self, text: str, count: int = 1) -> list[int]:
        """Return the places of ``count`` registers from one on, or of a predicate."""
        text = text.removesuffix(".reuse")
        if text in ("RZ", "URZ", "PT", "UPT"):
            return [NOWHERE] * count
        if found := _REGISTER.fullmatch(text):
            return [self._slot(f"{found[1]}{int(found[2]) + i}") for i in range(count)]
        if _PREDICATE.fullmatch(text) and count == 1:
            return [self._slot(text)]
        raise ValueError(text)

    # --- sources --------------------------------------------------------------------------------------------

    def predicate(self, text: str) -> Source:
        """Return a predicate, negated by ``!``."""
        name = text.removeprefix("!")
        if _PREDICATE.fullmatch(name) is None:
            raise ValueError(text)
        return Source(self._slot(name), (lambda p: p if p is UNKNOWN else not p) if text != name else None)

    def word(self, text: str) -> Source:
        """Return a word: a register, negated by ``-`` or inverted by ``~``, a constant, or a parameter."""
        text = text.removesuffix(".reuse")
        if _NUMBER.fullmatch(text):
            return Source(self.constant(int(text, 0) & WORD))
        if _FLOAT.fullmatch(text):
            return Source(self.constant(bits_of_float(float(text.upper().replace("QNAN", "NAN")))))
        transform: Transform | None = None
        if text[0] in "-~":
            transform, text = negated if text[0] == "-" else inverted, text[1:]
        if bank := _BANK.fullmatch(text):
            return _from_bank(int(bank[1], 0), transform)
        if _REGISTER.fullmatch(text) is None:
            raise ValueError(text)
        return Source(self._slot(text), transform)

    def pair(self, text: str) -> list[Source]:
        """Return the two words of a register and the next one, or of a constant."""
        text = text.removesuffix(".reuse")
        if _NUMBER.fullmatch(text):
            value = int(text, 0) & LONG
            return [Source(self.constant(value & WORD)), Source(self.constant(value >> 32))]
        if bank := _BANK.fullmatch(text):
            return [_from_bank(int(bank[1], 0) + 4 * i, None) for i in range(2)]
        if text in ("RZ", "URZ"):
            return [self.word(text)] * 2
        found = _REGISTER.fullmatch(text)
        if found is None:
            raise ValueError(text)
        return [Source(self._slot(f"{found[1]}{int(found[2]) + i}")) for i in range(2)]

    def address(self, text: str) -> tuple[list[Source], int]:
        """Return the words whose sum with a constant is an address, and the constant; upper words are shifted by 32."""
        found = _ADDRESS.fullmatch(text)
        if found is None:
            raise ValueError(text)
        sources, offset, place = [], 0, 0
        while place < len(found[1]):
            term = _TERM.match(found[1], place)
            if term is None:
                raise ValueError(text)
            place = term.end()
            what, scale = term["what"], term["scale"]
            if "R" not in what:
                offset += int(f"{term['sign'].removeprefix('+')}{what}", 0)
            elif "-" in term["sign"]:
                raise ValueError(text)
            elif scale == ".64":
                low, high = self.pair(what)
                sources += [low, Source(high.slot, lambda word: word << 32)]
            else:
                factor = int(scale[2:]) if scale and scale[1] == "X" else 1
                sources.append(Source(self._slot(what), partial(operator.mul, factor) if factor > 1 else None))
        return sources, offset


def _from_bank(offset: int, transform: Transform | None) -> Source:
    def read(machine: Machine) -> Any:
        return bank_word(machine, offset)

    if transform is None:
        return Source(MACHINE, read)
    return Source(MACHINE, lambda machine: transform(read(machine)))


def bank_word(machine: Machine, offset: int) -> Any:
    """Return a word of the constant bank that holds the parameters; what the driver puts there is unknown."""
    if offset == _STACK_POINTER:
        return _STACK_END
    place = offset - PARAMETER_BLOCK
    if not 0 <= place < len(machine.parameters):
        return UNKNOWN
    return int.from_bytes(machine.parameters[place : place + 4], "little")


def applied(compute: Callable[..., Any], sources: Sequence[Source]) -> Callable[..., Any]:
    """Return ``compute`` of the values of the sources, from what their places hold."""
    transforms = [source.transform for source in sources]
    if not any(transforms):
        return compute

    def transformed(*values: Any) -> Any:
        return compute(*[v if t is None else t(v) for t, v in zip(transforms, values, strict=True)])

    return transformed
