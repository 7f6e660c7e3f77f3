"""SageAttention's functions on kernels of 8 bits: ``sageattn`` and ``sageattn_varlen``, argument for argument.

They are ``attngen.attention(..., quantize="fp8")``: Q, K, P and V in e4m3, where SageAttention has INT8 for Q and K.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attngen.errors import CallError
from attngen.runtime.operations.attention.entry import attention, attention_varlen
from attngen.runtime.operations.quantize.call import quantize

__all__ = ["sageattn", "sageattn_varlen"]

#: Arguments of SageAttention that choose among its kernels or tune them; nothing depends on them here.
_IGNORED = frozenset((
    "attn_mask", "dropout_p", "pv_accum_dtype", "qk_quant_gran", "quantization_backend", "smooth_k", "smooth_v",
))  # fmt: skip

_LAYOUTS = {"HND": "bhsd", "NHD": "bshd"}


def sageattn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensor_layout: str = "HND",
    is_causal: bool = False,
    sm_scale: float | None = None,
    return_lse: bool = False,
    **kwargs: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return attention of q (batch, heads, queries, head_dim), or (batch, queries, heads, head_dim) with
    ``tensor_layout="NHD"``, in bfloat16 or float16; with ``return_lse`` also the natural log-sum-exp (batch, heads,
    queries) in float32.

    ``is_causal`` aligns the first query with the first key. What tunes SageAttention's own kernels is accepted without
    effect; a mask and dropout are refused, since SageAttention would leave them out without a word. Raises CallError.
    """
    if tensor_layout not in _LAYOUTS:
        raise CallError(f"tensor_layout must be one of {', '.join(_LAYOUTS)}, got {tensor_layout!r}")
    _check(kwargs)
    layout = _LAYOUTS[tensor_layout]
    tokens = 2 if layout == "bhsd" else 1
    square = q.shape[tokens] == k.shape[tokens]
    variant = ("causal" if square else "causal_top_left") if is_causal else "full"
    return attention(
        q, k, v, variant=variant, softmax_scale=sm_scale, return_lse=return_lse, layout=layout, quantize="fp8"
    )


@torch.no_grad()
def sageattn_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    is_causal: bool = False,
    sm_scale: float | None = None,
    smooth_k: bool = True,
    **kwargs: Any,
) -> Tensor:
    """As ``sageattn``, for packed sequences: q (total_q, heads, head_dim), k and v (total_k, kv_heads, head_dim).

    All sequences share the mean of the keys, and the scales. ``is_causal`` aligns the last query of a sequence with its
    last key.
    """
    del smooth_k
    _check(kwargs)
    k = k - k.mean(dim=0, keepdim=True) if k.shape[0] else k
    eight = quantize(q[None], k[None], v[None])
    scales = {name: scale.expand(cu_seqlens_q.shape[0] - 1, -1) for name, scale in eight.descales.items()}
    out = attention_varlen(
        eight.q[0], eight.k[0], eight.v[0], cu_seqlens_q.int(), cu_seqlens_k.int(), max_seqlen_q, max_seqlen_k,
        variant="causal" if is_causal else "full", softmax_scale=sm_scale or q.shape[-1] ** -0.5, **scales,
    )  # fmt: skip
    assert isinstance(out, Tensor)
    return out if out.dtype == q.dtype else out.to(q.dtype)


def _check(more: dict[str, Any]) -> None:
    unknown = sorted(set(more) - _IGNORED)
    if unknown:
        raise CallError(f"'{unknown[0]}' is no argument of SageAttention")
    if more.get("attn_mask") is not None:
        raise CallError("attn_mask is not supported: SageAttention ignores it; attngen.attention takes masks")
    if more.get("dropout_p"):
        raise CallError("dropout_p is not supported: SageAttention ignores it")
