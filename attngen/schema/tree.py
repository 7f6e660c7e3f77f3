"""YAML text to a tree of plain values, each with its place in the file.

Only what a spec needs is read: mappings with text keys, lists, text, numbers, true/false and null (by the rules of
YAML 1.2, so that ``no`` is text). Tags, merge keys, repeated keys and anything large enough to be an attack are
refused. No value is constructed by PyYAML: its parser only yields events.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from attngen.errors import Location, SpecError
from attngen.schema.quoting import shorten

MAX_BYTES = 1_000_000
MAX_DEPTH = 16
MAX_NODES = 20_000  # counted after aliases are replaced by what they stand for

_INTEGER = re.compile(r"[-+]?[0-9]+|0x[0-9a-fA-F]+|0o[0-7]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_WORDS: dict[str, bool | None] = {
    "": None, "~": None, "null": None, "Null": None, "NULL": None,
    "true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False,
}  # fmt: skip

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Node:
    """A value of the file. ``value`` holds Nodes inside lists (as tuples) and dicts; ``size`` counts the nodes."""

    value: Any
    location: Location
    size: int = 1
    keys: dict[str, Location] = field(default_factory=dict)  # of a mapping: where each key stands

    def __repr__(self) -> str:
        return f"Node({shorten(repr(self.plain()))}, {self.location})"

    def plain(self) -> Any:
        """Return the value without locations: dicts, lists and scalars."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, tuple):
            return [node.plain() for node in self.value]
        return self.value

    def find(self, path: Path) -> Node:
        """Return the node at ``path``, or the nearest one above it that the file holds.

        An index into a value that is not a list is skipped: ``dtype: bf16`` stands for ``dtype: [bf16]``.
        """
        node = self
        for step in path:
            is_index = isinstance(node.value, tuple) and isinstance(step, int) and step < len(node.value)
            if is_index or (isinstance(node.value, dict) and step in node.value):
                node = node.value[step]
        return node

    def locate(self, path: Path, *, key: bool = False) -> Location:
        """Return the place of ``find(path)``; with ``key``, that of the last step's key rather than of its value."""
        parent = self.find(path[:-1])
        if key and path and path[-1] in parent.keys:
            return parent.keys[str(path[-1])]
        return self.find(path).location


#: The parser in C takes a tenth of the time; some builds of PyYAML lack it.
_QUICK = getattr(yaml, "CSafeLoader", None)
#: Characters that only the parser in C accepts in some places. Texts with them take the parser in Python, so that a
#: spec is valid with both or with neither.
_PYTHON_ALONE = re.compile(r"[\t?]")


def parse(content: bytes, file: str) -> Node:
    """Return the tree of a YAML document, or raise SpecError; ``file`` is the name for error messages."""
    if len(content) > MAX_BYTES:
        raise SpecError(f"found {len(content):,} bytes; a spec holds at most {MAX_BYTES:,}", location=Location(file))
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise SpecError(f"byte 0x{content[error.start]:02x} is not UTF-8", location=Location(file, line)) from error
    if _QUICK is not None and not _PYTHON_ALONE.search(text):
        try:
            return _Builder(file).document(yaml.parse(text, Loader=_QUICK))
        except (yaml.YAMLError, ValueError, OverflowError, IndexError):
            pass  # reported below, in the words of the parser that every installation has
    try:
        return _Builder(file).document(yaml.parse(text, Loader=yaml.SafeLoader))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = Location(file, mark.line + 1, mark.column + 1) if mark else Location(file)
        problem = " ".join(filter(None, (error.context, error.problem)))
        raise SpecError(f"not valid YAML: {problem}{_remedy(problem)}", location=place) from error
    except yaml.reader.ReaderError as error:
        # NUL and other control characters: YAML refuses them anywhere.
        line = text[: error.position].count("\n") + 1
        raise SpecError(
            f"character U+{ord(text[error.position]):04X} is not allowed in a spec", location=Location(file, line)
        ) from error
    except (yaml.YAMLError, ValueError, OverflowError, IndexError) as error:
        # PyYAML turns escapes such as "\UFFFFFFFF" and version numbers of any length into Python values unchecked.
        raise SpecError(f"not valid YAML: {error}", location=Location(file)) from error


def _remedy(problem: str) -> str:
    """Remedy of a mistake that specs often have, or the empty string."""
    if "'\\t'" in problem:
        return "; indent with spaces"
    if "mapping values are not allowed" in problem:
        return '; put an expression in quotes, as in mask: "q_pos >= kv"'
    return ""


