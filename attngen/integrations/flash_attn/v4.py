"""flash-attn 4's functions, argument for argument, on attngen's kernels: replace one import.

The forms are those of ``flash_attn.cute`` in the package flash-attn-4. A call always returns (out, lse); lse is None
without ``return_lse``. ``num_splits``, ``pack_gqa``, ``min_seqlen_k``, ``scheduler_metadata`` and
``disable_scheduler_metadata`` tune kernels there, and change nothing here. Functions of CuTe (``score_mod``,
``mask_mod``), ``qv`` and gathered keys are refused with NoKernelError, which names them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from attngen.errors import CallError, NoKernelError
from attngen.integrations.flash_attn.arguments import CUTE_MASKS, GATHERED_KEYS, Window, candidates_for, sides_of
from attngen.integrations.flash_attn.blocks import candidate_of
from attngen.integrations.flash_attn.cache import CachedCall, attend_cached
from attngen.integrations.flash_attn.sequences import Sequences, attend_sequences
from attngen.integrations.shared import blocks
from attngen.integrations.shared.arguments import contiguous_rows, refuse, refused, tensor, without_gradient
from attngen.integrations.shared.choice import NO_LIMIT, VariantCandidate, attend
from attngen.integrations.shared.gradients import join_sinks

__all__ = ["flash_attn_func", "flash_attn_varlen_func"]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Callable[..., Any] | None = None,
    score_mod_bwd: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    aux_tensors: Sequence[Tensor] | None = None,
    aux_scalars: tuple[Any, ...] | None = None,
    block_sparse_tensors: Any = None,
    block_sparse_tensors_bwd: Any = None,
    return_lse: bool = False,
    gather_bwd_recompute_p: bool = False,
    gather_bwd_token_chunk: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention of q (b, sq, h, d) over k and v (b, sk, hk, d); h is a multiple of hk.

    ``window_size`` is (left, right) in keys, None for no limit. ``learnable_sink`` (h,) is a logit of each head that
    joins the softmax and has a gradient. ``softcap`` 0 means none. With ``block_sparse_tensors``, a
    BlockSparseTensorsTorch, queries see only the blocks of keys in its lists, without keys behind the query if
    ``causal``; its ``block_size`` is multiples of 64. lse (b, h, sq) is float32, natural, with the sink; −inf for a
    query that sees no key and has no sink. Raises NoKernelError for what no built kernel computes, and
    CallError for arguments that disagree.
    """
    del num_splits, pack_gqa  # they tune, and change no result
    refuse(
        _REASONS, qv=qv, gather_kv_indices=gather_kv_indices, score_mod=score_mod, score_mod_bwd=score_mod_bwd,
        mask_mod=mask_mod, aux_tensors=aux_tensors, aux_scalars=aux_scalars,
        gather_bwd_recompute_p=gather_bwd_recompute_p, gather_bwd_token_chunk=gather_bwd_token_chunk,
    )  # fmt: skip
    if block_sparse_tensors is not None:
        return _attend_blocks(
            q, k, v, block_sparse_tensors, softmax_scale, causal, window_size, learnable_sink, softcap, deterministic,
            return_lse,
        )  # fmt: skip
    if block_sparse_tensors_bwd is not None:
        raise CallError("block_sparse_tensors_bwd lists the blocks of block_sparse_tensors by key; pass both")
    return _attend(
        q, k, v, Sequences(), softmax_scale, causal, window_size, learnable_sink, softcap, deterministic, return_lse
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Callable[..., Any] | None = None,
    score_mod_bwd: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    block_sparse_tensors: Any = None,
    aux_tensors: Sequence[Tensor] | None = None,
    aux_scalars: tuple[Any, ...] | None = None,
    return_lse: bool = False,
    scheduler_metadata: Any = None,
    seqlen_k_per_split: int | None = None,
    disable_scheduler_metadata: bool = False,
    gather_bwd_recompute_p: bool = False,
    gather_bwd_token_chunk: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """As ``flash_attn_func``, for sequences of several lengths.

    With ``cu_seqlens_q`` (b + 1,) int32, q is packed, (total_q, h, d), and lse is (h, total_q); with ``cu_seqlens_k``,
    k and v are. Without a longest length the total counts as one, which costs empty work tiles. ``seqused_q`` and
    ``seqused_k`` (b,) int32 say how many rows of each sequence count: masks are aligned at the last of these.

    With ``page_table`` (b, max_pages) int32, k and v are the pages of a cache, (pages, page_size, hk, d), and
    ``seqused_k`` counts the keys of each sequence. A backward pass through such a call raises CallError. There
    ``num_splits=1`` selects a kernel that does not split the keys.
    """
    del min_seqlen_k, scheduler_metadata, disable_scheduler_metadata, pack_gqa
    refuse(
        _REASONS, qv=qv, gather_kv_indices=gather_kv_indices, score_mod=score_mod, score_mod_bwd=score_mod_bwd,
        mask_mod=mask_mod, aux_tensors=aux_tensors, aux_scalars=aux_scalars,
        block_sparse_tensors=block_sparse_tensors, seqlen_k_per_split=seqlen_k_per_split,
        gather_bwd_recompute_p=gather_bwd_recompute_p, gather_bwd_token_chunk=gather_bwd_token_chunk,
    )  # fmt: skip
    if page_table is None:
        sequences = Sequences(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k)
        return _attend(
            q, k, v, sequences, softmax_scale, causal, window_size, learnable_sink, softcap, deterministic, return_lse
        )
    if cu_seqlens_k is not None:
        raise CallError("cu_seqlens_k is for packed keys; with a page_table, seqused_k counts the keys of a sequence")
    if seqused_q is not None:
        raise refused("seqused_q", "keys in pages are read for all queries; pass cu_seqlens_q of the used ones")
    longest = tensor("q", q).shape[0] if max_seqlen_q is None else int(max_seqlen_q)
    result = attend_cached(CachedCall(
        q=q, k_cache=k, v_cache=v, page_table=page_table, lengths=seqused_k, cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=longest, softmax_scale=softmax_scale, causal=causal, window_size=_window(window_size),
        softcap=softcap, num_splits=num_splits, return_lse=return_lse or learnable_sink is not None,
    ))  # fmt: skip
    out, lse = result if isinstance(result, tuple) else (result, None)
    if learnable_sink is not None:
        sinks = _sink(learnable_sink, q)[:, None]
        out, lse = join_sinks(out, lse, sinks), torch.logaddexp(lse, sinks)
    inputs = [q, k, v] if learnable_sink is None else [q, k, v, learnable_sink]
    out = without_gradient(out, *inputs, reason="keys in pages have no gradient; leave page_table out for training")
    return out, lse if return_lse else None


def _attend(
    q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, softmax_scale: float | None, causal: bool,
    window_size: Window, sink: Tensor | None, softcap: float, deterministic: bool, return_lse: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    candidates = candidates_for(tensor("q", q), causal, _window(window_size), softcap, None, 0)
    options: dict[str, Any] = {"softmax_scale": softmax_scale, "deterministic": deterministic}
    if sink is None:
        result = attend_sequences(candidates, q, k, v, sequences, return_lse=return_lse, **options)
        return result if return_lse else (result, None)
    sink = _sink(sink, q)
    fused = []  # variants with sinks, which need kernels of their own; what trains has those of the plain variants
    if not (torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v, sink))):
        fused = [
            VariantCandidate(f"{each.variant}_sink", {**each.arguments, "sinks": sink})
            for each in candidates
            if each.variant in ("causal", "sliding_window")
        ]
    try:
        out, lse = attend_sequences(fused or candidates, q, k, v, sequences, return_lse=True, **options)
    except NoKernelError:
        if not fused:
            raise
        fused = []
        out, lse = attend_sequences(candidates, q, k, v, sequences, return_lse=True, **options)
    if not fused:
        out, lse = join_sinks(out, lse, sink[:, None]), torch.logaddexp(lse, sink[:, None])
    return out, lse if return_lse else None


