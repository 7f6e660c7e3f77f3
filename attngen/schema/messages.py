"""Turns pydantic's errors into attngen's: place, field, value, allowed values."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from attngen.errors import Location, SpecError, suggest, together
from attngen.schema.quoting import shorten, show
from attngen.schema.tree import Node

#: Most errors that are shown of one file; a suggestion for each takes time.
_MOST_ERRORS = 100

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

#: Names of choices in other libraries, in lower case; the nearest spelling would be another choice.
_CALLED = {
    **dict.fromkeys(("packed", "thd", "ragged", "jagged", "nested", "unpadded", "var_len", "cu_seqlens"), "varlen"),
    **dict.fromkeys(("bshd", "bhsd", "sbhd", "padded", "batched", "contiguous"), "dense"),
    **dict.fromkeys(("pages", "page", "kv_cache", "cache", "blocks"), "paged"),
    **dict.fromkeys(("bfloat", "bf", "brain", "torch.bfloat16"), "bf16"),
    **dict.fromkeys(("half", "fp_16", "f16", "torch.float16"), "fp16"),
    **dict.fromkeys(("single", "f32", "tf32", "torch.float32"), "fp32"),
    **dict.fromkeys(("e4m3", "float8", "float8_e4m3fn", "torch.float8_e4m3fn"), "fp8_e4m3"),
    **dict.fromkeys(("e5m2", "float8_e5m2", "torch.float8_e5m2"), "fp8_e5m2"),
    **dict.fromkeys(("hopper", "h100", "h200", "h800", "h20", "gh200", "sm_90", "sm_90a", "sm90", "90"), "sm90a"),
    **dict.fromkeys(("ampere", "a100", "a800", "sm_80"), "sm80"),
    **dict.fromkeys(("a10", "a40", "a6000", "rtx3090", "sm_86"), "sm86"),
    **dict.fromkeys(("ada", "l4", "l40", "l40s", "rtx4090", "sm_89"), "sm89"),
    **dict.fromkeys(("blackwell", "b100", "b200", "gb200", "sm_100", "sm_100a", "sm100"), "sm100a"),
    **dict.fromkeys(("rtx5090", "sm_120", "sm_120a", "sm120"), "sm120a"),
    **dict.fromkeys(("bwd", "train", "training", "grad", "gradient", "gradients"), "backward"),
    **dict.fromkeys(("fwd", "infer", "inference"), "forward"),
    **dict.fromkeys(("tangent", "tangents", "forward_mode", "forward_ad", "dual"), "jvp"),
    **dict.fromkeys(("cutlass", "cute", "nvrtc"), "cuda"),
    **dict.fromkeys(("tma", "descriptors", "tensor_map"), "descriptor"),
    "increasing": "nondecreasing", "ascending": "nondecreasing", "sorted": "nondecreasing",
}  # fmt: skip

_LENGTHS = {"string_too_short": ("min_length", "at least"), "string_too_long": ("max_length", "at most")}


def spec_error(error: ValidationError, tree: Node, model: type[BaseModel]) -> SpecError:
    """SpecError with all complaints of ``error``, in the order of the file."""
    combined = together(spec_errors(error, tree, model))
    assert isinstance(combined, SpecError)
    return combined


def spec_errors(error: ValidationError, tree: Node, model: type[BaseModel], *, empty: bool = True) -> list[SpecError]:
    """All complaints of ``error``, in the order of the file; without ``empty``, none about fields without a value."""
    details = error.errors(include_url=False)
    details = [each for each in details if not _is_misspelt(each, details) and (empty or not _is_empty(each, tree))]
    # in the order of the file, not of the models' fields
    details.sort(key=lambda each: _line(each, tree))
    errors = [_one(each, tree, model) for each in details[:_MOST_ERRORS]]
    if more := len(details) - len(errors):
        errors.append(SpecError(f"{more} more errors", location=tree.location and Location(tree.location.file)))
    return errors


def unknown_fields(error: ValidationError, model: type[BaseModel]) -> dict[str, bool]:
    """Unknown fields of a mapping, and whether each may be meant for one that it has."""
    allowed = _fields(model, ())
    unknown = (each["loc"] for each in error.errors(include_url=False) if each["type"] == "extra_forbidden")
    return {str(path[0]): bool(suggest(str(path[0]), allowed)) for path in unknown if len(path) == 1}


def _is_empty(detail: Any, tree: Node) -> bool:
    """Whether a complaint is about a field that is named but empty."""
    complaint = detail["type"] not in ("missing", "extra_forbidden")
    return complaint and detail["input"] is None and tree.find(_path(detail)).value is None


def _path(detail: Any) -> tuple[str | int, ...]:
    return tuple(step for step in detail["loc"] if step != "[key]")


def _is_about_key(detail: Any) -> bool:
    return "[key]" in detail["loc"] or detail["type"] == "extra_forbidden"


def _place(detail: Any, tree: Node) -> Location:
    return tree.locate(_path(detail), key=_is_about_key(detail))


def _line(detail: Any, tree: Node) -> int:
    place = _place(detail, tree)
    return place.line if place else 0  # fields that were given in Python have no place


def _is_misspelt(missing: Any, details: Sequence[Any]) -> bool:
    """Whether a field is missing since it stands there under a name for which it is suggested."""
    return missing["type"] == "missing" and any(
        each["type"] == "extra_forbidden"
        and each["loc"][:-1] == missing["loc"][:-1]
        and suggest(str(each["loc"][-1]), [str(missing["loc"][-1])])
        for each in details
    )


def _one(detail: Any, tree: Node, model: type[BaseModel]) -> SpecError:
    path = _path(detail)
    if detail["type"] == "extra_forbidden":
        *parents, name = path
        allowed = _fields(model, tuple(parents))
        message = f"unknown field{suggest(str(name), allowed)}; allowed: {', '.join(allowed)}"
    else:
        message = _sentence(detail)
    return SpecError(message, location=_place(detail, tree), field=field_path(_written(path, tree)))


def _written(path: tuple[str | int, ...], tree: Node) -> tuple[str | int, ...]:
    """Leave out the indices of lists that the file writes as their single element."""
    return tuple(s for i, s in enumerate(path) if isinstance(s, str) or isinstance(tree.find(path[:i]).value, tuple))


def field_path(path: tuple[str | int, ...]) -> str | None:
    """Write a path as ``kernels[0].dtype``."""
    steps = [f"[{step}]" if isinstance(step, int) else f".{shorten(step)}" for step in path]
    return "".join(steps).lstrip(".") or None


def _sentence(detail: Any) -> str:
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "value_error":
        return str(context["error"])
    if kind == "missing":
        return "missing"
    if kind == "literal_error":
        choices = re.findall(r"'([^']*)'|(\d+|True|False)", context["expected"])
        allowed = [text or value.lower() for text, value in choices]
        nearest = _nearest(str(value).removeprefix("torch."), allowed)
        return f"found {show(value)}{nearest}; allowed: {', '.join(allowed)}"
    if kind in _FORMS:
        return f"found {show(value)}; allowed: {_FORMS[kind]}{_example(detail['loc'])}"
    if kind in _BOUNDS:
        key, words = _BOUNDS[kind]
        return f"found {show(value)}; allowed: {words} {context[key]}"
    if kind == "too_long":
        return f"found more than {context['max_length']} elements, the most that it holds"
    if kind in _LENGTHS:
        key, words = _LENGTHS[kind]
        return f"found {show(value)}; allowed: {words} {context[key]} character{'' if context[key] == 1 else 's'}"
    return f"found {show(value)}, which is not allowed here"


def _example(path: Sequence[str | int]) -> str:
    """Example of a declaration of a scalar or a tensor, for one that is no mapping; or the empty string."""
    declared = path[-2] if len(path) > 1 else None
    return {"scalars": ", such as {type: int32}", "tensors": ", such as {dtype: int32, shape: [h]}"}.get(
        str(declared), ""
    )


def _nearest(value: str, allowed: Sequence[str]) -> str:
    """Suggest the choice that was probably meant, as ``suggest`` does."""
    called = _CALLED.get(value.lower())
    return f"; did you mean '{called}'?" if called in allowed else suggest(value.lower(), allowed)


def _fields(model: type[BaseModel], path: tuple[str | int, ...]) -> list[str]:
    """Return the fields of the model that stands at ``path`` below ``model``."""
    current: Any = model
    for step in path:
        inner = _model_of(current)
        if inner is not None and isinstance(step, str):
            by_alias = {field.alias or name: field.annotation for name, field in inner.model_fields.items()}
            current = by_alias[step]
        else:  # an index of a list, or a key of a dict: their last type argument is the element's
            current = _strip_optional(current)
            current = [a for a in typing.get_args(current) if a is not Ellipsis][-1]
    inner = _model_of(current)
    return [field.alias or name for name, field in inner.model_fields.items()] if inner else []


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
