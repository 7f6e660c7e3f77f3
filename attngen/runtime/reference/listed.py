"""The eager reference of keys by index: how often the list of each query names each key."""

from __future__ import annotations

import torch

from attngen.lang.listed import INDICES, LISTS, TOPK_LENGTH
from attngen.runtime.arguments.checked import Call


def listed(call: Call, index: int, rows: slice | torch.Tensor, keys: int, heads: torch.Tensor | None) -> torch.Tensor:
    """Times that query rows of sequence ``index`` list each of its ``keys``, 0 for none: (heads, rows, keys), or
    (1, rows, keys) if all heads share lists. ``heads``: those of q, all if None."""
    assert call.variant.keys is not None
    lists = LISTS[call.variant.keys]
    entries = _of_heads(call, call.tensors[INDICES.name][index][rows], lists.per_head, heads).long()
    if TOPK_LENGTH.name in call.tensors:
        length = _of_heads(call, call.tensors[TOPK_LENGTH.name][index][rows], lists.per_head, heads)
        counted = torch.arange(entries.shape[-1], device=entries.device) < length[..., None]
        entries = torch.where(counted, entries, -1)
    if lists.block > 1:
        inside = torch.arange(lists.block, device=entries.device)
        entries = torch.where(entries[..., None] >= 0, entries[..., None] * lists.block + inside, -1).flatten(-2)
    names_key = (entries >= 0) & (entries < keys)
    times = torch.zeros(*entries.shape[:2], keys + 1, dtype=torch.int64, device=entries.device)
    times.scatter_add_(2, torch.where(names_key, entries, keys), names_key.long())
    return times[..., :keys]


def _of_heads(call: Call, values: torch.Tensor, per_head: bool, heads: torch.Tensor | None) -> torch.Tensor:
    """Values of (rows, KV heads, ...) as (heads, rows, ...), or of (rows, ...) as (1, rows, ...)."""
    if not per_head:
        return values[None]
    of_kv = torch.arange(call.heads, device=values.device) if heads is None else heads
    return values.movedim(1, 0)[of_kv // (call.heads // call.kv_heads)]
