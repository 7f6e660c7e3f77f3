"""Errors of a source itself: an unknown name, a syntax error. Another tile would give the same one.

They are read from what the compilers say. ``attngen.compile`` leaves that to this module, since its own text is part of
every cache key.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from attngen.errors import ChoiceError, SourceError

if TYPE_CHECKING:
    from attngen.render import Source

#: An error of NVRTC's front end. Its first one counts: those after it often follow from it.
_NVRTC = re.compile(r"^(?P<file>[^\s(]+)\((?P<line>\d+)\): (?:catastrophic )?error(?: #[\w-]+)?: (?P<said>.+)$", re.M)

#: PTX that ptxas cannot read: a wrong word in an ``asm``. Its other errors, such as of registers, depend on the tile.
_PTXAS = re.compile(
    r"^ptxas application ptx input, (?P<line>line \d+); \w+ *: (?P<said>(?:Parsing error|Not a name|Unknown) .+)$", re.M
)

#: Words of errors that depend on the tile, although the front end reports them.
_OF_TILE = "static assertion"

#: What Triton's front end raises where the source is wrong. Its ValueErrors and assertions may be about a tile's shape.
_TRITON = ("NameError", "AttributeError", "TypeError", "SyntaxError", "UnsupportedLanguageConstruct")


def source_error(source: Source, error: ChoiceError) -> SourceError | None:
    """The error of a source that its compiler cannot read, with the line; None if another choice may compile."""
    fault = _fault_of_triton(source, error) if source.backend == "triton" else _fault_of_cuda(source, error)
    if fault is None:
        return None
    place, line, said = fault
    shown = f"\n    {line.strip()}" if line.strip() else ""
    return SourceError(
        f"{source.name}: an error of the source at {place}: {said}{shown}\n"
        "  This is a fault of the kernel's templates, not of the spec; no other tile is tried"
    )


def _fault_of_cuda(source: Source, error: ChoiceError) -> tuple[str, str, str] | None:
    """The place, the text of the line, and what the compiler says."""
    if (match := _NVRTC.search(str(error))) is not None:
        if match["said"].startswith(_OF_TILE):
            return None
        text = source.text if match["file"] == source.file_name else source.headers.get(match["file"], "")
        return f"{match['file']}:{match['line']}", _line(text, int(match["line"])), match["said"]
    if (match := _PTXAS.search(str(error))) is not None:
        return f"{match['line']} of its PTX", "", match["said"]
    return None


def _fault_of_triton(source: Source, error: ChoiceError) -> tuple[str, str, str] | None:
    """The same of Triton's front end, which raises an error at each call that leads to the wrong line."""
    raised = list(_causes(error))
    if not raised:
        return None
    said = str(getattr(raised[-1], "error_message", None) or repr(raised[-1]))
    if not {type(raised[-1]).__name__, said.partition("(")[0]} & set(_TRITON):
        return None
    lines = [line for each in raised if (line := _line_of(source, each)) is not None]
    place = f"{source.file_name}:{lines[-1]}" if lines else source.file_name
    return place, _line(source.text, lines[-1]) if lines else "", said


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause = error.__cause__
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _line_of(source: Source, error: Any) -> int | None:
    """The line of a source that an error of Triton's front end is about: it counts from the function's first."""
    function, line = getattr(error, "src", None), getattr(getattr(error, "node", None), "lineno", None)
    start = source.text.find(function) if function else -1
    return None if start < 0 or line is None else source.text.count("\n", 0, start) + line


def _line(text: str, number: int) -> str:
    lines = text.splitlines()
    return lines[number - 1] if 0 < number <= len(lines) else ""
