"""A mask as intervals of keys, the form in which cuDNN's flexible attention takes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

#: Most intervals of keys of a query.
MOST = 32

#: Pairs whose mask is evaluated at a time.
_PAIRS = 2**26


def endpoints(
    mask_mod: Callable[..., Any] | None, seqlen: int, device: torch.device, *, batch: int = 1, heads: int = 1
) -> Tensor | None:
    """Ends F of the keys [0, F0), [F1, F2), … that each query sees: int32 (heads, an odd number, batch * seqlen).

    ``mask_mod`` is FlexAttention's; None shows all pairs. None if a query has more than ``MOST`` intervals.
    """
    of_rows = [
        _ends(mask_mod, b, slice(first, min(first + step, seqlen)), seqlen, heads, device)
        for step in [max(_PAIRS // (heads * seqlen), 1)]
        for b in range(batch)
        for first in range(0, seqlen, step)
    ]
    several = max(ends.shape[-1] for ends in of_rows)
    if several > 2 * MOST - 1:
        return None
    padded = [torch.nn.functional.pad(ends, (0, several - ends.shape[-1]), value=seqlen) for ends in of_rows]
    return torch.cat(padded, dim=1).int().transpose(1, 2).contiguous()


def _ends(
    mask_mod: Callable[..., Any] | None, b: int, rows: slice, seqlen: int, heads: int, device: torch.device
) -> Tensor:
    """The ends of some query rows, (heads, rows, number), filled up with ``seqlen``."""
    q = torch.arange(rows.start, rows.stop, device=device, dtype=torch.int32)[:, None]
    kv = torch.arange(seqlen, device=device, dtype=torch.int32)[None]
    h = torch.arange(heads, device=device, dtype=torch.int32)[:, None, None]
    shape = (heads, len(q), seqlen)
    seen = torch.ones(shape, dtype=torch.bool, device=device)
    if mask_mod is not None:
        seen = mask_mod(torch.full((1,), b, device=device, dtype=torch.int32), h, q, kv).expand(shape)
    # the key before the first one counts as seen, and the one after the last one as hidden
    outside = seen.new_ones(heads, len(q), 1)
    changes = (torch.cat([outside, seen], dim=-1) != torch.cat([seen, ~outside], dim=-1)).flatten(0, 1)
    counts = changes.sum(-1)
    row, key = changes.nonzero(as_tuple=True)
    place = torch.arange(len(row), device=device) - (counts.cumsum(0) - counts)[row]
    ends = torch.full((len(counts), int(counts.max())), seqlen, dtype=key.dtype, device=device)
    ends[row, place] = key
    return ends.unflatten(0, (heads, len(q)))
