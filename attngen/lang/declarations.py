"""Checks of what a variant declares: names, dtypes, bounds, shapes and facts, before any expression is read."""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Collection, Mapping, Sequence

from attngen.dtypes import DESCALES, SCALAR_DTYPES, TENSOR_DTYPES
from attngen.errors import Gathered, Location, SpecError, suggest
from attngen.lang.ir import INDEX_NAMES, Type
from attngen.lang.parser import CONSTANTS, FLOAT32_MAX, FUNCTIONS, Scope
from attngen.lang.ranges import DTYPE_RANGES, EXTENTS, INDEX_RANGES, INT64, limit
from attngen.lang.source import locate
from attngen.lang.variant import Scalar, Tensor

#: Names of the call and of the expression language; no scalar, tensor, ``let`` name or parameter may take one.
RESERVED: frozenset[str] = frozenset((
    *INDEX_NAMES, *INDEX_RANGES, "s", *FUNCTIONS, *CONSTANTS,
    *DESCALES, "k", "v", "query", "key", "value", "o", "out", "output", "lse", "scale", "softmax_scale", "is_causal",
    "variant", "backend", "package", "kernel", "layout", "return_lse", "return_max_logits", "dropout", "dropout_p",
    "dropout_seed", "rng_state", "deterministic", "quantize", "seqused_q", "seqused_k", "cu_seqlens_q", "cu_seqlens_k",
    "max_seqlen_q", "max_seqlen_k", "direction", "out_dtype",
    "tile_map", "page_table", "k_pages", "v_pages", "page_layout", "num_decodes", "num_splits",
    "split_size", "softmax", "mask", "score", "sink", "let", "scalars", "tensors",
    "dq", "dk", "dv", "do", "dout", "dlse", "delta", "stream", "device", "dtype", "self", "true",
    "false",
))  # fmt: skip

_IDENTIFIER = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
_MAX_RANK = 8


def check_declarations(
    name: str,
    scalars: Sequence[Scalar],
    tensors: Sequence[Tensor],
    let: Mapping[str, object],
    places: Mapping[str, Location] | None,
) -> None:
    """Raise SpecError for the declarations that are not allowed."""
    gathered = Gathered()
    if not _IDENTIFIER.fullmatch(name):
        raise SpecError(
            f"variant name {name!r} must be letters, digits and '_', starting with a letter",
            location=locate(places, "name"),
        )
    taken: set[str] = set()
    for scalar in scalars:
        field = f"scalars.{scalar.name}"
        with gathered:
            check_name(scalar.name, taken, field, places)
            taken.add(scalar.name)
            _check_scalar(scalar, field, places)
    for tensor in tensors:
        field = f"tensors.{tensor.name}"
        with gathered:
            check_name(tensor.name, taken, field, places)
            taken.add(tensor.name)
            _check_tensor(tensor, {s.name: s for s in scalars}, field, places)
    gathered.throw()
    extents = {extent for t in tensors for extent in t.shape if isinstance(extent, str)}
    bounds = [(f"scalars.{s.name}.{part}", getattr(s, part)) for s in scalars for part in ("min", "max")]
    bounds += [
        (f"tensors.{t.name}.range.{part}", bound)
        for t in tensors
        if t.range is not None
        for part, bound in zip(("min", "max"), t.range, strict=True)
    ]
    for field, bound in bounds:
        if isinstance(bound, str) and bound not in EXTENTS and bound not in extents:
            allowed = (*EXTENTS, *sorted(extents))
            raise SpecError(
                f"no tensor has an extent '{bound}'{suggest(bound, allowed)} (allowed: a number, {', '.join(allowed)})",
                location=locate(places, field),
                field=field,
            )
    for clash in sorted(extents & {t.name for t in tensors}):
        raise SpecError(
            f"'{clash}' is a tensor and cannot name an extent as well",
            location=locate(places, f"tensors.{clash}"),
        )


