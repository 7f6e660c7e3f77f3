"""Specs as text: variants and entries, given in Python, written as YAML that ``load_spec`` reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import indent
from typing import Any

import yaml

from attngen.formats import SCHEMA
from attngen.lang.dropout import DROPOUT_P, RNG_STATE
from attngen.lang.listed import KEYS
from attngen.lang.printing import canonical
from attngen.lang.variant import Scalar, Tensor, Variant, declared_settings


def spec_text(
    variants: Mapping[str, Mapping[str, Any]],
    kernels: Sequence[Mapping[str, Any]],
    package: str | None = None,
    arches: Sequence[str] = (),
    head: str | None = None,
    comments: Sequence[str] = (),
) -> str:
    """Return a spec with these variants and these entries of ``kernels``; their values are not checked.

    ``head`` is its first line, and ``comments`` are lines above the entries, one for each.
    """
    content: dict[str, Any] = {"schema": SCHEMA}
    if package is not None:
        content["package"] = package
    if arches:
        content["arch"] = list(arches)
    if variants:
        content["variants"] = {name: _plain(fields) for name, fields in variants.items()}
    if not comments:
        if kernels:
            content["kernels"] = [_plain(entry) for entry in kernels]
        return _dumped(content)
    entries = "".join(
        f"  # {comment}\n  - {indent(_dumped(_plain(entry), flow=True), '    ').lstrip()}"
        for comment, entry in zip(comments, kernels, strict=True)
    )
    return (f"{head}\n" if head else "") + _dumped(content) + f"kernels:\n{entries}"


def _dumped(content: Any, *, flow: bool | None = None) -> str:
    return str(yaml.safe_dump(content, sort_keys=False, default_flow_style=flow, width=110, allow_unicode=True))


def declaration(variant: Variant) -> dict[str, Any]:
    """Return the fields by which a spec declares a variant; values that ``let`` named are inlined."""
    fields: dict[str, Any] = {"mask": canonical(variant.mask)} if variant.masked else {}
    if variant.score is not None:
        fields["score"] = canonical(variant.score)
    if variant.sink is not None:
        fields["sink"] = canonical(variant.sink)
    added = (RNG_STATE, *(KEYS[variant.keys] if variant.keys else ()))
    own = [s for s in variant.scalars if s != DROPOUT_P], [t for t in variant.tensors if t not in added]
    if own[0]:
        fields["scalars"] = {scalar.name: _scalar(scalar) for scalar in own[0]}
    if own[1]:
        fields["tensors"] = {tensor.name: _tensor(tensor) for tensor in own[1]}
    return fields | {one.name: variant.given[one.name] for one in declared_settings() if one.name in variant.given}


def _scalar(scalar: Scalar) -> dict[str, Any]:
    parts = (("const", scalar.const), ("min", scalar.min), ("max", scalar.max), ("default", scalar.default))
    return {"type": scalar.dtype, **{part: value for part, value in parts if value is not None}}


def _tensor(tensor: Tensor) -> dict[str, Any]:
    fields: dict[str, Any] = {"dtype": tensor.dtype, "shape": list(tensor.shape)}
    if tensor.monotone is not None:
        fields["monotone"] = {"axis": tensor.monotone.axis, "order": tensor.monotone.order}
        if tensor.monotone.runs is not None:
            fields["monotone"]["runs"] = tensor.monotone.runs
    if tensor.range is not None:
        bounds = zip(("min", "max"), tensor.range, strict=True)
        fields["range"] = {end: bound for end, bound in bounds if bound is not None}
    return {**fields, **({"grad": True} if tensor.grad else {})}


def _plain(value: Any) -> Any:
    """Return a value with nothing but dicts, lists and scalars in it."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
