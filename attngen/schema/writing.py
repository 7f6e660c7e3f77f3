"""Specs as text: what Python says, written as YAML that ``load_spec`` reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from attngen.formats import SCHEMA


def spec_text(
    variants: Mapping[str, Mapping[str, Any]], kernels: Sequence[Mapping[str, Any]], package: str | None = None
) -> str:
    """Return a spec with these variants and these entries of ``kernels``; their values are not checked."""
    content: dict[str, Any] = {"schema": SCHEMA}
    if package is not None:
        content["package"] = package
    if variants:
        content["variants"] = {name: _plain(fields) for name, fields in variants.items()}
    if kernels:
        content["kernels"] = [_plain(entry) for entry in kernels]
    return yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=110, allow_unicode=True)


def _plain(value: Any) -> Any:
    """Return a value made of dicts, lists and scalars alone."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
