"""Block masks in plain torch: a few operations that read no number back."""

from __future__ import annotations

import torch
from torch import Tensor

from attngen.runtime.operations.block_mask.arguments import BlockLists, MaskSizes


def block_mask(call: BlockLists, sizes: MaskSizes) -> Tensor:
    """The mask of a checked call."""
    indices = call.indices.expand(*sizes.rows, sizes.capacity).long()
    listed = (indices >= 0) & (indices < sizes.key_blocks)
    if call.counts is not None:
        listed &= torch.arange(sizes.capacity, device=indices.device) < call.counts[..., None]
    count = sizes.rows[0] * sizes.rows[1] * sizes.rows[2]
    rows = torch.arange(count, device=indices.device).view(*sizes.rows, 1)
    # entries that are not listed go behind the mask
    end = count * sizes.key_blocks
    places = (rows * sizes.key_blocks + indices).masked_fill(~listed, end)
    mask = torch.zeros(end + 1, dtype=torch.bool, device=indices.device).scatter_(0, places.reshape(-1), True)
    return mask[:-1].view(sizes.shape)
