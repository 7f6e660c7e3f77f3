"""A call's arguments, checked: shapes that agree, lengths, scale; ``declared`` checks what the variant declares.

Everything here looks at shapes, strides, dtypes and devices only. What the tensors hold is not read, since that
would wait for the GPU; ``debug`` reads it.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from attngen.dtypes import KEY_VALUE_DIMS, LATENT_ROWS, QUANTIZED_DTYPES, V_GROUP
from attngen.errors import CallError, suggest
from attngen.lang.ir import MAX_SEQLEN
from attngen.lang.variant import Variant
from attngen.runtime.arguments.checked import (
    ATTENTION_DTYPES,
    LATENT_DTYPE,
    LAYOUTS,
    Call,
    Packing,
    View,
    mixes,
    view,
)
from attngen.runtime.arguments.declared import bind_declared
from attngen.runtime.arguments.extra_cache import check_extra_cache, has_extra_cache
from attngen.runtime.arguments.given import KEPT, MAX_LOGITS, Given
from attngen.runtime.arguments.latent_rows import check_latent_rows, latent_name
from attngen.runtime.arguments.scalars import FLOAT32_MAX

#: Letter of an order of axes → the axis, in messages.
_AXES = {"b": "batch", "s": "seqlen", "h": "heads", "d": "head_dim"}

#: Axes of v in groups of keys, of which each has a row of keys for every column.
_OF_GROUPS = ("b", "h", "g", "d", "k")


def bind(
    variant: Variant,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packing: Packing | Given | None,
    *,
    layout: str = "bshd",
    **settings: Any,
) -> Call:
    """Check a call and resolve its extents. Raises CallError.

    Dense: q (b, s, h, d), or (b, h, s, d) with layout 'bhsd'. With a ``packing``: q (total_q, h, d), k and v
    (total_k, hk, d). ``settings``: those of ``finish``.
    """
    if packing is None:
        if not isinstance(layout, str) or layout not in LAYOUTS:
            raise CallError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}{_layout_hint(layout)}")
        call = _bind_dense(variant, q, k, v, layout)
    else:
        call = _bind_packed(variant, q, k, v, packing)
    return finish(call, **settings)


def _layout_hint(layout: object) -> str:
    name = str(layout)
    if name in ("packed", "varlen", "thd"):
        return "; attention_varlen takes packed sequences"
    return "; attention_paged takes pages" if name in ("paged", "pages") else suggest(name, LAYOUTS)


def _bind_dense(variant: Variant, q: Tensor, k: Tensor, v: Tensor, order: str) -> Call:
    form = " x ".join(_AXES[axis] for axis in order)
    grouped = isinstance(v, torch.Tensor) and v.dim() == len(_OF_GROUPS)
    views = _views({"q": q, "k": k, "v": k if grouped else v}, order, form)
    (batch, seqlen_q), seqlen_k = views["q"].shape[:2], views["k"].shape[1]
    if grouped:
        return _bind_grouped(variant, q, k, v, views, order)
    for name in ("k", "v"):
        if views[name].shape[0] != batch:
            raise CallError(f"{name} has batch {views[name].shape[0]}, but q has {batch}")
    if views["v"].shape[1] != seqlen_k:
        raise CallError(f"k has {seqlen_k} keys, but v has {views['v'].shape[1]}")
    call = common(variant, q, k, views, "dense", order)
    call.batch, call.seqlen_q, call.seqlen_k = batch, seqlen_q, seqlen_k
    call.total_q, call.total_k = batch * seqlen_q, batch * seqlen_k
    return call


def _bind_grouped(variant: Variant, q: Tensor, k: Tensor, v: Tensor, views: dict[str, View], order: str) -> Call:
    """The call whose v comes in groups of keys, (batch, kv_heads, groups, head_dim, 32); places of no key are 0."""
    (batch, seqlen_q), (of_k, seqlen_k, kv_heads) = views["q"].shape[:2], views["k"].shape[:3]
    wanted = (batch, kv_heads, -(-seqlen_k // V_GROUP), v.shape[3], V_GROUP)
    if of_k != batch or tuple(v.shape) != wanted:
        raise CallError(f"v in groups of keys must have shape {wanted}, got {tuple(v.shape)}")
    if v.dtype != k.dtype or v.device != k.device:
        raise CallError(f"k has dtype {k.dtype} and is on {k.device}, but v has {v.dtype} and is on {v.device}")
    call = common(variant, q, k, views, "dense", order)
    call.v, call.head_dim_v = View(_OF_GROUPS, tuple(v.shape), tuple(v.stride())), v.shape[3]
    call.batch, call.seqlen_q, call.seqlen_k = batch, seqlen_q, seqlen_k
    call.total_q, call.total_k = batch * seqlen_q, batch * seqlen_k
    return call


def _bind_packed(variant: Variant, q: Tensor, k: Tensor, v: Tensor, packing: Packing | Given) -> Call:
    views = _views({"q": q, "k": k, "v": v}, "thd", "total x heads x head_dim")
    total_q, total_k = views["q"].shape[0], views["k"].shape[0]
    if views["v"].shape[0] != total_k:
        raise CallError(f"k has {total_k} keys, but v has {views['v'].shape[0]}")
    call = common(variant, q, k, views, "varlen", "thd")
    call.total_q, call.total_k = total_q, total_k
    call.cu_seqlens_q = index_vector("cu_seqlens_q", packing.cu_seqlens_q, call.device)
    call.cu_seqlens_k = index_vector("cu_seqlens_k", packing.cu_seqlens_k, call.device)
    if call.cu_seqlens_q.shape != call.cu_seqlens_k.shape or not call.cu_seqlens_q.numel():
        raise CallError(
            "cu_seqlens_q and cu_seqlens_k must both have shape (batch + 1,), got "
            f"{tuple(call.cu_seqlens_q.shape)} and {tuple(call.cu_seqlens_k.shape)}"
        )
    call.batch = call.cu_seqlens_q.shape[0] - 1
    call.seqlen_q = length_of("max_seqlen_q", packing.max_seqlen_q)
    call.seqlen_k = length_of("max_seqlen_k", packing.max_seqlen_k)
    return call


def _views(tensors: Mapping[str, Tensor], order: str, form: str) -> dict[str, View]:
    """Check that q, k and v are tensors of one dtype, device and rank, and return them by axis."""
    for name, tensor in tensors.items():
        check_rank(name, tensor, len(order), form)
    check_alike(tensors)
    return {name: view(tensor.shape, tensor.stride(), order) for name, tensor in tensors.items()}


def check_rank(name: str, tensor: object, rank: int, form: str) -> None:
    """Raise CallError unless something is a tensor of ``rank`` dimensions; ``form`` names these."""
    if not isinstance(tensor, torch.Tensor):
        raise CallError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.is_nested:
        raise CallError(f"{name} is a nested tensor; allowed: {form}; attngen.attention_varlen takes packed sequences")
    if tensor.dim() != rank:
        raise CallError(f"{name} must have {rank} dimensions ({form}), got shape {tuple(tensor.shape)}")


def check_written(name: str, tensor: torch.Tensor) -> None:
    """Raise CallError for a tensor that a call cannot write to: rows that share memory, or a leaf of autograd."""
    if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        raise CallError(f"{name} is written, but its rows share memory: it has strides {tensor.stride()}")
    if tensor.requires_grad and tensor.is_leaf and torch.is_grad_enabled():
        raise CallError(f"{name} is written, but requires a gradient; allowed: {name}.detach()")


def check_alike(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise CallError unless all have the dtype and the device of q, and a contiguous last dimension. k and v may be a
    cache in 8 bits beside a wider q."""
    q, k, _ = tensors.values()
    kv_dtype = k.dtype if mixes(q.dtype, k.dtype) else q.dtype
    if q.dtype not in ATTENTION_DTYPES:
        raise CallError(f"q has dtype {q.dtype}; allowed: {', '.join(map(str, ATTENTION_DTYPES))}")
    for name, tensor in tensors.items():
        if tensor is not q and tensor.dtype != kv_dtype:
            first, second, third = tensors
            beside = f"{second} has dtype {k.dtype}" if kv_dtype != q.dtype else f"q has dtype {q.dtype}"
            raise CallError(
                f"{beside}, but {name} has {tensor.dtype}; {first}, {second} and {third} must have one dtype, or "
                f"{second} and {third} one of 8 bits beside a wider q"
            )
        if tensor.device != q.device:
            raise CallError(f"q is on {q.device}, but {name} is on {tensor.device}; all tensors must be on one device")
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1 and not _lies_by_columns(name, tensor):
            raise CallError(
                f"{name}'s last dimension must be contiguous, got strides {tensor.stride()}; {name}.contiguous() helps"
            )


