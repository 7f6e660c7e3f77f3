"""Records: frozen dataclasses that JSON objects are written from, and read into with a check of every entry.

The annotation of a field is its schema. ``Some`` or ``Name`` restrict a plain type, ``X | None`` lets null stand,
``tuple[X, ...]`` is a list and ``Mapping[str, X]`` an object of any names. A field with a default may be absent, and
entries that are no field are ignored.
"""

from __future__ import annotations

import json
import math
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
Reader = Callable[[Any], Any]

_MOST = 2**31 - 1

#: A name becomes a symbol of C and the name of a file: never a path, nor longer than a file's name with its suffix.
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,199}")

#: The same with hyphens, which only what kernels beside attention compute has in its name: ``append-kv``.
_HYPHENATED = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,199}")


class MisfitError(Exception):
    """A JSON value that a record cannot be read from; ``str`` is the end of a sentence about it."""

    def __init__(self, value: Any, words: str | None) -> None:
        self.value = value
        self.words = words  # what must stand there; None: the entry is missing
        self.steps: list[str] = []  # to its place, from the inside out

    def __str__(self) -> str:
        place = "".join(f".{step}" if step[0] != "[" else step for step in reversed(self.steps)).removeprefix(".")
        if self.words is None:
            return f"lacks '{place}'"
        return f"has {shown(self.value)} in {place}, where {self.words} must stand"


@dataclass(frozen=True, slots=True)
class ValueKind:
    """The values that may stand in a place: in words, as a test, and as a conversion from JSON."""

    words: str
    fits: Callable[[Any], bool]
    load: Reader | None = None

    @property
    def reader(self) -> Reader:
        """A function from JSON to Python; MisfitError for a value that may not stand here."""
        words, fits, load = self.words, self.fits, self.load

        def read_value(value: Any) -> Any:
            if fits(value):
                return value if load is None else load(value)
            raise MisfitError(value, words)

        return read_value

    def or_null(self) -> ValueKind:
        """The same, or null."""
        fits, load = self.fits, self.load or (lambda value: value)
        return ValueKind(
            f"{self.words} or null", lambda v: v is None or fits(v), lambda v: None if v is None else load(v)
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float) or (
        isinstance(value, dict) and set(value) == {"inf"} and type(value["inf"]) is int and value["inf"] in (1, -1)
    )


def _number(value: Any) -> Any:
    """A number of JSON, which has no infinities: these are spelled out."""
    return math.inf * value["inf"] if isinstance(value, dict) else value


_FLAG = ValueKind("true or false", lambda v: isinstance(v, bool))
_TEXT = ValueKind("a text", lambda v: isinstance(v, str) and "\0" not in v)
_BOUND = ValueKind("a number or an extent", lambda v: isinstance(v, str) or _is_number(v), _number)

Name = Annotated[str, ValueKind("a name (at most 200 of A-Z, a-z, 0-9 and _, no digit first)", lambda v: is_name(v))]
VariantName = Annotated[
    str,
    ValueKind(
        "a name (at most 200 of A-Z, a-z, 0-9, _ and -, no digit or - first)",
        lambda v: isinstance(v, str) and _HYPHENATED.fullmatch(v) is not None,
    ),
]
Count = Annotated[int, ValueKind(f"a number from 0 to {_MOST}", lambda v: type(v) is int and 0 <= v <= _MOST)]
Some = Annotated[int, ValueKind(f"a number from 1 to {_MOST}", lambda v: type(v) is int and 0 < v <= _MOST)]
Signed = Annotated[int, ValueKind(f"a number from -1 to {_MOST}", lambda v: type(v) is int and -1 <= v <= _MOST)]
Number = Annotated[bool | int | float, ValueKind("a number", _is_number, _number)]
Limit = Annotated[int | float | str, _BOUND]
Size = Annotated[
    int | str, ValueKind("a number or a size", lambda v: (type(v) is int and 0 <= v <= _MOST) or isinstance(v, str))
]
Axis = Annotated[int | str, ValueKind("an axis", lambda v: isinstance(v, str) or (type(v) is int and 0 <= v <= _MOST))]
Extent = Annotated[
    int | str, ValueKind("an extent", lambda v: isinstance(v, str) or (type(v) is int and 0 < v <= _MOST))
]
Limits = Annotated[
    tuple[int | float | str | None, int | float | str | None],
    ValueKind(
        "two bounds",
        lambda v: isinstance(v, list | tuple) and len(v) == 2 and all(b is None or _BOUND.fits(b) for b in v),
        lambda v: (_number(v[0]), _number(v[1])),
    ),
]