def check_name(
    name: str, taken: Collection[str], field: str, places: Mapping[str, Location] | None, what: str = "name"
) -> None:
    """Raise SpecError unless ``name`` is an identifier that is neither reserved nor taken."""

    def refuse(reason: str) -> SpecError:
        return SpecError(f"{what} {name!a} {reason}", location=locate(places, field), field=field)

    if not _IDENTIFIER.fullmatch(name):
        raise refuse("must be at most 64 letters, digits and '_', starting with a letter")
    if name in RESERVED or keyword.iskeyword(name):
        raise refuse("is reserved")
    if name in taken:
        raise refuse("is declared twice")


def _beyond(scalar: Scalar, below: bool) -> str:
    """Say which end of its range a scalar's value exceeds: a declared one, or that of its dtype."""
    declared = scalar.min if below else scalar.max
    if declared is None:
        return f"{'below' if below else 'above'} what {scalar.dtype} holds"
    return f"below min, which is {declared}" if below else f"above max, which is {declared}"


def check_let_name(key: str, scope: Scope, places: Mapping[str, Location] | None) -> tuple[str, tuple[str, ...] | None]:
    """Return the name of a ``let:`` entry and, if it is a function such as ``f(x, y)``, its parameters."""
    field = f"let.{key}"
    taken = {*scope.scalars, *scope.tensors, *scope.values, *scope.functions}
    if "(" not in key:
        check_name(key, taken, field, places)
        return key, None
    match = re.fullmatch(r"\s*([^()\s]+)\s*\(([^()]*)\)\s*", key)
    if match is None:
        raise SpecError(
            f"a function is declared as 'name(x, y)', got {key!a}",
            location=locate(places, field),
            field=field,
        )
    name = match[1]
    check_name(name, taken, field, places)
    parameters: list[str] = []
    for parameter in match[2].split(","):
        check_name(parameter.strip(), {name, *taken, *parameters}, field, places, "parameter")
        parameters.append(parameter.strip())
    return name, tuple(parameters)


def _check_scalar(scalar: Scalar, field: str, places: Mapping[str, Location] | None) -> None:
    def refuse(part: str, message: str) -> SpecError:
        return SpecError(message, location=locate(places, f"{field}.{part}"), field=f"{field}.{part}")

    if scalar.dtype not in SCALAR_DTYPES:
        raise refuse("type", _unknown_dtype(scalar.dtype, SCALAR_DTYPES))
    for part in ("min", "max"):
        bound = getattr(scalar, part)
        if bound is not None:
            _check_bound(bound, scalar.dtype, refuse, part)
    low = limit(scalar.min, 0, DTYPE_RANGES[scalar.dtype][0])
    high = limit(scalar.max, 1, DTYPE_RANGES[scalar.dtype][1])
    if low > high:
        raise refuse("min", f"min {scalar.min} exceeds max {scalar.max}")
    for part in ("const", "default"):
        value = getattr(scalar, part)
        if value is None:
            continue
        _check_value(value, scalar.dtype, refuse, part)
        if not low <= value <= high:
            raise refuse(part, f"{value} is {_beyond(scalar, value < low)}")
    if scalar.const is not None and scalar.default is not None:
        raise refuse("default", "a constant takes no default")
    if scalar.grad and (scalar.dtype != "fp32" or scalar.const is not None):
        raise refuse("grad", "only a float32 scalar that the call passes has a gradient")
    if scalar.grad and scalar.default is not None:
        raise refuse("default", "a scalar with a gradient is passed as a tensor, which has no default")


