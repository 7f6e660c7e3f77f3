"""The text of a PTX kernel as instructions: opcode, operands, predicate, and where labels stand."""

from __future__ import annotations

import re
from typing import NamedTuple

from attngen.compile.emulate.program import CannotDecide

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_BODY = re.compile(r"\.entry\s.*?\)[^{]*\{(.*)\}", re.DOTALL)
_NEXT = re.compile(
    r"\s*(?:(?P<open>\{)|(?P<close>\})|(?P<label>[\w$]+)\s*:(?!:)|(?P<text>[^;{}]*(?:\{[^{}]*\}[^;{}]*)*);)"
)
_INSTRUCTION = re.compile(
    r"(?:@(?P<not>!)?(?P<guard>[%\w$]+)\s+)?(?P<opcode>[a-z][\w.:]*)\s*(?P<operands>.*)", re.DOTALL
)
_COMMA = re.compile(r",(?![^{\[]*[}\]])")


class PtxInstruction(NamedTuple):
    """One instruction; ``scope`` says in which blocks it stands, from the outermost."""

    text: str
    opcode: str
    operands: tuple[str, ...]
    guard: str | None
    negated: bool
    scope: tuple[int, ...]


Labels = dict[tuple[tuple[int, ...], str], int]


def read_ptx(ptx: str) -> tuple[list[PtxInstruction], Labels]:
    """Return the instructions of the one kernel of a PTX text, and the place that each label of a block stands for."""
    body = _BODY.search(_COMMENT.sub("", ptx))
    if body is None:
        raise CannotDecide("the PTX text has no kernel")
    instructions: list[PtxInstruction] = []
    labels: Labels = {}
    scope: tuple[int, ...] = ()
    blocks, place, text = 0, 0, body[1].rstrip()
    while place < len(text):
        found = _NEXT.match(text, place)
        if found is None:
            raise CannotDecide(f"PTX not understood: {text[place : place + 60].strip()!r}")
        place = found.end()
        if found["open"]:
            blocks += 1
            scope = (*scope, blocks)
        elif found["close"]:
            scope = scope[:-1]
        elif found["label"]:
            labels[scope, found["label"]] = len(instructions)
        elif (statement := found["text"].strip()) and not statement.startswith("."):
            instructions.append(_instruction(statement, scope))
    return instructions, labels


def _instruction(statement: str, scope: tuple[int, ...]) -> PtxInstruction:
    found = _INSTRUCTION.fullmatch(statement)
    if found is None:
        raise CannotDecide(f"PTX not understood: {statement!r}")
    operands = tuple(part.strip() for part in _COMMA.split(found["operands"])) if found["operands"] else ()
    return PtxInstruction(
        " ".join(statement.split()), found["opcode"], operands, found["guard"], found["not"] is not None, scope
    )


def target_of(label: str, scope: tuple[int, ...], labels: Labels) -> int:
    """Return the place of a label as seen from a block: the one of the innermost block that has it."""
    for depth in range(len(scope), -1, -1):
        if (place := labels.get((scope[:depth], label))) is not None:
            return place
    raise CannotDecide(f"PTX without the label {label}")