def of_values(value: Any, path: tuple[str, ...] = ()) -> Node:
    """Return the tree of plain Python values, checked like those of a file; its nodes have no place.

    Raises SpecError, which names the field, for text, numbers and nesting that a file may not hold; the models check
    the rest.
    """
    nowhere: Any = None

    def refuse(message: str) -> SpecError:
        return SpecError(message, field=".".join(path) or None)

    def checked(text: str) -> str:
        try:
            return _Builder("").text(text, nowhere)
        except SpecError as error:
            raise refuse(error.message) from None

    if len(path) > MAX_DEPTH:
        raise refuse(f"nested more than {MAX_DEPTH} deep")
    if isinstance(value, Mapping):
        if strange := [key for key in value if not isinstance(key, str)]:
            raise refuse(f"found {shorten(repr(strange[0]))}; a field's name must be text")
        nodes = {checked(key): of_values(item, (*path, key)) for key, item in value.items()}
        return Node(nodes, nowhere, 1 + sum(1 + node.size for node in nodes.values()), dict.fromkeys(nodes, nowhere))
    if isinstance(value, list | tuple):
        items = tuple(of_values(item, (*path, str(n))) for n, item in enumerate(value))
        return Node(items, nowhere, 1 + sum(item.size for item in items))
    if isinstance(value, str):
        checked(value)
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise refuse(f"found {shorten(str(value))}; an integer must fit 64 bits")
    elif isinstance(value, float) and not math.isfinite(value):
        raise refuse(f"found {value}; a number must be finite")
    return Node(value, nowhere)


class _Builder:
    """Builds the tree from parser events; the depth limit keeps the recursion shallow."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.count = 0
        self.anchors: dict[str, Node] = {}

    def document(self, events: Iterator[yaml.Event]) -> Node:
        node: Node | None = None
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent) and node is not None:
                raise SpecError("a second document starts here; a spec holds one", location=self.place(event))
            if isinstance(event, yaml.NodeEvent):
                node = self.node(event, events, 1)
        if node is None:
            raise SpecError("the file is empty; a spec starts with 'schema: 1'", location=Location(self.file, 1))
        return node

    def place(self, event: yaml.Event) -> Location:
        return Location(self.file, event.start_mark.line + 1, event.start_mark.column + 1)

    def node(self, event: yaml.Event, events: Iterator[yaml.Event], depth: int) -> Node:
        place = self.place(event)
        if depth > MAX_DEPTH:
            raise SpecError(f"nested more than {MAX_DEPTH} deep", location=place)
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in self.anchors:
                # An anchor is known once its value is complete, so a value that contains itself ends here, too.
                raise SpecError(f"alias '*{event.anchor}' has no anchor above it", location=place)
            node = self.anchors[event.anchor]
            self.spend(node.size, place)
            return node
        if event.tag is not None:
            raise SpecError(f"tag '{event.tag}' is not allowed; a spec holds plain values only", location=place)
        self.spend(1, place)
        if isinstance(event, yaml.SequenceStartEvent):
            node = self.sequence(place, events, depth)
        elif isinstance(event, yaml.MappingStartEvent):
            node = self.mapping(place, events, depth)
        else:
            node = Node(self.scalar(event, place), place)
        if event.anchor is not None:
            self.anchors[event.anchor] = node
        return node

    def spend(self, nodes: int, place: Location) -> None:
        self.count += nodes
        if self.count > MAX_NODES:
            raise SpecError(f"more than {MAX_NODES:,} values, aliases counted in full", location=place)

    def sequence(self, place: Location, events: Iterator[yaml.Event], depth: int) -> Node:
        items = []
        while not isinstance(event := next(events), yaml.SequenceEndEvent):
            items.append(self.node(event, events, depth + 1))
        return Node(tuple(items), place, 1 + sum(item.size for item in items))

    def mapping(self, place: Location, events: Iterator[yaml.Event], depth: int) -> Node:
        values: dict[str, Node] = {}
        keys: dict[str, Location] = {}
        while not isinstance(event := next(events), yaml.MappingEndEvent):
            key_place = self.place(event)
            if not isinstance(event, yaml.ScalarEvent) or event.tag is not None:
                raise SpecError("a field's name must be plain text", location=key_place)
            key = self.text(event.value, key_place)
            if key == "<<" and not event.style:
                raise SpecError("merge keys are not supported; repeat the fields", location=key_place)
            if key in values:
                raise SpecError(
                    f"field '{shorten(key)}' is given twice, first in line {keys[key].line}", location=key_place
                )
            self.spend(1, key_place)
            keys[key] = key_place
            values[key] = self.node(next(events), events, depth + 1)
        return Node(values, place, 1 + sum(1 + node.size for node in values.values()), keys)

    def scalar(self, event: yaml.ScalarEvent, place: Location) -> bool | int | float | str | None:
        text = self.text(event.value, place)
        if event.style:  # quoted or a block; None or empty of plain text
            return text
        if text in _WORDS:
            return _WORDS[text]
        if _INTEGER.fullmatch(text):
            if len(text) > 20 or not -(2**63) <= (number := int(text, 0 if text[:2] in ("0x", "0o") else 10)) < 2**63:
                raise SpecError(f"found {shorten(text)}; an integer must fit 64 bits", location=place)
            return number
        if _FLOAT.fullmatch(text):
            if not math.isfinite(value := float(text)):
                raise SpecError(f"found {shorten(text)}; a number must be finite", location=place)
            return value
        return text

    def text(self, text: str, place: Location) -> str:
        for character in text:
            if character in "\n\t" or character.isalnum():
                continue
            # Control and format characters: they hide text from the reader, or end a comment in a generated file.
            if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp"):
                raise SpecError(f"character U+{ord(character):04X} is not allowed in a spec", location=place)
        return text