def _check_value(value: object, dtype: str, refuse: object, part: str) -> None:
    assert callable(refuse)
    if dtype == "bool":
        if not isinstance(value, bool):
            raise refuse(part, f"must be true or false, got {value!r}")
    elif dtype == "fp32":
        if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
            raise refuse(part, f"must be a number, got {value!r}")
        if not math.isinf(value) and abs(value) >= FLOAT32_MAX:
            raise refuse(part, f"{value} does not fit float32")
    elif isinstance(value, bool) or not isinstance(value, int):
        raise refuse(part, f"must be an integer, got {value!r}")
    elif not DTYPE_RANGES[dtype][0] <= value <= DTYPE_RANGES[dtype][1] or value == INT64[0]:
        raise refuse(part, f"{value} does not fit {dtype}")


def _check_bound(bound: object, dtype: str, refuse: object, part: str) -> None:
    assert callable(refuse)
    if dtype == "bool":
        raise refuse(part, "a bool has no range")
    if isinstance(bound, str):
        if not _IDENTIFIER.fullmatch(bound):
            raise refuse(part, f"must be a number or the name of an extent, got {bound!r}{suggest(bound, EXTENTS)}")
        return
    _check_value(bound, "fp32" if dtype in ("fp32", "fp16", "bf16") else dtype, refuse, part)


def _check_tensor(
    tensor: Tensor, scalars: Mapping[str, Scalar], field: str, places: Mapping[str, Location] | None
) -> None:
    def refuse(part: str, message: str) -> SpecError:
        return SpecError(message, location=locate(places, f"{field}.{part}"), field=f"{field}.{part}")

    if tensor.dtype not in TENSOR_DTYPES:
        raise refuse("dtype", _unknown_dtype(tensor.dtype, TENSOR_DTYPES))
    if len(tensor.shape) > _MAX_RANK:
        raise refuse("shape", f"has {len(tensor.shape)} axes, at most {_MAX_RANK} are allowed")
    for extent in tensor.shape:
        if isinstance(extent, str):
            scalar = scalars.get(extent)
            if not _IDENTIFIER.fullmatch(extent) or keyword.iskeyword(extent):
                raise refuse("shape", f"extent {extent!a} must be an integer or a name")
            if extent not in EXTENTS and extent in RESERVED:
                hint = suggest(extent, EXTENTS)
                raise refuse("shape", f"'{extent}' is not an extent{hint or ' and is reserved'}")
            if scalar is not None and scalar.type is not Type.INT:
                raise refuse("shape", f"extent '{extent}' is a scalar that is not an integer")
        elif isinstance(extent, bool) or not isinstance(extent, int) or not 0 < extent < 2**31:
            raise refuse("shape", f"extent must be an integer of 1 .. {2**31 - 1} or a name, got {extent!r}")
    if tensor.range is not None:
        for part, bound in zip(("range.min", "range.max"), tensor.range, strict=True):
            if bound is not None:
                _check_bound(bound, tensor.dtype, refuse, part)
        low, high = (limit(bound, i, (-math.inf, math.inf)[i]) for i, bound in enumerate(tensor.range))
        if low > high:
            raise refuse("range", f"min {tensor.range[0]} exceeds max {tensor.range[1]}")
    if tensor.monotone is not None:
        if tensor.monotone.order != "nondecreasing":
            raise refuse("monotone.order", f"must be nondecreasing, got {tensor.monotone.order!r}")
        if tensor.type is Type.BOOL:
            raise refuse("monotone", "a bool tensor cannot be monotone")
        rank = len(tensor.shape)
        if not 0 <= tensor.monotone.axis < rank:
            raise refuse("monotone.axis", f"must lie within 0 .. {rank - 1}, got {tensor.monotone.axis}")
        if tensor.monotone.runs is not None and tensor.type is not Type.INT:
            raise refuse("monotone.runs", f"elements of {tensor.dtype} are no integers")
    if tensor.grad and tensor.type is not Type.FLOAT:
        raise refuse("grad", f"a tensor of {tensor.dtype} has no gradient")


def _unknown_dtype(name: str, allowed: Sequence[str]) -> str:
    return f"unknown dtype '{name}'{suggest(name, allowed)} (allowed: {', '.join(allowed)})"
