"""The eager reference of keys by index: how often the list of each query names each key."""

from __future__ import annotations

import torch

from attngen.lang.listed import EXTRA_INDICES, EXTRA_TOPK_LENGTH, INDICES, LISTS, TOPK_LENGTH
from attngen.runtime.arguments.checked import Call
from attngen.runtime.arguments.extra_cache import extra_slots


def listed(call: Call, index: int, rows: slice | torch.Tensor, keys: int, heads: torch.Tensor | None) -> torch.Tensor:
    """Times that query rows of sequence ``index`` list each of its ``keys``, 0 for none: (heads, rows, keys), or
    (1, rows, keys) if all heads share lists. ``heads``: those of q, all if None. Rows of a second cache are the last
    keys."""
    assert call.variant.keys is not None
    if not LISTS[call.variant.keys].extra:
        return _listed(call, index, rows, keys, heads, INDICES.name, TOPK_LENGTH.name)
    slots = extra_slots(call)
    first = _listed(call, index, rows, keys - slots, heads, INDICES.name, TOPK_LENGTH.name)
    return torch.cat((first, _listed(call, index, rows, slots, heads, EXTRA_INDICES.name, EXTRA_TOPK_LENGTH.name)), -1)


def _listed(
    call: Call,
    index: int,
    rows: slice | torch.Tensor,
    keys: int,
    heads: torch.Tensor | None,
    indices: str,
    topk_length: str,
) -> torch.Tensor:
    """The same for the keys of one list, by the names of its tensors."""
    lists = LISTS[call.variant.keys or ""]
    entries = _of_heads(call, call.tensors[indices][index][rows], lists.per_head, heads).long()
    if topk_length in call.tensors:
        length = _of_heads(call, call.tensors[topk_length][index][rows], lists.per_head, heads)
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
