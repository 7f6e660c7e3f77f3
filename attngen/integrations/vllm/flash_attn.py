"""The function through which vLLM calls its own build of flash-attn, argument for argument, on attngen's kernels.

Its form is that of ``vllm.vllm_flash_attn.flash_attn_varlen_func`` in vLLM 0.33: packed queries over keys in the pages
of a cache, or over packed keys. ``fa_version`` 2, 3 and 4 run the same kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from attngen.arch import ARCHES, arch_of
from attngen.errors import CallError
from attngen.integrations.flash_attn.arguments import (
    CUTE_MASKS,
    GATHERED_KEYS,
    OWN_TILES,
    SPEC,
    Window,
    candidates_for,
    packing_of,
    sequences_of,
)
from attngen.integrations.flash_attn.cache import QUANTIZED, CachedCall, attend_cached, scales_or_ones
from attngen.integrations.shared.arguments import contiguous_rows, refuse, refused
from attngen.integrations.shared.choice import attend

__all__ = [
    "fa_version_unsupported_reason",
    "flash_attn_varlen_func",
    "get_scheduler_metadata",
    "is_fa_version_supported",
]

_VERSIONS = (2, 3, 4)


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
    output_scale: Tensor | None = None,
    fa_version: int = 2,
    s_aux: Tensor | None = None,
    cp_world_size: int = 1,
    cp_rank: int = 0,
    cp_tot_seqused_k: Tensor | None = None,
    mask_mod: Callable[..., Any] | None = None,
    block_sparse_tensors: Any = None,
    aux_tensors: Sequence[Tensor] | None = None,
    aux_tensor_leading_dims: Sequence[int] | None = None,
    dynamic_causal: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    gather_kv_valid_length: Tensor | None = None,
) -> Any:
    """Return attention of packed q (total_q, h, d), or (out, lse) with ``return_softmax_lse``; lse is (h, total_q).

    With ``block_table`` (b, max_pages) int32, k and v are the pages of a cache, (pages, page_size, hk, d), and
    ``seqused_k`` (b,) int32 says how many keys each sequence has, those of its queries among them. Without it they are
    (total_k, hk, d), with ``cu_seqlens_k``. ``s_aux`` (h,) are sinks, logits that join each softmax. ``out`` takes the
    result. ``num_splits=1`` selects a kernel that does not split the keys. There is no
    gradient. Raises NoKernelError for ``q_v``, dropout, context parallelism, and ``output_scale`` and the arguments
    after ``cp_tot_seqused_k`` unless they are None, and for what no built kernel computes; CallError for arguments that
    disagree. ``scheduler_metadata`` is not looked at.

    k and v may be float8_e4m3fn, beside q in the same dtype or in bfloat16 or float16, with ``q_descale``,
    ``k_descale`` and ``v_descale``, float32 of shape (), (b, hk) or, of pages, (pages, hk). One that is left out is 1,
    and one of a tensor that is not quantized is not looked at: vLLM gives all of them always.
    """
    del deterministic, scheduler_metadata
    _check_version(fa_version)
    refuse(
        _REASONS, q_v=q_v, output_scale=output_scale, mask_mod=mask_mod, block_sparse_tensors=block_sparse_tensors,
        aux_tensors=aux_tensors, aux_tensor_leading_dims=aux_tensor_leading_dims, dynamic_causal=dynamic_causal,
        gather_kv_indices=gather_kv_indices, gather_kv_valid_length=gather_kv_valid_length,
    )  # fmt: skip
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
        if cu_seqlens_k is not None:
            raise CallError(
                "cu_seqlens_k is for packed keys; with block_table, seqused_k counts the keys of a sequence"
            )
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
    q, k, v = contiguous_rows(q=q, k=k, v=v)
    attended = attend(
        candidates_for(q, causal, window, softcap, alibi_slopes, sequences_of(cu_seqlens_q)), q, k, v, spec=SPEC,
        packing=packing_of(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), softmax_scale=softmax_scale,
        seqused_k=seqused_k, return_lse=return_softmax_lse, descales=scales_or_ones(q, k, **descales),
    )  # fmt: skip
    if out is None:
        return attended
    result, *lse = attended if return_softmax_lse else (attended,)
    return (out.copy_(result), *lse) if lse else out.copy_(result)


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: Window = (-1, -1),
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> None:
    """Return None: kernels distribute work on the device, by the lengths at the time they run."""


def is_fa_version_supported(fa_version: int) -> bool:
    """Whether kernels can be built for the current GPU; the same for 2, 3 and 4. CallError for another version."""
    return fa_version_unsupported_reason(fa_version) is None


def fa_version_unsupported_reason(fa_version: int) -> str | None:
    """The reason why no kernel runs here, or None; the same for 2, 3 and 4. Raises CallError for another version."""
    _check_version(fa_version)
    if not torch.cuda.is_available():
        return "no GPU is found"
    major, minor = torch.cuda.get_device_capability()
    if arch_of(10 * major + minor) is None:
        return f"no kernel can be built for sm{major}{minor}, only for {', '.join(ARCHES)}"
    return None


def _check_version(fa_version: int) -> None:
    if fa_version not in _VERSIONS:
        raise CallError(
            f"fa_version must be {', '.join(map(str, _VERSIONS[:-1]))} or {_VERSIONS[-1]}, got {fa_version!r}"
        )


_REASONS = {
    "q_v": "no kernel has a second q",
    "output_scale": "the output is bfloat16 or float16",
    "mask_mod": CUTE_MASKS,
    "block_sparse_tensors": OWN_TILES,
    "aux_tensors": CUTE_MASKS,
    "aux_tensor_leading_dims": CUTE_MASKS,
    "dynamic_causal": "a call is causal for all of its sequences, or for none; split the batch",
    "gather_kv_indices": GATHERED_KEYS,
    "gather_kv_valid_length": GATHERED_KEYS,
}


def _of_quantized(q: Tensor, kv: Tensor, **given: Tensor | None) -> dict[str, Tensor | None]:
    """Scales, None for tensors that are not quantized."""
    of = {"q_descale": q, "k_descale": kv, "v_descale": kv}
    return {name: scale if of[name].dtype in QUANTIZED else None for name, scale in given.items()}
