"""A spec from functions that were written for FlexAttention."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

import attngen
from attngen.errors import SpecError
from attngen.integrations.flex.meaning import meaning
from attngen.integrations.flex.trace import plain_of


def flex_spec(functions: Sequence[Any], name: str | None, kernel: Mapping[str, Any]) -> str:
    """The YAML of one variant: that of a mask_mod, a score_mod, or one of each.

    ``kernel`` are the fields of the entry that builds it. Raises SpecError for anything but such functions, and
    CallError for one that the language cannot express.
    """
    mods: dict[int, Callable[..., Any]] = {}
    for function in functions:
        count = _arguments(function)
        if count in mods:
            raise SpecError("--from-flex takes one mask_mod and one score_mod at most")
        mods[count] = function
    traced = meaning(mods.get(4), mods.get(5), torch.device("cpu")).variant
    package = name or str(getattr(plain_of(functions[0]), "__name__", "flex")).strip("_<>") or "flex"
    return attngen.variant(name=package, **traced.fields).to_yaml(package=package, **kernel)


def _arguments(function: Any) -> int:
    """Number of arguments of a function, with the logit: 4 for a mask_mod, 5 for a score_mod."""
    if not callable(function):
        raise SpecError(f"--from-flex takes functions, got {type(function).__name__}")
    required = [
        one for one in inspect.signature(function).parameters.values()
        if one.default is one.empty and one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
    ]  # fmt: skip
    if len(required) not in (4, 5):
        raise SpecError(
            f"--from-flex takes (b, h, q_idx, kv_idx) or (score, b, h, q_idx, kv_idx), got {len(required)} arguments"
        )
    return len(required)