def _lies_by_columns(name: str, tensor: torch.Tensor) -> bool:
    """Whether a tensor is v in 8 bits whose keys lie side by side, as products of 8 bits read them."""
    quantized = ATTENTION_DTYPES.get(tensor.dtype) in QUANTIZED_DTYPES
    return name == "v" and quantized and tensor.dim() == 4 and 1 in tensor.stride()[1:3]


def common(
    variant: Variant, q: torch.Tensor, k: torch.Tensor, views: Mapping[str, View], layout: str, order: str
) -> Call:
    """Check head counts and head dims, and return the call without its lengths."""
    heads, head_dim_qk = views["q"].shape[-2:]
    kv_heads, head_dim_k = views["k"].shape[-2:]
    kv_heads_v, head_dim_v = views["v"].shape[-2:]
    kv_dtype = ATTENTION_DTYPES.get(k.dtype)
    if k.dtype == LATENT_DTYPE:
        kv_dtype, head_dim_k, head_dim_v = _packed(k, views)
    if head_dim_k != head_dim_qk:
        raise CallError(f"q has head_dim {head_dim_qk}, but k has {head_dim_k}")
    if kv_heads_v != kv_heads:
        raise CallError(f"k has {kv_heads} heads, but v has {kv_heads_v}")
    if heads % kv_heads if kv_heads else heads:
        raise CallError(
            f"the number of query heads ({heads}) must be a multiple of the number of KV heads ({kv_heads})"
        )
    return Call(
        variant=variant, layout=layout, order=order, dtype=ATTENTION_DTYPES[q.dtype], device=q.device,
        kv_dtype=kv_dtype or "",
        heads=heads, kv_heads=kv_heads, head_dim_qk=head_dim_qk, head_dim_v=head_dim_v,
        q=views["q"], k=views["k"], v=views["v"],
    )  # fmt: skip


