"""FlashMLA's dense decoding and sparse prefill, argument for argument, on attngen's kernels: replace one import.

The forms are those of https://github.com/deepseek-ai/FlashMLA. Values are the first ``head_dim_v`` columns of the
cache, which kernels of specs with ``v: key`` read once. Blocks share the keys of sequences by the lengths on the GPU,
so that there is no metadata to compute: ``get_mla_metadata`` returns an empty object, as FlashMLA itself does, and a
graph may capture a call whose lengths change later.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attngen.errors import CallError
from attngen.integrations.choice import Candidate, Pages, attend
from attngen.integrations.flash_arguments import contiguous_rows, refuse, tensor

__all__ = ["FlashMLASchedMeta", "flash_mla_sparse_fwd", "flash_mla_with_kvcache", "get_mla_metadata"]

#: The shipped spec that builds what these functions ask for.
SPEC = "flash_mla"

_QUANTIZED = "kernels of latent caches in 8 bits do not exist"
_SLOTS = (
    "flash_mla_sparse_fwd takes indices, over the rows of a cache in 16 bits as one tensor: k_cache.view(-1, 1, 576)"
)
_REASONS = {
    "is_fp8_kvcache": _QUANTIZED, "descale_q": _QUANTIZED, "descale_k": _QUANTIZED, "kv_format": _QUANTIZED,
    "indices": _SLOTS, "extra_indices_in_kvcache": _SLOTS, "extra_k_cache": _SLOTS, "topk_length": _SLOTS,
    "extra_topk_length": _SLOTS, "attn_sink": _SLOTS,
}  # fmt: skip


@dataclass
class FlashMLASchedMeta:
    """Metadata of a schedule, which holds nothing: blocks find their work on the GPU."""


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
    """Return an empty schedule, and None, for ``flash_mla_with_kvcache``; arguments are those of older versions."""
    del args, kwargs
    return FlashMLASchedMeta(), None


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: Any = None,
    num_splits: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool | None = False,
    indices: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
    enable_batch_invariant: bool = False,
    use_legacy: bool = False,
    kv_format: str | None = None,
    descale_q: Tensor | None = None,
    descale_k: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return attention of q (b, sq, h, 576) over a cache (blocks, block_size, 1, 576), and its log-sum-exp.

    ``block_table`` (b, max_blocks) int32 lists the blocks of each sequence, ``cache_seqlens`` (b,) int32 counts its
    keys, those of its queries included. The last query sees the last key if ``causal``. The output is (b, sq, h,
    ``head_dim_v``); the log-sum-exp (b, h, sq) is float32, natural, −inf for a query that sees no key.
    ``softmax_scale`` is 1/√576 unless given. Head dims 512/512 are taken as well, and a block size of any multiple of
    16. ``tile_scheduler_metadata``, ``num_splits`` and ``use_legacy`` change no result; with
    ``enable_batch_invariant`` one block takes a sequence, and the bits of a row depend on that alone.

    Indices, and caches in 8 bits, are refused with NoKernelError. Raises CallError for arguments that disagree.
    """
    del tile_scheduler_metadata, num_splits, use_legacy
    refuse(
        _REASONS, is_fp8_kvcache=is_fp8_kvcache, indices=indices, attn_sink=attn_sink, extra_k_cache=extra_k_cache,
        extra_indices_in_kvcache=extra_indices_in_kvcache, topk_length=topk_length, extra_topk_length=extra_topk_length,
        kv_format=kv_format, descale_q=descale_q, descale_k=descale_k,
    )  # fmt: skip
    if block_table is None or cache_seqlens is None:
        raise CallError("block_table and cache_seqlens are needed: they say where the keys of a sequence are")
    if tensor("k_cache", k_cache).dim() != 4:
        raise CallError(f"k_cache must have shape (blocks, block_size, 1, head_dim), got {tuple(k_cache.shape)}")
    if not 0 < head_dim_v <= k_cache.shape[-1]:
        raise CallError(f"head_dim_v is {head_dim_v}, but k_cache has {k_cache.shape[-1]} columns")
    (q,) = contiguous_rows(q=tensor("q", q))
    pages = Pages(tensor("block_table", block_table), num_splits=1 if enable_batch_invariant else None)
    out, lse = attend(
        [Candidate("causal" if causal else "full")], q, k_cache, k_cache[..., :head_dim_v], spec=SPEC, pages=pages,
        softmax_scale=softmax_scale, seqused_k=tensor("cache_seqlens", cache_seqlens), return_lse=True,
    )  # fmt: skip
    return out, lse


#: Largest sink that is passed to a kernel: in units of log2 it is still finite in float32, and no logit counts beside
#: it.
_LARGEST_SINK = 1e38


def flash_mla_sparse_fwd(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
) -> tuple[Tensor, None, Tensor]:
    """Attention of q (s_q, h, 576) to the rows of kv (s_kv, 1, 576) that ``indices`` (s_q, 1, topk) lists.

    Returns the output (s_q, h, ``d_v``); None, since no kernel stores the largest logits; and the log-sum-exp (s_q, h),
    natural, in float32, −inf for a query without a key. Entries below 0, or not below s_kv, are ignored.
    ``topk_length`` (s_q,) int32 is the number of entries of each query that count, from the first one on. ``attn_sink``
    (h,) float32 is a logit without a value. The log-sum-exp leaves it out: it is computed from the one with the sink,
    and is −inf where the sink is all that float32 keeps of the sum. Any topk and any number of heads are taken, and
    head dims 512/512 as well. The rows of a paged cache in 16 bits are one tensor, whose indices are ``block *
    block_size + row``.

    Raises CallError for arguments that disagree.
    """
    shapes = {
        "q": (q, "(s_q, heads, head_dim)"),
        "kv": (kv, "(s_kv, 1, head_dim)"),
        "indices": (indices, "(s_q, 1, topk)"),
    }
    for name, (given, form) in shapes.items():
        if tensor(name, given).dim() != 3:
            raise CallError(f"{name} must have shape {form}, got {tuple(given.shape)}")
    if kv.shape[1] != 1 or indices.shape[1] != 1:
        raise CallError(f"kv and indices must have one KV head, got {kv.shape[1]} and {indices.shape[1]}")
    if not 0 < d_v <= kv.shape[-1]:
        raise CallError(f"d_v is {d_v}, but kv has {kv.shape[-1]} columns")
    queries, heads = q.shape[0], q.shape[1]
    if topk_length is None:
        topk_length = torch.full((queries,), indices.shape[-1], dtype=torch.int32, device=q.device)
    q, kv, indices = contiguous_rows(q=q, kv=kv, indices=indices)
    own = {"indices": indices[:, 0][None], "topk_length": tensor("topk_length", topk_length)[None]}
    if attn_sink is not None:
        if tensor("attn_sink", attn_sink).shape != (heads,):
            raise CallError(f"attn_sink must have shape ({heads},), got {tuple(attn_sink.shape)}")
        own["sinks"] = attn_sink.clamp(max=_LARGEST_SINK)
    out, lse = attend(
        [Candidate("listed_keys" if attn_sink is None else "listed_keys_sink", own)], q[None], kv[None],
        kv[None, ..., :d_v], spec=SPEC, softmax_scale=sm_scale, return_lse=True,
    )  # fmt: skip
    if attn_sink is not None:  # take the sink out of the sum
        without_sink = -torch.expm1((own["sinks"][:, None] - lse).clamp(max=0.0))
        lse = torch.where(lse == -math.inf, lse, lse + torch.log(without_sink))
    return out[0], None, lse[0].T
