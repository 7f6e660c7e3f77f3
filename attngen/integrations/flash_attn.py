"""flash-attn's functions, argument for argument, on attngen's kernels: replace one import.

The forms are those of flash-attn 2.8 (https://github.com/Dao-AILab/flash-attention, ``flash_attn_interface.py``).
q is (batch, seqlen_q, heads, head_dim), k and v are (batch, seqlen_k, kv_heads, head_dim); packed calls take
(total, heads, head_dim) and ``cu_seqlens``. ``causal`` and ``window_size`` are aligned at the last query and the last
key, as in flash-attn from 2.1 on. What no kernel computes is refused with NoKernelError, which says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attngen.errors import CallError
from attngen.integrations.choice import Packing, attend, with_dropout
from attngen.integrations.flash_arguments import SPEC, candidates_for, refused, steppable, tensor, unpack
from attngen.integrations.flash_passes import (  # which ring attention calls
    _flash_attn_backward as _flash_attn_backward,
)
from attngen.integrations.flash_passes import (
    _flash_attn_forward as _flash_attn_forward,
)
from attngen.integrations.flash_passes import (
    _flash_attn_varlen_backward as _flash_attn_varlen_backward,
)
from attngen.integrations.flash_passes import (
    _flash_attn_varlen_forward as _flash_attn_varlen_forward,
)
from attngen.runtime.dispatch import is_traced

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
    window_size: Sequence[int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Return attention of q (b, sq, h, d) over k and v (b, sk, hk, d); h is a multiple of hk.

    ``window_size`` is (left, right) in keys, −1 or None for no limit; ``softcap`` 0 means none; ``alibi_slopes`` is
    (h,) or (b, h) in float32. With ``return_attn_probs`` the result is (out, lse, empty): lse (b, h, sq) is float32,
    natural, −inf for a query that sees no key, and that of the softmax before dropout; probabilities are never formed.
    With ``deterministic`` gradients have the same bits on every run. ``dropout_p`` is the rate at which
    probabilities are dropped, from 0 to below 1, by numbers from torch's generator of the device; at 0 no kernel with
    dropout runs. Raises NoKernelError for what no built kernel computes, and CallError for arguments that disagree.
    """
    q, k, v = steppable("q", q), steppable("k", k), steppable("v", v)
    candidates = with_dropout(candidates_for(q, causal, window_size, softcap, alibi_slopes, q.shape[0]), dropout_p)
    found = attend(
        candidates, q, k, v, spec=SPEC, softmax_scale=softmax_scale, return_lse=return_attn_probs,
        deterministic=deterministic,
    )  # fmt: skip
    return _results(q, found, return_attn_probs)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """As ``flash_attn_func``, with k and v in one tensor (b, sk, 2, hk, d), of which nothing is copied."""
    k, v = unpack("kv", kv, 5, 2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """As ``flash_attn_func``, with q, k and v in one tensor (b, s, 3, h, d), of which nothing is copied."""
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
    window_size: Sequence[int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """As ``flash_attn_func``, for sequences packed one after the other: q (total_q, h, d), k and v (total_k, hk, d).

    ``cu_seqlens_q`` and ``cu_seqlens_k`` are int32, (batch + 1,). ``max_seqlen_q`` and ``max_seqlen_k`` may be tensors
    of one number, of which reading waits for the GPU. The log-sum-exp is (h, total_q). A ``block_table`` is refused.
    """
    if block_table is not None:
        raise refused("block_table", "no kernel reads keys through a table of pages; gather them first")
    q, k, v = steppable("q", q), steppable("k", k), steppable("v", v)
    longest_q, longest_k = (int(n) if isinstance(n, Tensor) else n for n in (max_seqlen_q, max_seqlen_k))
    packing: Packing = (cu_seqlens_q, cu_seqlens_k, longest_q, longest_k)
    batch = tensor("cu_seqlens_q", cu_seqlens_q).shape[0] - 1
    candidates = with_dropout(candidates_for(q, causal, window_size, softcap, alibi_slopes, batch), dropout_p)
    found = attend(
        candidates, q, k, v, spec=SPEC, packing=packing, softmax_scale=softmax_scale, return_lse=return_attn_probs,
        deterministic=deterministic,
    )  # fmt: skip
    return _results(q, found, return_attn_probs)


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
    window_size: Sequence[int | None] = (-1, -1),
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
    window_size: Sequence[int | None] = (-1, -1),
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


@torch.no_grad()
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
    window_size: Sequence[int | None] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Return attention of q (b, sq, h, d) over a cache (b, capacity, hk, d) of which ``cache_seqlens`` keys count.

    New k and v (b, new, hk, d) are first written into the cache in place, after the ``cache_seqlens`` (an int, or
    int32 (b,)) that it holds. ``num_splits`` changes nothing. Rotary embeddings, pages (``block_table``),
    ``cache_batch_idx`` and ``cache_leftpad`` are refused. With ``return_softmax_lse`` the result is (out, lse). As in
    flash-attn it has no gradient.
    """
    del rotary_interleaved, num_splits
    if rotary_cos is not None or rotary_sin is not None:
        raise refused("rotary_cos", "no kernel rotates q and k; rotate them before the call")
    if block_table is not None:
        raise refused("block_table", "no kernel reads keys through a table of pages")
    if cache_batch_idx is not None:
        raise refused("cache_batch_idx", "no kernel reads the cache through an index; pass a cache in q's order")
    if cache_leftpad is not None:
        raise refused("cache_leftpad", "no variant of this integration skips the first keys of a cache")
    if (k is None) != (v is None):
        raise CallError("k and v are given together or not at all")
    if k is not None and cache_seqlens is None:
        raise CallError("new keys need cache_seqlens, which says where they go")
    for name, given in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        tensor(name, given)
    q = steppable("q", q)
    new = 0 if k is None or v is None else _new_keys(k_cache, v_cache, k, v)
    used = None if cache_seqlens is None else _lengths(cache_seqlens, q, new, k_cache.shape[1])
    if k is not None and v is not None and used is not None:
        used = _append(k_cache, v_cache, k, v, used)
    candidates = candidates_for(q, causal, window_size, softcap, alibi_slopes, q.shape[0])
    return attend(
        candidates, q, k_cache, v_cache, spec=SPEC, softmax_scale=softmax_scale, seqused_k=used,
        return_lse=return_softmax_lse,
    )  # fmt: skip


def _new_keys(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor) -> int:
    """Return how many keys a call adds to its cache: k and v are (b, new, hk, d), as the cache is but for its room."""
    for name, given, cache in (("k", k, k_cache), ("v", v, v_cache)):
        batch, _, *rest = cache.shape
        wanted = (batch, *tensor("k", k).shape[1:2], *rest)
        if tuple(tensor(name, given).shape) != wanted or given.dtype != cache.dtype:
            raise CallError(
                f"{name} must be {cache.dtype} of shape {wanted}, as {name}_cache and the number of new keys say, got "
                f"{given.dtype} of shape {tuple(given.shape)}"
            )
    return k.shape[1]


def _lengths(cache_seqlens: int | Tensor, q: Tensor, new: int, room: int) -> Tensor:
    """Return the used lengths (b,) of a cache. What a tensor on a GPU holds is not read."""
    batch = q.shape[0]
    if isinstance(cache_seqlens, int):
        if not 0 <= cache_seqlens <= room - new:
            raise CallError(f"the cache has room for {room} keys; {cache_seqlens} and {new} new ones do not fit")
        return torch.full((batch,), cache_seqlens, dtype=torch.int32, device=q.device)
    if not isinstance(cache_seqlens, Tensor):
        raise CallError(f"cache_seqlens must be an integer or a torch.Tensor, got {type(cache_seqlens).__name__}")
    if cache_seqlens.shape != (batch,) or cache_seqlens.is_floating_point():
        raise CallError(
            f"cache_seqlens must be a number, or int32 of shape ({batch},), got {cache_seqlens.dtype} of shape "
            f"{tuple(cache_seqlens.shape)}"
        )
    if cache_seqlens.device != q.device:
        raise CallError(f"cache_seqlens is on {cache_seqlens.device}, but q is on {q.device}")
    if cache_seqlens.is_cpu and not is_traced(cache_seqlens):
        for place, used in enumerate(cache_seqlens.tolist()):
            if not 0 <= used <= room - new:
                raise CallError(
                    f"cache_seqlens[{place}] is {used}; the cache has room for {room} keys, {new} of them new"
                )
    return cache_seqlens.to(torch.int32).contiguous()


def _append(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, used: Tensor) -> Tensor:
    """Write new keys and values after the used ones, and return how many are used then."""
    batch, new = k.shape[:2]
    rows = torch.arange(batch, device=k.device)[:, None]
    places = used[:, None].long() + torch.arange(new, device=k.device)
    k_cache[rows, places] = k
    v_cache[rows, places] = v
    return used + new


def _results(q: Tensor, found: Any, with_lse: bool) -> Any:
    """Return out, or (out, lse, probabilities): the last is empty, as that of flash-attn is without dropout."""
    return (*found, q.new_empty(0)) if with_lse else found
