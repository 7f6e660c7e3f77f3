"""flash-attn's helpers for padded batches (``flash_attn.bert_padding``), with the same arguments and results.

Tokens of a padded batch are gathered into packed rows, one after the other, and put back. Both directions are
differentiable. ``unpad_input`` reads how many tokens there are, which waits for the GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

__all__ = [
    "index_first_axis",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Return the rows of input (n, …) at ``indices`` (m,), distinct integers, as (m, …)."""
    rows: Tensor = _Taken.apply(input, indices)
    return rows


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Return (first_axis_dim, …) with ``values`` (m, …) in the rows ``indices`` (m,), distinct, and 0 elsewhere."""
    rows: Tensor = _Put.apply(values, indices, first_axis_dim)
    return rows


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Gather the tokens of hidden_states (batch, seqlen, …) where ``attention_mask`` (batch, seqlen) is not 0.

    ``unused_mask`` marks further tokens that are kept but not used. Returns the tokens (total, …), their indices in the
    flattened batch (total,), where each sequence starts, int32 (batch + 1,), the longest length, and how many tokens of
    each sequence are used, int32 (batch,).
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    used = attention_mask.sum(dim=-1, dtype=torch.int32)
    lengths = used if unused_mask is None else kept.sum(dim=-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    return (*_gathered(hidden_states, indices, lengths), used)


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Gather the tokens of a batch in which short sequences follow one another in a row.

    Row i of ``attention_mask_in_length`` (batch, seqlen), integers, holds the lengths of the sequences in row i of
    hidden_states (batch, seqlen, …), from its first place on, and 0 after them. Returns the tokens (total, …), their
    indices in the flattened batch, where each sequence starts, int32 (sequences + 1,), and the longest length.
    """
    filled = attention_mask_in_length.sum(dim=-1, keepdim=True)
    places = torch.arange(attention_mask_in_length.shape[-1], device=filled.device)
    indices = (places < filled).flatten().nonzero().flatten()
    lengths = attention_mask_in_length[attention_mask_in_length != 0]
    return _gathered(hidden_states, indices, lengths)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Put tokens (total, …) back to their ``indices`` in a batch, as (batch, seqlen, …) with 0 elsewhere."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def _gathered(hidden_states: Tensor, indices: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    starts = pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if lengths.numel() else 0
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, starts, longest


class _Taken(torch.autograd.Function):
    """Rows at distinct indices; their gradients go back by copies, not by sums."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, indices: Tensor) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.count = rows.shape[0]
        return rows.index_select(0, indices)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Put.apply(gradient, ctx.saved_tensors[0], ctx.count), None


class _Put(torch.autograd.Function):
    """Rows put to distinct indices of zeros."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, indices: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(indices)
        return values.new_zeros(count, *values.shape[1:]).index_copy_(0, indices, values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _Taken.apply(gradient, ctx.saved_tensors[0]), None, None
