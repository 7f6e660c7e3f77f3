"""flash-attn's forward and backward passes by themselves, which ring attention and other custom gradients call.

As in flash-attn 2.8 they have no gradient of their own, and the backward pass writes into the dq, dk and dv that it is
given. Its ``out`` and ``softmax_lse`` may be those of a softmax over more keys than it is given.

Nothing wraps these functions: implementations of ring attention read their arguments and defaults.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from attngen.errors import CallError
from attngen.integrations.flash_attn.arguments import SPEC, candidates_for, packing_of, sequences_of
from attngen.integrations.shared.arguments import contiguous_rows, refused
from attngen.integrations.shared.choice import Packing, VariantCandidate, attend, with_dropout
from attngen.integrations.shared.gradients import gradients_of, row_sums, write
from attngen.runtime.operations.attention.dropout_state import random_state

#: flash-attn rounds the rows of the row sums of a backward pass up to this.
ROWS = 128


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int | None,
    window_size_right: int | None,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return out (b, sq, h, d), lse (b, h, sq) in float32, an empty tensor, and seed and offset, (2,) int64.

    The latter are zeros without dropout; a backward pass with dropout takes them. No kernel forms the probabilities
    that ``return_softmax`` asks for.
    """
    q, k, v = contiguous_rows(q=q, k=k, v=v)
    window = (window_size_left, window_size_right)
    state = _state(q, dropout_p)
    plain = candidates_for(q, causal, window, softcap, alibi_slopes, q.shape[0])
    return _run(with_dropout(plain, dropout_p, state), q, k, v, None, softmax_scale, None, state)


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int | None = -1,
    window_size_right: int | None = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As ``_flash_attn_forward``, for packed sequences: q (total_q, h, d), lse (h, total_q).

    ``seqused_k`` (batch,) int32 cuts each sequence's keys. ``zero_tensors`` changes nothing. Pages and ``leftpad_k``
    are refused.
    """
    if block_table is not None:
        raise refused("block_table", "this function is for training; flash_attn_varlen_func takes pages")
    if leftpad_k is not None:
        raise refused("leftpad_k", "this function is for training; flash_attn_with_kvcache takes padding on the left")
    q, k, v = contiguous_rows(q=q, k=k, v=v)
    window = (window_size_left, window_size_right)
    state = _state(q, dropout_p)
    batch = sequences_of(cu_seqlens_q)
    plain = candidates_for(q, causal, window, softcap, alibi_slopes, batch)
    packing = packing_of(cu_seqlens_q, cu_seqlens_k, int(max_seqlen_q), int(max_seqlen_k))
    return _run(with_dropout(plain, dropout_p, state), q, k, v, packing, softmax_scale, seqused_k, state)


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int | None,
    window_size_right: int | None,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    """Write the gradients of q, k and v into dq, dk and dv, and return rowsum(dout ∘ out).

    The result is float32 (b, h, sq rounded up to 128), 0 after sq. ``out`` (b, sq, h, d) and ``softmax_lse``
    (b, h, sq) are those of the whole softmax; with dropout ``rng_state`` comes from the forward pass. A gradient that
    is None is not written.
    """
    q, k, v, dout = contiguous_rows(q=q, k=k, v=v, dout=dout)
    window = (window_size_left, window_size_right)
    plain = candidates_for(q, causal, window, softcap, alibi_slopes, q.shape[0])
    candidates = _dropping_again(plain, dropout_p, rng_state)
    gradients = gradients_of(
        candidates, q, k, v, out, softmax_lse, dout, spec=SPEC, softmax_scale=softmax_scale,
        deterministic=deterministic,
    )  # fmt: skip
    write(gradients, (dq, dk, dv))
    return pad(row_sums(out, dout), (0, -q.shape[1] % ROWS))


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int | None,
    window_size_right: int | None,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    """As ``_flash_attn_backward``, for packed sequences: the result is (h, total_q + 128 · batch), 0 after total_q.

    ``zero_tensors`` changes nothing.
    """
    q, k, v, dout = contiguous_rows(q=q, k=k, v=v, dout=dout)
    window = (window_size_left, window_size_right)
    batch = sequences_of(cu_seqlens_q)
    plain = candidates_for(q, causal, window, softcap, alibi_slopes, batch)
    candidates = _dropping_again(plain, dropout_p, rng_state)
    packing = packing_of(cu_seqlens_q, cu_seqlens_k, int(max_seqlen_q), int(max_seqlen_k))
    gradients = gradients_of(
        candidates, q, k, v, out, softmax_lse, dout, spec=SPEC, packing=packing, softmax_scale=softmax_scale,
        deterministic=deterministic,
    )  # fmt: skip
    write(gradients, (dq, dk, dv))
    return pad(row_sums(out, dout), (0, ROWS * batch))


def _state(q: Tensor, rate: float) -> Tensor | None:
    return random_state(q) if rate else None


def _dropping_again(plain: list[VariantCandidate], rate: float, state: Tensor | None) -> Sequence[VariantCandidate]:
    if rate and state is None:
        raise CallError("a backward pass with dropout needs the rng_state that the forward pass returned")
    return with_dropout(plain, rate, state)


def _run(
    candidates: Sequence[VariantCandidate], q: Tensor, k: Tensor, v: Tensor, packing: Packing | None,
    softmax_scale: float | None, seqused_k: Tensor | None, state: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    with torch.no_grad():
        out, lse = attend(
            candidates, q, k, v, spec=SPEC, packing=packing, softmax_scale=softmax_scale, seqused_k=seqused_k,
            return_lse=True,
        )  # fmt: skip
    seed = q.new_zeros(2, dtype=torch.int64) if state is None else state
    return out, lse, q.new_empty(0), seed
