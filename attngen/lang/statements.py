"""Generated text as values: what a value reads, and what a statement declares and reads.

Names are those of values; constants, functions and types of a kernel are part of the text.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from string import Formatter

#: Precedence of a name, a literal and anything in parentheses: no context binds tighter.
TIGHTEST = 100


@dataclass(frozen=True, slots=True)
class Code:
    """Source text of a value, the precedence of its outermost operator in its language, and the names that it reads."""

    text: str
    strength: int = 0
    reads: frozenset[str] = frozenset()

    def within(self, strength: int) -> Code:
        """Return the value, in parentheses where the context binds tighter."""
        return Code(f"({self.text})", TIGHTEST, self.reads) if self.strength < strength else self

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Statement:
    """One statement: its text, of one or more lines, the names that it needs, and those that it declares.

    It needs what it reads, and what it assigns without declaring it. ``type`` is a type that can hold what it
    declares, in languages that have types.
    """

    text: str
    reads: frozenset[str] = frozenset()
    names: tuple[str, ...] = ()
    type: str = ""

    def __str__(self) -> str:
        return self.text


def leaf(text: str, strength: int = TIGHTEST) -> Code:
    """Return a name, which reads itself, or a literal."""
    return Code(text, strength, frozenset({text}) if text.isidentifier() else frozenset())


def written(pattern: str, *parts: Code | str, strength: int = 0, **named: Code | str) -> Code:
    """Return a value from a pattern: ``{}`` are the parts in order, and any other ``{name}`` is a name that it reads.

    A name that ``named`` holds stands for that part; ``{work.b}`` reads ``work``. Parts that are plain text read
    nothing.
    """
    texts: list[str] = []
    reads: set[str] = set()
    rest = iter(parts)
    for literal, field in _parsed(pattern):
        texts.append(literal)
        if field is None:
            continue
        part = next(rest) if field == "" else named.get(field)
        if part is None:
            texts.append(field)
            reads.add(field.partition(".")[0])
        elif isinstance(part, Code):
            texts.append(part.text)
            reads |= part.reads
        else:
            texts.append(part)
    return Code("".join(texts), strength, frozenset(reads))


def joined(separator: str, parts: Iterable[Code], strength: int = 0) -> Code:
    """Return parts with a separator between them."""
    parts = list(parts)
    return Code(separator.join(part.text for part in parts), strength, reads(parts))


def statement(
    pattern: str, *parts: Code | str, declares: str | Sequence[str] = (), type: str = "", **named: Code | str
) -> Statement:
    """Return a statement from a pattern; see ``written``."""
    names = (declares,) if isinstance(declares, str) else tuple(declares)
    code = written(pattern, *parts, strength=0, **named)
    return Statement(code.text, code.reads - set(names), names, type)


@cache
def _parsed(pattern: str) -> tuple[tuple[str, str | None], ...]:
    return tuple((literal, field) for literal, field, _, _ in Formatter().parse(pattern))


# --- blocks of statements -----------------------------------------------------------------------------------


def reads(parts: Iterable[Code | Statement]) -> frozenset[str]:
    """Return the names that any of the parts reads."""
    return frozenset[str]().union(*(part.reads for part in parts))


def declared(statements: Iterable[Statement]) -> list[str]:
    """Return the names that statements declare, in order."""
    return [name for each in statements for name in each.names]


def depending(
    statements: Iterable[Statement], on: Collection[str]
) -> tuple[tuple[Statement, ...], tuple[Statement, ...]]:
    """Split statements into those that read or declare the names, also through others, and the rest; both in order."""
    names = set(on)
    parts: tuple[list[Statement], list[Statement]] = ([], [])
    for each in statements:
        depends = not names.isdisjoint((*each.reads, *each.names))
        if depends:
            names.update(each.names)
        parts[not depends].append(each)
    return tuple(parts[0]), tuple(parts[1])


def needed(statements: Sequence[Statement], users: Iterable[Statement]) -> tuple[Statement, ...]:
    """Return the statements less those whose declarations neither a later statement nor the users read."""
    kept: list[Statement] = []
    names = set(reads(users))
    for each in reversed(statements):
        if not each.names or not names.isdisjoint(each.names):
            kept.insert(0, each)
            names |= each.reads
    return tuple(kept)


def lines(statements: Iterable[Statement]) -> tuple[str, ...]:
    """Return the text of statements, line by line."""
    return tuple(line for each in statements for line in each.text.split("\n"))
