"""The function through which vLLM calls its own build of flash-attn, argument for argument, on attngen's kernels.

Its form is that of ``flash_attn_varlen_func`` in https://github.com/vllm-project/flash-attention: packed queries over
keys in the pages of a cache, or over packed keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attngen.errors import CallError
from attngen.integrations.choice import attend
from attngen.integrations.flash_arguments import SPEC, Window, candidates_for, refused, steppable, tensor
from attngen.integrations.flash_attn_3 import get_scheduler_metadata as get_scheduler_metadata
from attngen.integrations.flash_cache import QUANTIZED, CachedCall, attend_cached, scales_or_ones

__all__ = ["flash_attn_varlen_func", "get_scheduler_metadata"]


@torch.no_grad()
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    max_seqlen_q: int,
    cu_seqlens_q: Tensor,
    max_seqlen_k: int,
    cu_seqlens_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    q_v: Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    return_softmax_lse: bool = False,
    out: Tensor | None = None,
    scheduler_metadata: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    num_splits: int = 0,
    fa_version: int = 2,
    s_aux: Tensor | None = None,
    cp_world_size: int = 1,
    cp_rank: int = 0,
    cp_tot_seqused_k: Tensor | None = None,
) -> Any:
    """Return attention of packed q (total_q, h, d), or (out, lse) with ``return_softmax_lse``; lse is (h, total_q).

    With ``block_table`` (b, max_pages) int32, k and v are the pages of a cache, (pages, page_size, hk, d), and
    ``seqused_k`` (b,) int32 says how many keys each sequence has, those of its queries among them. Without it they are
    (total_k, hk, d), with ``cu_seqlens_k``. ``s_aux`` (h,) are sinks, logits that join each softmax. ``out`` takes the
    result. ``num_splits=1`` selects a kernel that does not split the keys. There is no
    gradient. Raises NoKernelError for ``q_v``, dropout and context parallelism, and for what no built kernel computes;
    CallError for arguments that disagree.

    k and v may be float8_e4m3fn, beside q in the same dtype or in bfloat16 or float16, with ``q_descale``,
    ``k_descale`` and ``v_descale``, float32 of shape (), (b, hk) or, of pages, (pages, hk). One that is left out is 1,
    and one of a tensor that is not quantized is not looked at: vLLM gives all of them always.
    """
    del deterministic, scheduler_metadata, fa_version
    if q_v is not None:
        raise refused("q_v", "no kernel has a second q")
    descales = _of_quantized(q, k, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    if dropout_p:
        raise refused("dropout_p", "dropout is for training, and this function is for serving")
    if return_attn_probs:
        raise refused("return_attn_probs", "no kernel stores probabilities")
    if cp_world_size != 1 or cp_rank or cp_tot_seqused_k is not None:
        raise refused("cp_world_size", "context parallelism is not supported")
    window = (-1, -1) if window_size is None else window_size
    if block_table is not None:
        if seqused_k is None:
            raise CallError("block_table needs seqused_k, the keys of each sequence")
        return attend_cached(CachedCall(
            q=q, k_cache=k, v_cache=v, page_table=block_table, lengths=seqused_k, cu_seqlens_q=cu_seqlens_q,
            max_seqlen_q=max_seqlen_q, softmax_scale=softmax_scale, causal=causal, window_size=window, softcap=softcap,
            alibi_slopes=alibi_slopes, sinks=s_aux, num_splits=num_splits, return_lse=return_softmax_lse, out=out,
            q_descale=descales["q_descale"], k_descale=descales["k_descale"], v_descale=descales["v_descale"],
        ))  # fmt: skip
    if s_aux is not None:
        raise refused("s_aux", "sinks are supported only with keys in pages; block_table is missing")
    if cu_seqlens_k is None:
        raise CallError("packed keys need cu_seqlens_k, where each sequence begins")
    q, k, v = steppable("q", q), steppable("k", k), steppable("v", v)
    batch = tensor("cu_seqlens_q", cu_seqlens_q).shape[0] - 1
    found = attend(
        candidates_for(q, causal, window, softcap, alibi_slopes, batch), q, k, v, spec=SPEC,
        packing=(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), softmax_scale=softmax_scale,
        seqused_k=seqused_k, return_lse=return_softmax_lse, descales=scales_or_ones(q, k, **descales),
    )  # fmt: skip
    if out is None:
        return found
    result, *lse = found if return_softmax_lse else (found,)
    return (out.copy_(result), *lse) if lse else out.copy_(result)


def _of_quantized(q: Tensor, kv: Tensor, **given: Tensor | None) -> dict[str, Tensor | None]:
    """Return scales, None for those of what is not quantized."""
    of = {"q_descale": q, "k_descale": kv, "v_descale": kv}
    return {name: scale if of[name].dtype in QUANTIZED else None for name, scale in given.items()}
