"""flash-attn 2's functions as a kernel of the Hugging Face Hub exports them: with sinks, ``s_aux`` in transformers.

transformers passes an argument to such a kernel if its signature has it. Sinks that a signature lacks are left out of
the softmax without a word, so that the functions of version 2 alone would give wrong results for models with sinks.
``attngen.packaging.hub`` puts this module into the runtime that the kernel carries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attngen.errors import CallError
from attngen.integrations.flash_attn import v2
from attngen.integrations.flash_attn.arguments import SPEC, Window, candidates_for, packing_of, sequences_of
from attngen.integrations.flash_attn.cache import CachedCall, attend_cached
from attngen.integrations.shared.arguments import contiguous_rows, refused, tensor
from attngen.integrations.shared.choice import VariantCandidate, attend, with_dropout
from attngen.integrations.shared.gradients import join_sinks

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]


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
    *,
    s_aux: Tensor | None = None,
) -> Any:
    """As ``flash_attn_func`` of flash-attn 2; ``s_aux`` (h,) is a logit of each head that joins the softmax.

    With ``s_aux`` there is no log-sum-exp: ``return_attn_probs`` is refused.
    """
    if s_aux is None:
        return v2.flash_attn_func(
            q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
            return_attn_probs,
        )  # fmt: skip
    _refuse_lse(return_attn_probs)
    q, k, v = contiguous_rows(q=q, k=k, v=v)
    plain = with_dropout(candidates_for(q, causal, window_size, softcap, alibi_slopes, q.shape[0]), dropout_p)
    return attend(
        _with_sinks(plain, s_aux, q), q, k, v, spec=SPEC, softmax_scale=softmax_scale, deterministic=deterministic
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
    *,
    s_aux: Tensor | None = None,
) -> Any:
    """As ``flash_attn_varlen_func`` of flash-attn 2; ``s_aux`` (h,) is a logit of each head that joins the softmax.

    With ``s_aux``, ``return_attn_probs`` and ``block_table`` are refused.
    """
    if s_aux is None:
        return v2.flash_attn_varlen_func(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
            window_size, softcap, alibi_slopes, deterministic, return_attn_probs, block_table,
        )  # fmt: skip
    _refuse_lse(return_attn_probs)
    if block_table is not None:
        raise refused("block_table", "with s_aux, keys in pages are read by flash_attn_with_kvcache")
    q, k, v = contiguous_rows(q=q, k=k, v=v)
    batch = sequences_of(cu_seqlens_q)
    plain = with_dropout(candidates_for(q, causal, window_size, softcap, alibi_slopes, batch), dropout_p)
    packing = packing_of(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return attend(
        _with_sinks(plain, s_aux, q), q, k, v, spec=SPEC, packing=packing, softmax_scale=softmax_scale,
        deterministic=deterministic,
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
    *,
    s_aux: Tensor | None = None,
) -> Any:
    """As ``flash_attn_with_kvcache`` of flash-attn 2; ``s_aux`` (h,) is a logit of each head that joins the softmax.

    With ``s_aux`` the mask is causal or a causal window, without softcap and ALiBi.
    """
    return attend_cached(CachedCall(
        q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v, rotary_cos=rotary_cos, rotary_sin=rotary_sin,
        rotary_interleaved=rotary_interleaved, lengths=cache_seqlens, batch_index=cache_batch_idx,
        leftpad=cache_leftpad, page_table=block_table, softmax_scale=softmax_scale, causal=causal,
        window_size=window_size, softcap=softcap, alibi_slopes=alibi_slopes, num_splits=num_splits,
        return_lse=return_softmax_lse, sinks=s_aux,
    ))  # fmt: skip


def _refuse_lse(return_attn_probs: bool) -> None:
    if return_attn_probs:
        raise refused("return_attn_probs", "with s_aux, the log-sum-exp of plain kernels lacks the sinks")


def _with_sinks(candidates: Sequence[VariantCandidate], s_aux: Tensor, q: Tensor) -> list[VariantCandidate]:
    """The variants with sinks, where there are any, and then the plain ones, whose results are joined with the sinks.

    Both have gradients, also of the sinks.
    """
    heads = q.shape[-2]
    if tensor("s_aux", s_aux).shape != (heads,) or not s_aux.is_floating_point() or s_aux.device != q.device:
        got = f"{s_aux.dtype} of shape {tuple(s_aux.shape)} on {s_aux.device}"
        raise CallError(f"s_aux must be floating-point of shape ({heads},) on {q.device}, got {got}")
    sinks = s_aux.to(torch.float64 if q.dtype == torch.float64 else torch.float32)
    fused = [
        VariantCandidate(f"{each.variant}_sink", {**each.arguments, "sinks": sinks})
        for each in candidates
        if each.variant in ("causal", "sliding_window")
    ]
    return fused + [replace(each, finish=partial(join_sinks, sinks=sinks[:, None])) for each in candidates]
