"""The method ``heads``: ranks exchange rows for heads, so that each has all tokens of some heads, and back.

Each rank then makes the call of one GPU for its heads. A variant may read the number of a head only to index tensors
that have something for each head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attngen.lang.variant import Variant
from attngen.parallel.exchange import Group, all_to_all
from attngen.parallel.routes import Route
from attngen.runtime.autograd.transforms import HEADS, stand_alone


def heads_are_alike(variant: Variant) -> bool:
    """Whether a rank may have some heads of a variant alone."""
    return stand_alone(variant, HEADS)


def against(heads: int, kv_heads: int, ranks: int) -> str | None:
    """What is against giving each rank as many heads, or None."""
    if heads % ranks == 0 and kv_heads % ranks == 0:
        return None
    return f"{heads} heads and {kv_heads} KV heads are no multiples of {ranks} ranks; allowed: method='exchange'"


def all_rows(route: Route, group: Group, *parts: Tensor) -> tuple[Tensor, ...]:
    """All rows of this rank's heads: from (rows of this rank, batch, heads, …) to (all rows, batch, own heads, …).

    ``route`` is that which brings all rows. Differentiable.
    """
    exchanged: tuple[Tensor, ...] = _AllRows.apply(route, group, *parts)
    return exchanged


def all_heads(route: Route, group: Group, *parts: Tensor) -> tuple[Tensor, ...]:
    """The inverse: this rank's rows of all heads."""
    exchanged: tuple[Tensor, ...] = _AllHeads.apply(route, group, *parts)
    return exchanged


class _AllRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, route: Route, group: Group, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.route, ctx.group = route, group
        return _to_rows(route, group, parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, None, *_to_heads(ctx.route, ctx.group, grads)


class _AllHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, route: Route, group: Group, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.route, ctx.group = route, group
        return _to_heads(route, group, parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, None, *_to_rows(ctx.route, ctx.group, grads)


def _to_rows(route: Route, group: Group, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
    ranks, (rows, batch) = len(route.receive_counts), parts[0].shape[:2]
    tails = [_tail(part, ranks) for part in parts]
    widths = [tail.numel() for tail in tails]
    sent = parts[0].new_empty((ranks, rows, batch, sum(widths)))
    for part, tail, width, end in zip(parts, tails, widths, accumulate(widths), strict=True):
        by_rank = part.unflatten(2, (ranks, tail[0])).movedim(2, 0)
        sent.narrow(3, end - width, width).unflatten(3, tail).copy_(by_rank)
    arrived = all_to_all(sent.flatten(0, 1), [rows] * ranks, route.receive_counts, group)
    _, put = route.on(arrived.device)
    whole = put(arrived)
    return tuple(
        whole.narrow(2, end - width, width).unflatten(2, tail)
        for tail, width, end in zip(tails, widths, accumulate(widths), strict=True)
    )


def _to_heads(route: Route, group: Group, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
    ranks, rows, batch = len(route.receive_counts), route.held, parts[0].shape[1]
    tails = [part.shape[2:] for part in parts]
    widths = [tail.numel() for tail in tails]
    _, put = route.on(parts[0].device)
    sent = parts[0].new_empty((len(put.take.index), batch, sum(widths)))
    for part, tail, width, end in zip(parts, tails, widths, accumulate(widths), strict=True):
        sent.narrow(2, end - width, width).unflatten(2, tail).copy_(put.take(part))
    arrived = all_to_all(sent, route.receive_counts, [rows] * ranks, group).unflatten(0, (ranks, rows))
    return tuple(
        arrived.narrow(3, end - width, width).unflatten(3, tail).movedim(0, 2).flatten(2, 3)
        for tail, width, end in zip(tails, widths, accumulate(widths), strict=True)
    )


def _tail(part: Tensor, ranks: int) -> torch.Size:
    return torch.Size((part.shape[2] // ranks, *part.shape[3:]))


def of_own_heads(variant: Variant, values: Mapping[str, Any], rank: int, ranks: int) -> dict[str, Any]:
    """The values of a call with this rank's part of what tensors have for each head."""
    shapes = {tensor.name: tensor.shape for tensor in variant.tensors}
    own = dict(values)
    for name, value in values.items():
        for axis, extent in enumerate(shapes.get(name, ())):
            if extent in ("h", "hk"):
                count = value.shape[axis] // ranks
                own[name] = own[name].narrow(axis, rank * count, count)
    return own
