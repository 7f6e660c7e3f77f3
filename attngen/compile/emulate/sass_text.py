"""The text of nvdisasm as instructions: mnemonic, operands, predicate, and where labels stand."""

from __future__ import annotations

import re
from typing import NamedTuple

from attngen.compile.emulate.program import CannotDecide

_LABEL = re.compile(r"^\s*([.$\w]+):")
_INSTRUCTION = re.compile(
    r"^\s*/\*(?P<address>[0-9a-f]+)\*/\s+(?:@(?P<not>!)?(?P<guard>U?P\w+)\s+)?(?P<name>[A-Z][\w.]*)\s*(?P<operands>.*?)\s*;"
)


class SassInstruction(NamedTuple):
    """One instruction: its operation, modifiers, operands as text, and the predicate that guards it."""

    text: str
    name: str
    modifiers: tuple[str, ...]
    operands: tuple[str, ...]
    guard: str | None
    negated: bool


def read_sass(sass: str) -> tuple[list[SassInstruction], dict[str, int]]:
    """Return the instructions of the one kernel of a text of nvdisasm, and the place that each label stands for."""
    instructions: list[SassInstruction] = []
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        if found := _INSTRUCTION.match(line):
            if int(found["address"], 16) != 16 * len(instructions):
                raise CannotDecide("the machine code has more than one kernel")
            name, *modifiers = found["name"].split(".")
            operands = tuple(part.strip() for part in found["operands"].split(",")) if found["operands"] else ()
            text = " ".join(line.partition("*/")[2].split()).rstrip(" ;")
            instructions.append(
                SassInstruction(text, name, tuple(modifiers), operands, found["guard"], found["not"] is not None)
            )
        elif found := _LABEL.match(line):
            labels[found[1]] = len(instructions)
    if not instructions:
        raise CannotDecide("there is no machine code")
    return instructions, labels
