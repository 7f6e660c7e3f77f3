"""Neighbourhood attention in float64 over coordinates of tokens, from NATTEN's documentation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Neighbourhood(NamedTuple):
    """A grid, and the arguments of NATTEN for each of its axes."""

    grid: Sequence[int]
    kernel_size: Sequence[int]
    stride: Sequence[int]
    dilation: Sequence[int]
    is_causal: Sequence[bool]

    @property
    def options(self) -> dict[str, Sequence[int]]:
        return {name: value for name, value in self._asdict().items() if name != "grid"}

    def mask(self) -> Tensor:
        """Bools (tokens, tokens): which keys each query sees."""
        seen = torch.ones(1, 1, dtype=torch.bool)
        for axis in zip(*self, strict=True):
            own = along(*axis)
            seen = torch.kron(seen.int(), own.int()).bool()
        return seen


def along(tokens: int, size: int, stride: int, dilation: int, causal: bool) -> Tensor:
    """The mask along one axis: bools (tokens, tokens)."""
    seen = torch.zeros(tokens, tokens, dtype=torch.bool)
    for query in range(tokens):
        residue, place = query % dilation, query // dilation
        group = list(range(residue, tokens, dilation))
        if causal:
            leader = min(place // stride * stride + stride - 1, len(group) - 1)
            keys = group[max(leader - size + 1, 0) : place + 1]
        else:
            leader = min(place // stride * stride + stride // 2, len(group) - 1)
            first = min(max(leader - size // 2, 0), len(group) - size)
            keys = group[first : first + size]
        seen[query, keys] = True
    return seen


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    of: Neighbourhood,
    more: Sequence[Tensor] = (),
    scale: float | None = None,
    compute: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Out (batch, …, heads, columns of v) and lse (batch, …, heads) with every step in ``compute``; ``more`` keys and
    values are seen by all queries."""
    shape = q.shape
    q, k, v = (given.flatten(1, -3).to(compute) for given in (q, k, v))
    seen = of.mask().to(q.device)
    if more:
        k, v = (torch.cat([own, given.to(compute)], dim=1) for own, given in zip((k, v), more, strict=True))
        seen = torch.cat([seen, seen.new_ones(len(seen), more[0].shape[1])], dim=1)
    k, v = (given.repeat_interleave(q.shape[2] // given.shape[2], dim=2) for given in (k, v))
    logits = torch.einsum("bqhd,bkhd->bhqk", q, k) * (shape[-1] ** -0.5 if scale is None else scale)
    logits = logits.masked_fill(~seen, -torch.inf)
    out = torch.einsum("bhqk,bkhd->bqhd", logits.softmax(-1), v)
    return out.reshape(*shape[:-1], v.shape[-1]), logits.logsumexp(-1).transpose(1, 2).reshape(shape[:-1])