def _packed(k: torch.Tensor, views: Mapping[str, View]) -> tuple[str, int, int]:
    """Name of a cache of packed rows, and the head dims of its keys and values."""
    name = latent_name(k)
    if name is None:
        sizes = " or ".join(str(row.bytes) for row in LATENT_ROWS.values())
        raise CallError(f"k has {k.shape[-1]} bytes a token, in {k.dtype}; a cache of latents has {sizes}")
    if views["k"] != views["v"]:
        raise CallError(f"values are columns of the same rows: pass the cache of {k.shape[-1]} bytes a token as v, too")
    row = check_latent_rows(name, k, views["k"].shape[-2])
    return name, row.columns, next(v for qk, v in KEY_VALUE_DIMS if qk == row.columns)


def softmax_scale_of(value: object) -> float:
    """Return a softmax_scale as a float, or raise CallError."""
    if type(value) is float and 0.0 < value <= FLOAT32_MAX:  # as most calls have it
        return value
    if (
        isinstance(value, bool | torch.Tensor)
        or not isinstance(value, numbers.Real)
        or not 0 < float(value) <= FLOAT32_MAX
    ):
        raise CallError(f"softmax_scale must be a positive Python number that is finite in float32, got {value!r}")
    return float(value)


def default_scale(head_dim: int) -> float:
    """Return the softmax_scale of a call that gives none."""
    return 1.0 / math.sqrt(head_dim) if head_dim else 1.0


