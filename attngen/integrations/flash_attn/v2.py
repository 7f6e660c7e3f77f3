"""flash-attn's functions, argument for argument, on attngen's kernels: replace one import.

The forms are those of flash-attn 2.8 (https://github.com/Dao-AILab/flash-attention, ``flash_attn_interface.py``).
q is (batch, seqlen_q, heads, head_dim), k and v are (batch, seqlen_k, kv_heads, head_dim); packed calls take
(total, heads, head_dim) and ``cu_seqlens``. ``causal`` and ``window_size`` are aligned at the last query and the last
key, as in flash-attn from 2.1 on. What no kernel computes is refused with NoKernelError, which says why.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attngen.integrations.flash_attn.arguments import SPEC, Window, candidates_for, packing_of, sequences_of, unpack
from attngen.integrations.flash_attn.cache import CachedCall, attend_cached
from attngen.integrations.flash_attn.passes import _flash_attn_backward as _flash_attn_backward
from attngen.integrations.flash_attn.passes import _flash_attn_forward as _flash_attn_forward
from attngen.integrations.flash_attn.passes import _flash_attn_varlen_backward as _flash_attn_varlen_backward
from attngen.integrations.flash_attn.passes import _flash_attn_varlen_forward as _flash_attn_varlen_forward
from attngen.integrations.shared.arguments import contiguous_rows, refused, tensor, without_gradient
from attngen.integrations.shared.choice import attend, with_dropout

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Return attention of q (b, sq, h, d) over k and v (b, sk, hk, d); h is a multiple of hk.

    ``window_size`` is (left, right) in keys, −1 or None for no limit; ``softcap`` 0 means none; ``alibi_slopes`` is
    (h,) or (b, h) in float32. With ``return_attn_probs`` the result is (out, lse, empty): lse (b, h, sq) is float32,
    natural, −inf for a query that sees no key, of the softmax before dropout; probabilities are never stored.
    With ``deterministic`` gradients have the same bits on every run. ``dropout_p`` is the rate at which
    probabilities are dropped, from 0 to below 1, by numbers from torch's generator of the device; at 0 no kernel with
    dropout runs. Raises NoKernelError for what no built kernel computes, and CallError for arguments that disagree.
    """
    q, k, v = contiguous_rows(q=q, k=k, v=v)
    candidates = with_dropout(candidates_for(q, causal, window_size, softcap, alibi_slopes, q.shape[0]), dropout_p)
    result = attend(
        candidates, q, k, v, spec=SPEC, softmax_scale=softmax_scale, return_lse=return_attn_probs,
        deterministic=deterministic,
    )  # fmt: skip
    return _results(q, result, return_attn_probs)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """As ``flash_attn_func``, with k and v in one tensor (b, sk, 2, hk, d), which is not copied."""
    k, v = unpack("kv", kv, 5, 2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """As ``flash_attn_func``, with q, k and v in one tensor (b, s, 3, h, d), which is not copied."""
    q, k, v = unpack("qkv", qkv, 5, 3)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """As ``flash_attn_func``, for sequences packed one after the other: q (total_q, h, d), k and v (total_k, hk, d).

    ``cu_seqlens_q`` and ``cu_seqlens_k`` are int32, (batch + 1,). ``max_seqlen_q`` and ``max_seqlen_k`` may be tensors
    of one number, though reading them waits for the GPU. The log-sum-exp is (h, total_q).

    With ``block_table`` (batch, max_pages) int32, k and v are the pages of a cache, (pages, page_size, hk, d), and
    ``cu_seqlens_k`` says how many keys each sequence has. A backward pass through such a call raises CallError.
    """
    if block_table is not None:
        if dropout_p:
            raise refused("dropout_p", "keys in pages are read without dropout")
        result = attend_cached(CachedCall(
            q=q, k_cache=k, v_cache=v, page_table=block_table, lengths=tensor("cu_seqlens_k", cu_seqlens_k).diff(),
            cu_seqlens_q=cu_seqlens_q, max_seqlen_q=int(max_seqlen_q), softmax_scale=softmax_scale, causal=causal,
            window_size=window_size, softcap=softcap, alibi_slopes=alibi_slopes, return_lse=return_attn_probs,
        ))  # fmt: skip
        out, *lse = result if return_attn_probs else (result,)
        out = without_gradient(
            out, q, k, v, reason="keys in pages have no gradient; leave block_table out for training"
        )
        return _results(q, (out, *lse) if return_attn_probs else out, return_attn_probs)
    q, k, v = contiguous_rows(q=q, k=k, v=v)
    packing = packing_of(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    batch = sequences_of(cu_seqlens_q)
    candidates = with_dropout(candidates_for(q, causal, window_size, softcap, alibi_slopes, batch), dropout_p)
    result = attend(
        candidates, q, k, v, spec=SPEC, packing=packing, softmax_scale=softmax_scale, return_lse=return_attn_probs,
        deterministic=deterministic,
    )  # fmt: skip
    return _results(q, result, return_attn_probs)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """As ``flash_attn_varlen_func``, with k and v in one tensor (total_k, 2, hk, d)."""
    k, v = unpack("kv", kv, 4, 2)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """As ``flash_attn_varlen_func``, with q, k and v in one tensor (total, 3, h, d)."""
    q, k, v = unpack("qkv", qkv, 4, 3)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Return attention of q (b, sq, h, d) over a cache (b, capacity, hk, d) that holds ``cache_seqlens`` keys.

    New k and v (b, new, hk, d) are first written into the cache in place, after the ``cache_seqlens`` (an int, or int32
    (b,)) keys that it holds. ``cache_batch_idx`` (b,) says which entry of the cache a sequence has; with
    ``block_table`` (b, max_pages) int32 the cache is (pages, page_size, hk, d), of any page size. No query sees the
    first ``cache_leftpad`` (b,) keys of its sequence.

    ``rotary_cos`` and ``rotary_sin`` (positions, rotary_dim / 2) rotate new keys by their positions, and queries by
    the same with ``causal`` or a window, else all by the position of the first new key. ``num_splits=1``
    selects a kernel that does not split the keys; other numbers leave the choice to attngen. With
    ``return_softmax_lse`` the result is (out, lse). As in flash-attn it has no gradient.
    """
    return attend_cached(CachedCall(
        q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v, rotary_cos=rotary_cos, rotary_sin=rotary_sin,
        rotary_interleaved=rotary_interleaved, lengths=cache_seqlens, batch_index=cache_batch_idx,
        leftpad=cache_leftpad, page_table=block_table, softmax_scale=softmax_scale, causal=causal,
        window_size=window_size, softcap=softcap, alibi_slopes=alibi_slopes, num_splits=num_splits,
        return_lse=return_softmax_lse,
    ))  # fmt: skip


def _results(q: Tensor, result: Any, with_lse: bool) -> Any:
    """out, or (out, lse, probabilities): the last is empty, as flash-attn's is without dropout."""
    return (*result, q.new_empty(0)) if with_lse else result
