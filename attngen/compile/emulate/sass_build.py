"""Helpers to build the steps of machine code: operands, sources and results, and checks of an instruction's form."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from attngen.compile.emulate.program import Guard, Step, assign
from attngen.compile.emulate.sass_operands import Operands, Source, applied
from attngen.compile.emulate.sass_text import SassInstruction

PREDICATE = re.compile(r"!?U?P[\dT]")


class Build:
    """Makes steps from operands, whose registers it numbers."""

    def __init__(self) -> None:
        self._operands = Operands()

    def compute(
        self, compute: Callable[..., Any], sources: Sequence[Source], results: Sequence[int], guard: Guard | None
    ) -> Step:
        """Return a step that computes results from sources."""
        return assign(applied(compute, sources), [source.slot for source in sources], results, guard)

    def words(self, texts: Sequence[str]) -> list[Source]:
        """Return the sources of some words."""
        return [self._operands.word(text) for text in texts]

    @property
    def operands(self) -> Operands:
        """The registers and predicates that were named."""
        return self._operands


#: Returns the step of an instruction, None for a form whose results are not computed; ValueError for an unknown form.
Handler = Callable[[Build, SassInstruction, "Guard | None"], "Step | None"]


def split(operands: Sequence[str]) -> tuple[str, list[str], list[str]]:
    """Return the register that an adder writes, the predicates that take its carries, and its sources."""
    carries = []
    rest = list(operands[1:])
    while rest and PREDICATE.fullmatch(rest[0]):
        carries.append(rest.pop(0))
    return operands[0], carries, rest


def only(instruction: SassInstruction, *allowed: str) -> set[str]:
    """Return the modifiers; ValueError for one that is not allowed."""
    found = set(instruction.modifiers)
    if found - set(allowed):
        raise ValueError(f"modifier {', '.join(sorted(found - set(allowed)))}")
    return found