def _attend_blocks(
    q: Tensor, k: Tensor, v: Tensor, given: Any, softmax_scale: float | None, causal: bool, window_size: Window,
    sink: Tensor | None, softcap: float, deterministic: bool, return_lse: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Attention to the blocks that are listed. What partial blocks hide is a ``mask_mod``, which is refused."""
    left, right = sides_of(_window(window_size))
    if left != NO_LIMIT or right not in (NO_LIMIT, 0):
        raise refused("window_size", "beside block_sparse_tensors only causal hides further keys; list fewer blocks")
    if softcap:
        raise refused("softcap", "no variant of this integration has both a cap and lists of blocks; pass 0.0")
    q, k, v = contiguous_rows(q=q, k=k, v=v)
    chosen = candidate_of(given, q, k, causal=causal or right == 0)
    out, lse = attend(
        [chosen], q, k, v, spec=blocks.SPEC, softmax_scale=softmax_scale, return_lse=True, deterministic=deterministic
    )
    if sink is not None:
        sinks = _sink(sink, q)[:, None]
        out, lse = join_sinks(out, lse, sinks), torch.logaddexp(lse, sinks)
    return out, lse if return_lse else None


def _sink(sink: Tensor, q: Tensor) -> Tensor:
    """Sinks in the dtype of log-sum-exps."""
    heads = q.shape[-2]
    if tensor("learnable_sink", sink).shape != (heads,) or not sink.is_floating_point() or sink.device != q.device:
        got = f"{sink.dtype} of shape {tuple(sink.shape)} on {sink.device}"
        raise CallError(f"learnable_sink must be floating-point of shape ({heads},) on {q.device}, got {got}")
    return sink.to(torch.float64 if q.dtype == torch.float64 else torch.float32)


def _window(window_size: Window) -> Window:
    """Window in which None and −1 mean no limit; CallError where version 4 means something else by a negative side."""
    sides = window_size.tolist() if isinstance(window_size, Tensor) else window_size
    if isinstance(sides, Sequence) and len(sides) == 2:
        negative = [isinstance(side, int) and side < 0 for side in sides]
        if any(negative) and not all(negative):
            raise CallError(
                f"window_size is {tuple(sides)}: flash-attn 4 moves the window by a negative side, which no kernel "
                "does; write None for no limit"
            )
    return window_size


_REASONS = {
    "qv": "no kernel adds a second product to the logits",
    "gather_kv_indices": GATHERED_KEYS,
    "gather_bwd_recompute_p": GATHERED_KEYS,
    "gather_bwd_token_chunk": GATHERED_KEYS,
    **dict.fromkeys(("score_mod", "score_mod_bwd", "mask_mod", "aux_tensors", "aux_scalars"), CUTE_MASKS),
    "block_sparse_tensors": "lists are of sequences with a batch axis; flash_attn_func takes them",
    "seqlen_k_per_split": "attngen.attention_paged has split_size, which fixes the keys of each split",
}
