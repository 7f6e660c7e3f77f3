"""The eager reference of keys by index: how often the list of each query names each key."""

from __future__ import annotations

import torch

from attngen.lang.listed import INDICES, TOPK_LENGTH
from attngen.runtime.arguments.checked import Call


def listed(call: Call, index: int, rows: slice | torch.Tensor, keys: int) -> torch.Tensor:
    """Times that query rows of sequence ``index`` list each of its ``keys``: (1, rows, keys), 0 for none."""
    entries = call.tensors[INDICES.name][index][rows].long()
    names_key = (entries >= 0) & (entries < keys)
    if TOPK_LENGTH.name in call.tensors:
        length = call.tensors[TOPK_LENGTH.name][index][rows]
        names_key &= torch.arange(entries.shape[-1], device=entries.device) < length[:, None]
    times = torch.zeros(entries.shape[0], keys + 1, dtype=torch.int64, device=entries.device)
    times.scatter_add_(1, torch.where(names_key, entries, keys), names_key.long())
    return times[None, :, :keys]