def is_name(value: Any) -> bool:
    """Whether a JSON value is a ``Name``: safe as a part of a path."""
    return isinstance(value, str) and _NAME.fullmatch(value) is not None


def read(record: type[T], value: Any) -> T:
    """The record that a JSON object holds. Raises MisfitError, which names the first misfit and its place."""
    result: T = reader_of(record)(value)
    return result


@cache
def _record_reader(record: Any) -> Reader:
    """A reader of the JSON form of a dataclass."""
    hints = get_type_hints(record, include_extras=True)
    readers = {field.name: reader_of(hints[field.name]) for field in fields(record)}
    required = [field.name for field in fields(record) if field.default is MISSING and field.default_factory is MISSING]

    make = _maker(record)

    def read_record(value: Any) -> Any:
        if not isinstance(value, dict):
            raise MisfitError(value, "an object")
        values = {}
        name = ""
        try:
            for name, item in value.items():
                if name in readers:
                    values[name] = readers[name](item)
            for name in required:
                if name not in values:
                    raise MisfitError(None, None)
        except MisfitError as misfit:
            misfit.steps.append(name)
            raise
        return make(values)

    return read_record


def _maker(record: Any) -> Callable[[dict[str, Any]], Any]:
    """The constructor of a dataclass. That of a frozen one sets its fields one by one, which takes as long as reading
    them; one without slots, factories and checks of its own is filled at once."""
    defaults = {field.name: field.default for field in fields(record) if field.default is not MISSING}
    factories = any(field.default_factory is not MISSING for field in fields(record))
    if "__slots__" in vars(record) or factories or hasattr(record, "__post_init__"):
        return lambda values: record(**values)

    def make(values: dict[str, Any]) -> Any:
        made = object.__new__(record)
        made.__dict__.update({**defaults, **values})
        return made

    return make


def reader_of(form: Any) -> Reader:
    """A reader of JSON values of an annotation's type."""
    origin, args = get_origin(form), get_args(form)
    if kind := _kind_of(form):
        return kind.reader
    if origin in (Union, types.UnionType):
        (inner,) = (arg for arg in args if arg is not type(None))
        if kind := _kind_of(inner):
            return kind.or_null().reader
        reader = reader_of(inner)
        return lambda value: None if value is None else reader(value)
    if origin is tuple:
        return _list_reader(reader_of(args[0]))
    if is_dataclass(form):
        return _record_reader(form)  # type: ignore[arg-type]
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping_reader(reader_of(args[1]))
    raise TypeError(f"no JSON value is read as {form}")


def _kind_of(form: Any) -> ValueKind | None:
    kind: ValueKind | None = get_args(form)[1] if get_origin(form) is Annotated else {bool: _FLAG, str: _TEXT}.get(form)
    return kind


def _list_reader(reader: Reader) -> Reader:
    def read_list(value: Any) -> Any:
        if not isinstance(value, list | tuple):
            raise MisfitError(value, "a list")
        items: list[Any] = []
        try:
            for item in value:
                items.append(reader(item))
        except MisfitError as misfit:
            misfit.steps.append(f"[{len(items)}]")
            raise
        return tuple(items)

    return read_list


def _mapping_reader(reader: Reader) -> Reader:
    def read_mapping(value: Any) -> Any:
        if not isinstance(value, dict):
            raise MisfitError(value, "an object")
        values = {}
        name = ""
        try:
            for name, item in value.items():
                values[name] = reader(item)
        except MisfitError as misfit:
            misfit.steps.append(name)
            raise
        return values

    return read_mapping


def shared(base: type, record: Any) -> dict[str, Any]:
    """The values that a record has of the fields of a base class, by name."""
    return {field.name: getattr(record, field.name) for field in fields(base)}


def written(record: Any, *, leave_out: tuple[str, ...] = (), sparse: bool = False) -> dict[str, Any]:
    """The JSON form of a record. ``sparse``: without the entries that have their defaults."""
    values = ((field, getattr(record, field.name)) for field in fields(record) if field.name not in leave_out)
    return {field.name: _plain(value) for field, value in values if not sparse or value != field.default}


def _plain(value: Any) -> Any:
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if is_dataclass(value):
        return written(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def shown(value: Any) -> str:
    """A JSON value for a message, shortened; containers by their kind, since they may be deep."""
    if isinstance(value, dict | list | tuple):
        return "an object" if isinstance(value, dict) else "a list"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 10**18:
        return "a huge number"
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."
