"""attngen as a flash attention of torch: SDPA's flash backend, and ``torch.nn.attention.varlen.varlen_attn``.

``register`` makes it known to torch; ``torch.nn.attention.activate_flash_attention_impl("attngen")`` turns it on and
``restore_flash_attention_impl`` off. Torch's own code chooses the flash backend as before: calls with a mask tensor,
head dimensions beyond 256 or gradients of what flash attention does not differentiate stay with its other backends.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attngen.errors import CallError, NoKernelError
from attngen.integrations.flash_attn.arguments import SPEC as DENSE_SPEC
from attngen.integrations.flash_attn.arguments import candidates_for, packing_of, sequences_of
from attngen.integrations.flash_attn.cache import CachedCall, attend_cached
from attngen.integrations.flash_attn.passes import _flash_attn_backward, _flash_attn_varlen_backward
from attngen.integrations.shared.arguments import contiguous_rows
from attngen.integrations.shared.choice import attend

#: Name of the implementation.
NAME = "attngen"


def register() -> None:
    """Make the implementation known to torch; again is the same as once. NoKernelError for a torch without a registry
    of flash attentions (it has one from 2.11 on)."""
    try:
        from torch.nn.attention import register_flash_attention_impl
    except ImportError:
        raise NoKernelError(f"torch {torch.__version__} has no registry of flash attentions; 2.11 has one") from None
    register_flash_attention_impl(NAME, register_fn=activate)


class _Active:
    """The operators while the implementation is active; ``remove`` gives them back to torch."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def remove(self) -> None:
        library, self._library = self._library, None
        if library is not None:
            library._destroy()


def activate(dispatch_key: str = "CUDA") -> _Active:
    """Put attngen in the place of torch's flash attention, until the result's ``remove``.

    Raises CallError for a key that torch does not know.
    """
    try:
        library = torch.library.Library("aten", "IMPL", dispatch_key)
    except RuntimeError:
        raise CallError(f"dispatch_key must be one of torch's, such as CUDA, got {dispatch_key!r}") from None
    for name, function in (
        ("_flash_attention_forward", forward),
        ("_flash_attention_forward_no_dropout_inplace", forward_into),
        ("_flash_attention_backward", backward),
        ("_scaled_dot_product_flash_attention", dense_forward),
        ("_scaled_dot_product_flash_attention_backward", dense_backward),
    ):
        if hasattr(torch.ops.aten, name):
            library.impl(name, function, dispatch_key)
    return _Active(library)


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = -1,
    window_size_right: int | None = -1,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    out: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``aten::_flash_attention_forward``: q (b, s, h, d), or (total_q, h, d) with ``cum_seq_q``; the log-sum-exp is
    (b, h, s) or (h, total_q). With ``block_table`` keys lie in pages, of which ``seqused_k`` counts those of each
    sequence."""
    result, lse = _attend(
        query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, scale,
        (window_size_left, window_size_right), seqused_k, alibi_slopes, block_table, num_splits,
    )  # fmt: skip
    if out is not None:
        result = out.copy_(result)
    state = torch.zeros(2, dtype=torch.uint64, device=query.device)
    return result, lse, state, state.new_zeros(()), query.new_empty(0)


def forward_into(out: Tensor, *arguments: Any, **options: Any) -> Tensor:
    """``aten::_flash_attention_forward_no_dropout_inplace``: as ``forward``, into ``out``; the log-sum-exp."""
    return forward(*arguments, **options, out=out)[1]


def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``aten::_flash_attention_backward``: gradients of q, k and v."""
    del rng_state, unused
    _without_dropout(dropout_p)
    dq, dk, dv = (torch.empty_like(t) for t in (query, key, value))
    left, right = _sides((window_size_left, window_size_right))
    deterministic = torch.are_deterministic_algorithms_enabled()
    if cum_seq_q is None:
        _flash_attn_backward(
            grad_out, query, key, value, out, logsumexp, dq, dk, dv, 0.0, scale, is_causal, left, right, 0.0, None,
            deterministic,
        )  # fmt: skip
    else:
        assert cum_seq_k is not None
        _flash_attn_varlen_backward(
            grad_out, query, key, value, out, logsumexp, dq, dk, dv, cum_seq_q, cum_seq_k, max_q, max_k, 0.0, scale,
            is_causal, left, right, 0.0, None, deterministic,
        )  # fmt: skip
    return dq, dk, dv


def dense_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """``aten::_scaled_dot_product_flash_attention``: all tensors are (batch, heads, tokens, head_dim)."""
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    out, lse, state, offset, mask = forward(
        q, k, v, None, None, q.shape[1], k.shape[1], dropout_p, is_causal, return_debug_mask, scale=scale
    )
    return out.transpose(1, 2), lse, None, None, q.shape[1], k.shape[1], state, offset, mask


def dense_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``aten::_scaled_dot_product_flash_attention_backward``: as ``backward``, (batch, heads, tokens, head_dim)."""
    dout, q, k, v, o = (t.transpose(1, 2) for t in (grad_out, query, key, value, out))
    gradients = backward(
        dout, q, k, v, o, logsumexp, None, None, max_q, max_k, dropout_p, is_causal, philox_seed, philox_offset,
        scale=scale,
    )  # fmt: skip
    dq, dk, dv = (gradient.transpose(1, 2) for gradient in gradients)
    return dq, dk, dv


def _attend(
    q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor | None, starts_k: Tensor | None, max_q: int, max_k: int,
    dropout_p: float, causal: bool, debug: bool, scale: float | None, window: tuple[int | None, int | None],
    used: Tensor | None, slopes: Tensor | None, table: Tensor | None, num_splits: int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    _without_dropout(dropout_p)
    if debug:
        raise NoKernelError(f"{NAME}: no kernel stores probabilities (return_debug_mask)")
    if table is not None:
        result, lse = attend_cached(CachedCall(
            q=q, k_cache=k, v_cache=v, page_table=table, lengths=used, cu_seqlens_q=starts_q, max_seqlen_q=max_q,
            softmax_scale=scale, causal=causal, window_size=_sides(window), alibi_slopes=slopes,
            num_splits=num_splits or 0, return_lse=True,
        ))  # fmt: skip
        return result, lse
    q, k, v = contiguous_rows(q=q, k=k, v=v)
    batch, packing = q.shape[0], None
    if starts_q is not None:
        if starts_k is None:
            raise NoKernelError(f"{NAME}: packed queries need cum_seq_k, or a block table")
        batch, packing = sequences_of(starts_q), packing_of(starts_q, starts_k, max_q, max_k)
    with torch.no_grad():
        out, lse = attend(
            candidates_for(q, causal, _sides(window), 0.0, slopes, batch), q, k, v, spec=DENSE_SPEC, packing=packing,
            softmax_scale=scale, seqused_k=used, return_lse=True,
        )  # fmt: skip
    return out, lse


def _sides(window: tuple[int | None, int | None]) -> tuple[int, int]:
    left, right = (-1 if side is None else side for side in window)
    return left, right


def _without_dropout(rate: float) -> None:
    if rate:
        raise NoKernelError(f"{NAME}: dropout is not supported here; attngen.integrations.sdpa has it")
