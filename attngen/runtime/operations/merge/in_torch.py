"""Merging in plain torch: any number of parts, with gradients."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor


def merge(parts: Sequence[Tensor], logs: Sequence[Tensor], layout: str) -> tuple[Tensor, Tensor]:
    """The results of checked parts."""
    compute = torch.float64 if torch.float64 in (parts[0].dtype, *(log.dtype for log in logs)) else torch.float32
    by_part = torch.stack(torch.broadcast_tensors(*(log.to(compute) for log in logs)))
    # No gradient flows through the reference: the results do not depend on it.
    peak = by_part.detach().amax(dim=0)
    seen = peak != -math.inf
    peak = torch.where(seen, peak, 0.0)
    weights = torch.exp(by_part - peak)
    total = torch.where(seen, weights.sum(dim=0), 1.0)
    lse = torch.where(seen, peak + torch.log(total), -math.inf)
    shares = _beside_rows(weights / total, parts[0].dim(), layout)
    unseen = _beside_rows(by_part == -math.inf, parts[0].dim(), layout)
    # Shares have the dtype of the arithmetic, and their products with the parts, too.
    weighted = [
        share * torch.where(absent, 0.0, part) for part, share, absent in zip(parts, shares, unseen, strict=True)
    ]
    return functools.reduce(torch.add, weighted).to(parts[0].dtype), lse


def _beside_rows(rows: Tensor, rank: int, layout: str) -> tuple[Tensor, ...]:
    """Return numbers of each part and row, laid out as log-sum-exps are, so that they broadcast to the outputs."""
    return ((rows if rank == 4 and layout == "bhsd" else rows.transpose(-1, -2))[..., None]).unbind(0)
