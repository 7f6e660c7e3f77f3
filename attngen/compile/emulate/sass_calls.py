"""Calls in machine code: ptxas keeps long divisions, those of 64 bits, as functions at the end of a kernel."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from attngen.compile.emulate.sass_text import SassInstruction

_RESULT = re.compile(r"(UR|R)(\d+)")
_PREDICATE = re.compile(r"U?P\d")
_PARTS = 2  # registers that one of these instructions may write

#: Instructions that make a function more than arithmetic on registers.
_NOT_ARITHMETIC_NAMES = "BRA BRX BSSY CALL EXIT JMP HGMMA ST STG STS STL SYNCS UTMALDG UTMASTG WARPGROUP"
_NOT_ARITHMETIC = frozenset(_NOT_ARITHMETIC_NAMES.split())


def written_by_call(instructions: Sequence[SassInstruction], labels: Mapping[str, int], place: int) -> list[str]:
    """Return the names of the registers and predicates that the function called at a place may write.

    Raises ValueError unless the function is clearly nothing but arithmetic and returns to the next instruction.
    """
    (label,) = instructions[place].operands
    names: dict[str, None] = {}
    for instruction in _function(instructions, labels[label.removeprefix("`(").removesuffix(")")], labels):
        if instruction.name in _NOT_ARITHMETIC:
            raise ValueError(f"function with {instruction.name}")
        if instruction.operands and (found := _RESULT.fullmatch(instruction.operands[0])):
            names.update(dict.fromkeys(f"{found[1]}{int(found[2]) + i}" for i in range(_PARTS)))
        names.update(dict.fromkeys(text for text in instruction.operands if _PREDICATE.fullmatch(text)))
    if not _returns_to(instructions, labels, place):
        raise ValueError("unknown return address of a function")
    return list(names)


def _function(
    instructions: Sequence[SassInstruction], first: int, labels: Mapping[str, int]
) -> Iterator[SassInstruction]:
    inner = set(labels.values()) - {first}
    for place in range(first, len(instructions)):
        if place in inner:
            raise ValueError("function with a label")
        if instructions[place].name == "RET":
            return
        yield instructions[place]
    raise ValueError("function without an end")


def _returns_to(instructions: Sequence[SassInstruction], labels: Mapping[str, int], place: int) -> bool:
    """Whether the block of a call puts the address of the next instruction into a register."""
    address = f"{16 * (place + 1):#x}"
    begins = set(labels.values())
    for earlier in range(place - 1, -1, -1):
        instruction = instructions[earlier]
        if instruction.name == "CALL":
            return False
        if instruction.name in ("MOV", "IMAD") and instruction.operands[-1] == address:
            return True
        if earlier in begins:
            return False
    return False
