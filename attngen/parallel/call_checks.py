"""Checks of a call of a plan: its tensors and values, and what must agree on all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from attngen.errors import CallError
from attngen.parallel.heads import against
from attngen.parallel.layers import PlanLayer
from attngen.parallel.local import OF_TOKENS
from attngen.parallel.sharding import Sharding
from attngen.parallel.values import refuse_unknown

#: Dtypes of q, k and v: keys that are exchanged have no scales.
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

#: Arguments of ``attngen.attention`` that calls of plans do not have, and what does the same.
_INSTEAD = {
    "seqused_k": "a mask that reads lengths, such as kv < used[b]",
    "tile_map": "none, since it would be that of all tokens",
    **dict.fromkeys(("q_descale", "k_descale", "v_descale"), "tensors of 16 bits"),
}


class Placement(Protocol):
    """The part of a plan that checks read: where tokens lie."""

    @property
    def seqlen(self) -> int: ...
    @property
    def ranks(self) -> int: ...
    @property
    def sharding(self) -> Sharding: ...
    @property
    def cu_seqlens(self) -> tuple[int, ...] | None: ...
    def tokens(self) -> int: ...


def axis_of_tokens(
    plan: Placement, layer: PlanLayer, q: Any, k: Any, v: Any, layout: Any, values: Mapping[str, Any]
) -> int:
    """The axis of tokens of q, k and v. Raises CallError."""
    packed = plan.cu_seqlens is not None
    if layout not in ("bshd", "bhsd") or (packed and layout != "bshd"):
        raise CallError(f"layout must be bshd{'' if packed else ' or bhsd'}, got {layout!r}")
    axis = 0 if packed else 1 if layout == "bshd" else 2
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor):
            raise CallError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
        if tensor.dim() != (3 if packed else 4) or tensor.shape[axis] != plan.tokens():
            shape = "(tokens, heads, head_dim)" if packed else "(batch, tokens, heads, head_dim)"
            shape = "(batch, heads, tokens, head_dim)" if axis == 2 else shape
            raise CallError(f"{name} has shape {tuple(tensor.shape)}; allowed: {shape} with {plan.tokens()} tokens")
    heads_at = 1 if axis != 1 else 2
    reason = against(q.shape[heads_at], k.shape[heads_at], plan.ranks) if layer.method == "heads" else None
    if reason is not None:
        raise CallError(f"method heads: {reason}")
    if not q.dtype == k.dtype == v.dtype:
        raise CallError(f"q, k and v must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}")
    if q.dtype not in _DTYPES:
        raise CallError(f"plans do not take {q.dtype}; allowed: {', '.join(map(str, _DTYPES))}")
    for name, instead in _INSTEAD.items():
        if name in values:
            raise CallError(f"plans do not take {name}; allowed: {instead}")
    if values:
        refuse_unknown({layer.name: layer.variant}, values)
    for name, value in values.items():
        fixed = layer.values.get(name)
        same = value is fixed or (not isinstance(value, Tensor) and not isinstance(fixed, Tensor) and value == fixed)
        if name in layer.fixed and not same:
            raise CallError(
                f"'{name}' is read by the mask of {layer.name}, so the plan fixes it; allowed: {name}=… as an "
                "argument of another plan"
            )
    given = {*layer.values, *values, *layer.defaults}
    missing = [name for name in layer.passed if name not in given]
    if missing:
        raise CallError(f"{layer.name} takes {', '.join(missing)}, which neither the plan nor the call got")
    return axis


def signature_of(
    plan: Placement, layer: PlanLayer, tensors: Sequence[Tensor], axis: int, values: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Properties that must agree on all ranks: shapes without the tokens, and which tensors hold those of a
    rank."""
    shapes = [(*tensor.shape[:axis], *tensor.shape[axis + 1 :]) for tensor in tensors]
    own: list[Any] = []
    for name, value in sorted(values.items()):
        if not isinstance(value, Tensor):
            own.append((name, value))
            continue
        extents = layer.variant.tensor(name).shape if name in {t.name for t in layer.variant.tensors} else ()
        held = [
            "whole" if n == plan.seqlen or plan.sharding.one_holds_all else "own"
            for extent, n in zip(extents, value.shape, strict=False)
            if extent in OF_TOKENS
        ]
        own.append((name, value.dim(), *held))
    return *shapes, str(tensors[0].dtype), tensors[0].device.type, *own


def form_of(value: Any) -> Any:
    """Properties that checks compare: shape, dtype and device of a tensor; of anything else the value itself."""
    if isinstance(value, Tensor):
        return id(value) if value.dim() == 0 else None, value.shape, value.dtype, value.device
    return type(value), value
