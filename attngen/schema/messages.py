"""Turns pydantic's errors into attngen's: place, field, what was found, what is allowed."""

from __future__ import annotations

import re
import types
import typing
from typing import Any

from pydantic import BaseModel, ValidationError

from attngen.errors import SpecError, suggest
from attngen.schema.quoting import shorten, show
from attngen.schema.tree import Node

_MOST_ERRORS = 10

_FORMS = {
    "string_type": "text",
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "list_type": "a list",
    "finite_number": "a finite number",
    "int_from_float": "an integer",
    "int_parsing_size": "an integer of fewer digits",
    "model_attributes_type": "a mapping",
    "model_type": "a mapping",
}
_BOUNDS = {"greater_than_equal": ("ge", "at least"), "greater_than": ("gt", "more than"),
           "less_than_equal": ("le", "at most"), "less_than": ("lt", "less than")}  # fmt: skip

_LENGTHS = {"string_too_short": ("min_length", "at least"), "string_too_long": ("max_length", "at most")}


def spec_error(error: ValidationError, tree: Node, model: type[BaseModel]) -> SpecError:
    """Return the SpecError of the first complaint of ``error``; further ones follow it, a line each."""
    found = [_one(detail, tree, model) for detail in error.errors(include_url=False)[:_MOST_ERRORS]]
    # in the order of the file, not of the models' fields
    first, *others = sorted(found, key=lambda e: e.location.line if e.location else 0)
    if not others:
        return first
    message = "\n".join([first.message, *map(str, others)])
    return SpecError(message, location=first.location, field=first.field)


def _one(detail: Any, tree: Node, model: type[BaseModel]) -> SpecError:
    path = tuple(step for step in detail["loc"] if step != "[key]")
    about_key = "[key]" in detail["loc"] or detail["type"] == "extra_forbidden"
    if detail["type"] == "extra_forbidden":
        *parents, name = path
        allowed = _fields(model, tuple(parents))
        message = f"unknown field{suggest(str(name), allowed)}; allowed: {', '.join(allowed)}"
    else:
        message = _sentence(detail)
    return SpecError(message, location=tree.locate(path, key=about_key), field=field_path(_written(path, tree)))


def _written(path: tuple[str | int, ...], tree: Node) -> tuple[str | int, ...]:
    """Leave out the indices of lists that the file writes as their single element."""
    return tuple(s for i, s in enumerate(path) if isinstance(s, str) or isinstance(tree.find(path[:i]).value, tuple))


def field_path(path: tuple[str | int, ...]) -> str | None:
    """Write a path as ``kernels[0].dtype``."""
    steps = [f"[{step}]" if isinstance(step, int) else f".{shorten(step)}" for step in path]
    return "".join(steps).lstrip(".") or None


def _sentence(detail: Any) -> str:
    kind, found, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "value_error":
        return str(context["error"])
    if kind == "missing":
        return "missing"
    if kind == "literal_error":
        allowed = re.findall(r"'([^']*)'", context["expected"])
        nearest = suggest(found, allowed) if isinstance(found, str) else ""
        return f"found {show(found)}{nearest}; allowed: {', '.join(allowed)}"
    if kind in _FORMS:
        return f"found {show(found)}; allowed: {_FORMS[kind]}"
    if kind in _BOUNDS:
        key, words = _BOUNDS[kind]
        return f"found {show(found)}; allowed: {words} {context[key]}"
    if kind == "too_long":
        return f"found more than {context['max_length']} elements, the most that it holds"
    if kind in _LENGTHS:
        key, words = _LENGTHS[kind]
        return f"found {show(found)}; allowed: {words} {context[key]} character{'' if context[key] == 1 else 's'}"
    return f"found {show(found)}, which is not allowed here"


def _fields(model: type[BaseModel], path: tuple[str | int, ...]) -> list[str]:
    """Return the fields of the model that stands at ``path`` below ``model``."""
    current: Any = model
    for step in path:
        found = _model_of(current)
        if found is not None and isinstance(step, str):
            by_alias = {field.alias or name: field.annotation for name, field in found.model_fields.items()}
            current = by_alias[step]
        else:  # an index of a list, or a key of a dict: their last type argument is the element's
            current = _strip_optional(current)
            current = [a for a in typing.get_args(current) if a is not Ellipsis][-1]
    found = _model_of(current)
    return [field.alias or name for name, field in found.model_fields.items()] if found else []


def _strip_optional(annotation: Any) -> Any:
    while True:
        origin = typing.get_origin(annotation)
        if origin is typing.Annotated:
            annotation = typing.get_args(annotation)[0]
        elif origin in (types.UnionType, typing.Union):
            annotation = next(a for a in typing.get_args(annotation) if a is not type(None))
        else:
            return annotation


def _model_of(annotation: Any) -> type[BaseModel] | None:
    annotation = _strip_optional(annotation)
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None
