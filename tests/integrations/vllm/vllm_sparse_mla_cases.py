"""Batches of sparse latent attention through vLLM's classes, and stand-ins for its operators that need a GPU."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from tests.integrations.engines.sparse_batches import RANK, SparseBatch

SCALE = 192**-0.5

__all__ = ["SCALE", "buffer", "check", "common", "convert", "import_module", "requests_of_tokens"]


def convert(
    req_id: Tensor, block_table: Tensor, token_indices: Tensor, BLOCK_SIZE: int = 64,
    BLOCK_STRIDE_ROWS: int | None = None, NUM_TOPK_TOKENS: int = 2048, **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """vLLM's operator that turns positions into rows of the cache, those of a query moved to the front, and counts
    them."""
    assert options.pop("return_valid_counts")
    assert not {name for name, value in options.items() if value is not None}
    assert token_indices.shape[1] == NUM_TOPK_TOKENS
    out = torch.full_like(token_indices, -1)
    counts = torch.zeros(len(token_indices), dtype=torch.int32)
    for token, row in enumerate(token_indices.long()):
        place = row[row >= 0]
        blocks = block_table[req_id[token].long(), place // BLOCK_SIZE]
        out[token, : len(place)] = blocks * (BLOCK_STRIDE_ROWS or BLOCK_SIZE) + (place % BLOCK_SIZE).int()
        counts[token] = len(place)
    return out, counts


def requests_of_tokens(starts: Tensor, out: Tensor, mapped: int, tokens: int) -> Tensor:
    """vLLM's operator that writes the request of each of the first ``mapped`` tokens, and 0 for those after them."""
    place = torch.arange(tokens)
    own = torch.searchsorted(starts[1:].contiguous(), place.int(), right=True)
    out[:tokens] = torch.where(place < mapped, own, 0).int()
    return out[:tokens]


def common(made: SparseBatch, make: Any) -> Any:
    """vLLM's metadata of a batch."""
    starts, lengths, device = made.starts, made.used, made.q.device
    return make(
        query_start_loc=starts.to(device), query_start_loc_cpu=starts, seq_lens=lengths.to(device),
        num_reqs=len(lengths),
        num_actual_tokens=len(made.q), max_query_len=max(made.queries), max_seq_len=max(made.lengths),
        block_table_tensor=made.table, slot_mapping=torch.zeros(len(made.q), dtype=torch.int64),
        seq_lens_cpu_upper_bound=lengths,
    )  # fmt: skip


def buffer(made: SparseBatch) -> Tensor:
    """The indexer's buffer, which has more rows than a batch."""
    rows = made.topk.new_full((len(made.topk) + 5, made.topk.shape[1]), 7)
    rows[: len(made.topk)] = made.topk
    return rows


def check(
    made: SparseBatch,
    impl: Any,
    metadata: Any,
    *,
    in_two_parts: bool = True,
    gap: int = 0,
    tolerance: float = 1e-5,
    layer: Any = None,
) -> None:
    """Assert that a layer gives what the batch means. ``gap``: rows of other layers between the blocks of its cache."""
    q: Any = made.q
    if in_two_parts:
        q = made.q.split([RANK, made.q.shape[-1] - RANK], dim=-1)
    cache = made.stored
    if gap:
        spread = torch.full((cache.shape[0], cache.shape[1] + gap, cache.shape[2]), torch.nan).to(cache)
        spread[:, : cache.shape[1]] = cache
        cache = spread[:, : cache.shape[1]]
    out, lse = impl.forward_mqa(q, cache, metadata, layer)
    assert out.is_contiguous()
    assert (lse is not None) == impl.need_to_return_lse_for_decode
    made.check(out, lse, SCALE, tolerance=tolerance)