def index_vector(name: str, value: object, device: torch.device) -> torch.Tensor:
    """Check a vector of lengths or offsets: int32, contiguous, on the device of q."""
    if not isinstance(value, torch.Tensor):
        raise CallError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    if value.dtype != torch.int32 or value.dim() != 1:
        convert = f"; pass {name}.int()" if value.dtype == torch.int64 and value.dim() == 1 else ""
        raise CallError(f"{name} must be an int32 vector, got {value.dtype} of shape {tuple(value.shape)}{convert}")
    if value.device != device:
        raise CallError(f"{name} is on {value.device}, but q is on {device}")
    if value.numel() > 1 and value.stride(0) != 1:
        raise CallError(f"{name} must be contiguous, got stride {value.stride(0)}")
    return value


def length_of(name: str, value: Any) -> int:
    """Return a length as an int; CallError for what is not a Python integer, or is negative."""
    if isinstance(value, torch.Tensor):
        raise CallError(
            f"{name} must be a Python integer, got a tensor: reading it would wait for the GPU; pass {name}.item()"
        )
    if isinstance(value, bool):
        raise CallError(f"{name} must be a Python integer, got {value!r}")
    try:
        number = operator.index(value)
    except TypeError:
        raise CallError(f"{name} must be a Python integer, got {value!r}") from None
    if number < 0:
        raise CallError(f"{name} must not be negative, got {number}")
    return number


def require_lse(variant: Variant) -> None:
    """Raise CallError if the weights of a variant have no log-sum-exp."""
    if not variant.has_lse:
        raise CallError(
            f"{variant.name} has weights: {variant.weights}, which have no log-sum-exp; leave out return_lse"
        )


def finish(
    call: Call,
    *,
    softmax_scale: object = None,
    seqused_k: object = None,
    return_lse: object = False,
    arguments: Mapping[str, object] = MappingProxyType({}),
) -> Call:
    """Check what all calls take: scale, lengths, used lengths and what the variant declares; resolve every extent."""
    if not isinstance(return_lse, bool) and return_lse not in (KEPT, MAX_LOGITS):
        raise CallError(f"return_lse must be True or False, got {return_lse!r}")
    call.scale = default_scale(call.head_dim_qk) if softmax_scale is None else softmax_scale_of(softmax_scale)
    if return_lse is True:
        require_lse(call.variant)
        if call.variant.max_logits:
            raise CallError(f"{call.variant.name} goes with return_max_logits=True, beside the plain name")
    call.return_lse = bool(return_lse)
    for name in ("seqlen_q", "seqlen_k", "total_q", "total_k"):
        if getattr(call, name) > MAX_SEQLEN:
            raise CallError(f"{name} is {getattr(call, name)}; the largest allowed is {MAX_SEQLEN}")
    if seqused_k is not None:
        call.seqused_k = index_vector("seqused_k", seqused_k, call.device)
        if call.seqused_k.shape[0] != call.batch:
            raise CallError(f"seqused_k must have shape ({call.batch},), got {tuple(call.seqused_k.shape)}")
    call.extents = {
        "b": call.batch, "h": call.heads, "hk": call.kv_heads, "heads": call.heads, "kv_heads": call.kv_heads,
        "seqlen_q": call.seqlen_q, "seqlen_k": call.seqlen_k, "total_q": call.total_q, "total_k": call.total_k,
    }  # fmt: skip
    bind_declared(call, arguments)
    if has_extra_cache(call):
        check_extra_cache(call)
    return call
