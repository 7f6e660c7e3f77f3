"""The text of an expression in a spec, and errors that put a caret under the part of it that is wrong."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass

from attngen.errors import Location, SpecError

#: The longest expression that a spec may hold, in characters.
MAX_LENGTH = 4096

_SHOWN = 100  # characters of a long expression that an error shows


class ExpressionError(Exception):
    """An error in a part of an expression, raised where the position of the part is not known.

    ``operand`` is the number of the operand at fault, None for the whole operation.
    """

    def __init__(self, message: str, operand: int | None = None) -> None:
        super().__init__(message)
        self.operand = operand


@dataclass(frozen=True, slots=True)
class Snippet:
    """One expression of a spec: its field (``mask``, ``let.dist`` …), its text on one line, its place."""

    field: str
    text: str
    location: Location | None = None

    @classmethod
    def of(cls, field: str, text: str, location: Location | None) -> Snippet:
        """Join the lines of a YAML block into one, so that columns count from its start."""
        flat = "".join(" " if c in "\t\r\n\f\v" else c for c in text.strip())
        return cls(field, flat, location)

    def error(self, message: str, start: int, end: int) -> SpecError:
        """Return a SpecError whose last two lines show the text and mark columns ``start`` to ``end``."""
        return SpecError(self.marked(message, start, end), location=self.location, field=self.field)

    def marked(self, message: str, start: int, end: int) -> str:
        """A message, the text below it, and carets below columns ``start`` to ``end``."""
        start = max(0, min(start, len(self.text)))
        end = max(start + 1, min(end, len(self.text)))
        first = 0 if len(self.text) <= _SHOWN else max(0, start - _SHOWN // 2)
        shown = self.text[first : first + _SHOWN]
        head = "..." if first else ""
        tail = "..." if first + _SHOWN < len(self.text) else ""
        marks = max(1, min(end, first + _SHOWN) - start)
        visible = "".join(c if c.isprintable() else "?" for c in shown)
        caret = " " * (len(head) + start - first) + "^" * marks
        return f"{message}\n    {head}{visible}{tail}\n    {caret}"

    def at(self, node: ast.AST, message: str) -> SpecError:
        """Return the error for a node of this text's syntax tree."""
        start = getattr(node, "col_offset", 0)
        return self.error(message, start, getattr(node, "end_col_offset", None) or start + 1)


def locate(places: Mapping[str, Location] | None, field: str) -> Location | None:
    """Return the place of a field, else of the nearest enclosing field (``scalars.window.min``, ``scalars`` …, "")."""
    if places is None:
        return None
    while field not in places and field:
        field = field.rpartition(".")[0]
    return places.get(field)
