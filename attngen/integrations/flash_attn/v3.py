"""flash-attn 3's functions, argument for argument, on attngen's kernels: replace one import.

The forms are those of ``flash_attn_interface`` in https://github.com/Dao-AILab/flash-attention (hopper). They have no
dropout and no ALiBi, but version 3's ``attention_chunk`` and ``seqused_q``. Arguments that tune its kernels
(``num_splits``, ``pack_gqa``, ``sm_margin``, ``scheduler_metadata``) change no result there, and nothing here. q, k and
v may be float8_e4m3fn; then the output is bfloat16. So may a cache beside a wider q. ``qv`` is refused with
NoKernelError, which says why.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from attngen.dtypes import DESCALES
from attngen.errors import CallError
from attngen.integrations.flash_attn.arguments import SPEC, Window, candidates_for
from attngen.integrations.flash_attn.cache import CachedCall, attend_cached
from attngen.integrations.flash_attn.passes import ROWS
from attngen.integrations.flash_attn.sequences import Packed, Sequences, attend_sequences
from attngen.integrations.shared.arguments import contiguous_rows, refuse, tensor
from attngen.integrations.shared.gradients import gradients_of, row_sums, write
from attngen.runtime.operations.merge.call import merge

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Return attention of q (b, sq, h, d) over k and v (b, sk, hk, d); h is a multiple of hk.

    ``window_size`` is (left, right) in keys, −1 or None for no limit. With ``attention_chunk`` a query sees only the
    keys of its own chunk of that many, counted from the first key; 0 is none. ``softcap`` 0 means none. With
    ``return_attn_probs`` the result is (out, lse): lse (b, h, sq) is float32, natural, −inf for a query that sees no
    key. With ``deterministic`` gradients have the same bits on every run. Raises NoKernelError for what no built kernel
    computes, and CallError for arguments that disagree.
    """
    del num_splits, pack_gqa, sm_margin  # they tune, and change no result
    refuse(_REASONS, qv=qv)
    candidates = candidates_for(tensor("q", q), causal, window_size, softcap, None, 0, attention_chunk)
    return attend_sequences(
        candidates, q, k, v, Sequences(), softmax_scale=softmax_scale, deterministic=deterministic,
        return_lse=return_attn_probs, descales=(q_descale, k_descale, v_descale),
    )  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """As ``flash_attn_func``, with q, k and v in one tensor, which is not copied.

    It is (b, s, 3, h, d), or (b, s, h + 2·hk, d) with ``num_heads_q`` heads of q, those of k and those of v.
    """
    if tensor("qkv", qkv).dim() == 5 and qkv.shape[2] == 3:
        q, k, v = qkv.unbind(2)
    elif (
        qkv.dim() == 4
        and num_heads_q is not None
        and 0 < num_heads_q < qkv.shape[2]
        and not ((qkv.shape[2] - num_heads_q) % 2)
    ):
        kv_heads = (qkv.shape[2] - num_heads_q) // 2
        q, k, v = qkv.split([num_heads_q, kv_heads, kv_heads], dim=2)
    else:
        raise CallError(
            "qkv must have shape (batch, seqlen, 3, heads, head_dim), or (batch, seqlen, heads + 2 * kv_heads, "
            f"head_dim) with num_heads_q, got {tuple(qkv.shape)} and num_heads_q={num_heads_q}"
        )
    return flash_attn_func(
        q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size, attention_chunk, softcap,
        deterministic=deterministic, sm_margin=sm_margin, return_attn_probs=return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """As ``flash_attn_func``, for sequences packed one after the other: q (total_q, h, d), k and v (total_k, hk, d).

    ``cu_seqlens_q`` and ``cu_seqlens_k`` are int32, (batch + 1,); where one is None, its tensors have a batch axis
    instead. ``seqused_q`` and ``seqused_k`` (batch,) int32 say how many rows of each sequence count: masks are aligned
    at the last of these, and queries after them give 0, a log-sum-exp of −inf, and take no gradient. The log-sum-exp
    is (h, total_q), or (b, h, sq).
    """
    del num_splits, pack_gqa, sm_margin
    refuse(_REASONS, qv=qv)
    candidates = candidates_for(tensor("q", q), causal, window_size, softcap, None, 0, attention_chunk)
    sequences = Sequences(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k)
    return attend_sequences(
        candidates, q, k, v, sequences, softmax_scale=softmax_scale, deterministic=deterministic,
        return_lse=return_attn_probs, descales=(q_descale, k_descale, v_descale),
    )  # fmt: skip


def flash_attn_combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp over all keys, from those over parts of the keys (``attngen.merge``).

    ``out_partial`` (splits, b, s, h, d) and ``lse_partial`` (splits, b, s, h) are float32. The result is ``out``, if
    given, or (b, s, h, d) in ``out_dtype``, and the log-sum-exp (b, s, h) in float32. A part whose log-sum-exp is −inf
    adds nothing.
    """
    outs, lses = tensor("out_partial", out_partial), tensor("lse_partial", lse_partial)
    for name, given, rank in (("out_partial", outs, 5), ("lse_partial", lses, 4)):
        if given.dim() != rank or given.dtype != torch.float32:
            form = "(splits, batch, seqlen, heads, head_dim)" if rank == 5 else "(splits, batch, seqlen, heads)"
            raise CallError(f"{name} must be float32 of shape {form}, got {given.dtype} of shape {tuple(given.shape)}")
    if out is not None and out_dtype not in (None, tensor("out", out).dtype):
        raise CallError(f"out has dtype {out.dtype}, but out_dtype is {out_dtype}")
    merged, lse = merge(outs, lses.transpose(-1, -2))
    if out is None:
        return merged.to(outs.dtype if out_dtype is None else out_dtype), lse.transpose(-1, -2)
    if out.shape != merged.shape:
        raise CallError(f"out must have shape {tuple(merged.shape)}, got {tuple(out.shape)}")
    return out.copy_(merged), lse.transpose(-1, -2)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """As ``flash_attn_with_kvcache`` of ``attngen.integrations.flash_attn``, with what version 3 adds.

    With ``cu_seqlens_q`` (b + 1,) int32 and ``max_seqlen_q``, q is (total_q, h, d) and the log-sum-exp (h, total_q);
    with ``cu_seqlens_k_new`` new k and v are (total_new, hk, d). ``rotary_seqlens`` (b,) says where rotations begin, if
    not after ``cache_seqlens``.

    The cache may be float8_e4m3fn, beside q in bfloat16, float16 or float8_e4m3fn: ``k_descale`` and ``v_descale``, and
    ``q_descale`` of the latter, are float32 of shape (), (b, hk) or, of a cache with a ``page_table``, (pages, hk); one
    that is left out is 1. New k and v in 16 bits are divided by their scale and rounded. ``rotary_cos`` and
    ``rotary_sin`` may have 8 bits, too.

    ``page_table`` (rows, max_pages) beside ``cache_batch_idx`` (b,): sequence i has row ``cache_batch_idx[i]``. With
    ``cache_leftpad``, ``attention_chunk`` counts chunks from the first key that is not padding. With
    ``return_softmax_lse`` the result is (out, lse, empty, empty): the last two are partial results, of which there are
    none.
    """
    del scheduler_metadata, pack_gqa, sm_margin
    refuse(_REASONS, qv=qv)
    result = attend_cached(CachedCall(
        q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v, rotary_cos=rotary_cos, rotary_sin=rotary_sin,
        rotary_lengths=rotary_seqlens, rotary_interleaved=rotary_interleaved, lengths=cache_seqlens,
        batch_index=cache_batch_idx, leftpad=cache_leftpad, page_table=page_table, cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_new=cu_seqlens_k_new, max_seqlen_q=max_seqlen_q, softmax_scale=softmax_scale, causal=causal,
        window_size=window_size, chunk=attention_chunk, softcap=softcap, num_splits=num_splits,
        q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, return_lse=return_softmax_lse,
    ))  # fmt: skip
    return (*result, *(result[1].new_empty(0) for _ in range(2))) if return_softmax_lse else result


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
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> None:
    """Return None: kernels distribute work on the device, by the lengths at the time they run."""


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    qv: Tensor | None = None,
    out_: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: Tensor | None = None,
    kv_batch_idx: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    seqlens_rotary: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int | None = -1,
    window_size_right: int | None = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return out, its log-sum-exp and two empty tensors, as ``flash_attn_varlen_func`` computes them, without gradient.

    The empty ones are partial results, of which there are none. ``out_``, if given, is written and returned.
    """
    del rotary_interleaved, scheduler_metadata, num_splits, pack_gqa, sm_margin
    refuse(
        _REASONS, k_new=k_new, v_new=v_new, qv=qv, cu_seqlens_k_new=cu_seqlens_k_new, page_table=page_table,
        kv_batch_idx=kv_batch_idx, leftpad_k=leftpad_k, rotary_cos=rotary_cos, rotary_sin=rotary_sin,
        seqlens_rotary=seqlens_rotary, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale,
    )  # fmt: skip
    with torch.no_grad():
        out, lse = flash_attn_varlen_func(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k, softmax_scale,
            causal, window_size=(window_size_left, window_size_right), attention_chunk=attention_chunk,
            softcap=softcap, return_attn_probs=True,
        )  # fmt: skip
        if out_ is not None:
            if tensor("out_", out_).shape != out.shape:
                raise CallError(f"out_ must have shape {tuple(out.shape)}, got {tuple(out_.shape)}")
            out = out_.copy_(out)
    return out, lse, out.new_empty(0), lse.new_empty(0)


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    sequed_q: Tensor | None = None,
    sequed_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int | None = -1,
    window_size_right: int | None = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
) -> Tensor:
    """Write the gradients of q, k and v into dq, dk and dv, and return rowsum(dout ∘ out) in float32.

    That is (b, h, sq rounded up to 128), or (h, total_q + 128 · batch) for packed queries, 0 after its rows. ``out``
    and ``softmax_lse`` may be those of a softmax over more keys than k has. A gradient that is None is not written.
    """
    del sm_margin
    q, k, v, dout, out = contiguous_rows(q=q, k=k, v=v, dout=dout, out=out)
    window = (window_size_left, window_size_right)
    packed = Packed.of(q, k, v, Sequences(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, sequed_q, sequed_k))
    batch = q.shape[0] if packed is None else packed.packing[0].shape[0] - 1
    candidates = candidates_for(q, is_causal, window, softcap, None, batch)
    options: dict[str, Any] = {"spec": SPEC, "softmax_scale": softmax_scale, "deterministic": deterministic}
    with torch.no_grad():
        if packed is None:
            gradients = gradients_of(candidates, q, k, v, out, softmax_lse, dout, seqused_k=sequed_k, **options)
        else:
            flat_q, flat_k, flat_v = packed.tensors
            gradients = gradients_of(
                candidates, flat_q, flat_k, flat_v, packed.rows(out), packed.lse_rows(softmax_lse), packed.rows(dout),
                packing=packed.packing, seqused_k=sequed_k, **options,
            )  # fmt: skip
            gradients = packed.back(gradients[0]).view(q.shape), gradients[1].view(k.shape), gradients[2].view(v.shape)
    write(gradients, (dq, dk, dv))
    behind = -q.shape[1] % ROWS if cu_seqlens_q is None else ROWS * batch
    return pad(row_sums(out, dout), (0, behind))


_OF_CACHES = (
    "k_new", "v_new", "cu_seqlens_k_new", "page_table", "kv_batch_idx", "leftpad_k", "rotary_cos", "rotary_sin",
    "seqlens_rotary",
)  # fmt: skip

_REASONS = {
    "qv": "no kernel adds a second product to the logits",
    **dict.fromkeys(DESCALES, "this pass has no kernels in float8; flash_attn_func and flash_attn_with_kvcache do"),
    **dict.fromkeys(_OF_CACHES, "this is the pass of training; flash_attn_with_kvcache takes caches"),
}
