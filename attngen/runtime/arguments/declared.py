"""The scalars and tensors that a variant declares, as a call passes them: names, dtypes, shapes, extents, bounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from attngen.dtypes import dtype as dtype_row
from attngen.errors import CallError, suggest
from attngen.lang.dropout import RNG_STATE
from attngen.lang.ranges import DTYPE_RANGES
from attngen.lang.variant import Bound, Scalar, Variant
from attngen.lang.variant import Tensor as DeclaredTensor
from attngen.runtime.arguments.checked import Call
from attngen.runtime.arguments.scalars import Number, ScalarRule

#: Keywords of the call itself, offered when an unknown keyword is near one of them.
_CALL_KEYWORDS = (
    "variant", "softmax_scale", "seqused_k", "return_lse", "return_max_logits", "layout", "backend", "package",
    "tile_map", "deterministic",
)  # fmt: skip

#: Keywords of SDPA and flash-attn, and of the dense call in a packed one, and what to write instead.
_ELSEWHERE = {
    "alibi_slopes": "say variant='alibi', slope=...",
    "attn_mask": "a mask of bools goes to variant='allowed'",
    "dropout": "say dropout_p=..., with a variant that has 'dropout: true'",
    "key_padding_mask": "seqused_k counts the keys of each sequence",
    "mask": "say variant=attngen.variant(mask=...)",
    "softcap": "say variant='softcap', cap=...",
    "causal": "say variant='causal'",
    "is_causal": "say variant='causal', or 'causal_top_left' to align at the first key",
    "enable_gqa": "leave it out: k and v may have fewer heads",
    "layout": "packed tensors have one: total x heads x head_dim; that of pages is page_layout",
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), "attention_varlen takes it"),
    **dict.fromkeys(("page_table", "num_decodes", "num_splits", "split_size", "out"), "attention_paged takes it"),
    "scale": "did you mean 'softmax_scale'?",
    "window_size": "say variant='sliding_window', window=...",
    **dict.fromkeys(("block_mask", "mask_mod", "score_mod"), "attngen.integrations.flex_attention takes it"),
}


def bind_declared(call: Call, arguments: Mapping[str, object]) -> None:
    """Check what a call passes of its variant's scalars and tensors, and bind these and every extent. Raises
    CallError."""
    _check_names(call.variant, arguments)
    bound_by: dict[str, str] = {}
    for declared in call.variant.tensors:
        call.tensors[declared.name] = _tensor(declared, arguments[declared.name], call, bound_by)
    call.rules = tuple(_rule(scalar, call) for scalar in call.variant.scalars)
    for rule in call.rules:
        value = arguments.get(rule.name)
        if value is None:
            value = rule.const if rule.const is not None else rule.default
        call.scalars[rule.name] = _scalar(rule, value, call)


def _check_names(variant: Variant, arguments: Mapping[str, object]) -> None:
    """Refuse a keyword that is not declared, and a declared one that is missing."""
    declared = [t.name for t in variant.tensors] + [s.name for s in variant.scalars]
    for name in arguments:
        if name not in declared:
            raise CallError(
                f"{variant.name}: unknown argument '{name}'{hint_for(name, declared)}; {_declaration(variant)}"
            )
    required = [t.name for t in variant.tensors if t != RNG_STATE]
    required += [s.name for s in variant.arguments if s.default is None]
    missing = [name for name in required if arguments.get(name) is None]
    if missing:
        raise CallError(f"{variant.name}: missing {', '.join(map(repr, missing))}; {_declaration(variant)}")


def hint_for(unknown: str, declared: Sequence[str]) -> str:
    """Hint for a keyword that neither the variant nor the call has, or the empty string."""
    if unknown in _ELSEWHERE:
        return f"; {_ELSEWHERE[unknown]}"
    if unknown in _CALL_KEYWORDS:
        return "; keys in pages have none"
    return suggest(unknown, (*declared, *_CALL_KEYWORDS))


def _declaration(variant: Variant) -> str:
    """The arguments of a variant in one line."""
    parts = [f"{s.name}: {_type(s.dtype)}{_span(s.min, s.max)}{_otherwise(s)}" for s in variant.scalars]
    parts += [f"{t.name}: {_type(t.dtype)} [{', '.join(map(str, t.shape))}]" for t in variant.tensors]
    return f"'{variant.name}' takes {'; '.join(parts) or 'no arguments of its own'}"


def _type(dtype: str) -> str:
    """A dtype by its name in torch, which is that of specs."""
    return dtype_row(dtype).torch


def _span(low: Bound, high: Bound) -> str:
    if low is None or high is None:
        return "" if low is high else f", at least {low}" if high is None else f", at most {high}"
    return f", {low} to {high}"


def _otherwise(scalar: Scalar) -> str:
    if scalar.const is not None:
        return f" = {scalar.const} (fixed)"
    return "" if scalar.default is None else f" = {scalar.default}"


def _tensor(declared: DeclaredTensor, value: object, call: Call, bound_by: dict[str, str]) -> torch.Tensor:
    """Check one declared tensor and bind the extents that it is the first to name."""
    label = f"{call.variant.name}: tensor '{declared.name}'"
    if not isinstance(value, torch.Tensor):
        raise CallError(f"{label} must be a torch.Tensor, got {type(value).__name__}")
    wanted = getattr(torch, dtype_row(declared.dtype).torch)
    # Double precision is the reference's own: it serves as the oracle of a kernel in the declared dtype.
    if value.dtype != wanted and not (
        call.dtype == "fp64" and wanted.is_floating_point and value.dtype == torch.float64
    ):
        raise CallError(f"{label} must have dtype {wanted}, got {value.dtype}")
    if value.device != call.device:
        raise CallError(f"{label} is on {value.device}, but q is on {call.device}")
    if value.dim() != len(declared.shape):
        raise CallError(f"{label} must have shape [{', '.join(map(str, declared.shape))}], got {tuple(value.shape)}")
    scalars = {s.name for s in call.variant.scalars}
    for axis, (extent, size) in enumerate(zip(declared.shape, value.shape, strict=True)):
        if size > 2**31 - 1:
            raise CallError(f"{label}: extent {size} of axis {axis} does not fit int32")
        if isinstance(extent, str):
            if extent not in call.extents:
                call.extents[extent] = size
                bound_by[extent] = declared.name
            wanted_extent = call.extents[extent]
        else:
            wanted_extent = extent
        if size != wanted_extent:
            because = f", as in '{bound_by[extent]}'" if extent in bound_by and extent not in scalars else ""
            named = f"{extent} = {wanted_extent}" if isinstance(extent, str) else extent
            raise CallError(
                f"{label}: axis {axis} must be {named}{because}, got {tuple(value.shape)}"
                + (f"; {declared.name}.expand(...) repeats it without a copy" if size == 1 else "")
            )
    return value


def _rule(scalar: Scalar, call: Call) -> ScalarRule:
    """Resolve the allowed values of a scalar; one that names an extent of a tensor must equal it."""
    low, high = DTYPE_RANGES[scalar.dtype]
    low = max(low, _bound(scalar, scalar.min, call, low))
    high = min(high, _bound(scalar, scalar.max, call, high))
    if scalar.name in call.extents:
        low = high = call.extents[scalar.name]
    return ScalarRule(scalar.name, scalar.dtype, low, high, scalar.default, scalar.const)


def _bound(scalar: Scalar, bound: Bound, call: Call, otherwise: float) -> float:
    if bound is None:
        return otherwise
    if isinstance(bound, str):
        if bound not in call.extents:
            raise CallError(f"{call.variant.name}: scalar '{scalar.name}' is bounded by '{bound}', which no tensor has")
        return call.extents[bound]
    return bound


def _scalar(rule: ScalarRule, value: object, call: Call) -> Number:
    """Check a scalar; one with a gradient may be a 0-d tensor, which the reference differentiates."""
    if isinstance(value, torch.Tensor) and call.variant.scalar(rule.name).grad:
        if value.dim():
            raise CallError(f"{call.variant.name}: scalar '{rule.name}' must be a number or a 0-d tensor")
        return value
    return rule.check(value, call.variant.name)
