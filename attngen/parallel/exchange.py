"""Rows of tensors sent to the ranks that need them, and their gradients sent back and added up in float32.

Every rank of the group enters the same collectives in the same order, whether it sends anything or not, in the
backward too. Tensors are packed row by row, so that one collective carries K and V.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from attngen.parallel.routes import Route, Take

Group = Any  # a process group of torch.distributed

#: Its name in torch before 2.14.
gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def exchange(route: Route, group: Group | None, *parts: Tensor) -> tuple[Tensor, ...]:
    """The rows of each tensor that this rank needs, where its keys lie; ``parts`` have one dtype, their rows first.

    Rows of places that nothing is sent to are 0. Differentiable. ``group`` is None for a single rank.
    """
    out: tuple[Tensor, ...] = _Exchange.apply(route, group, *parts)
    return out


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, route: Route, group: Group | None, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.route, ctx.group = route, group
        tails = ctx.tails = [part.shape[2:] for part in parts]
        take, put = route.on(parts[0].device)
        if route.gathers:
            received = _all_gather(_packed(parts, tails, None), sum(route.receive_counts), group)
        else:
            received = all_to_all(_packed(parts, tails, take), route.send_counts, route.receive_counts, group)
        return _split(put(received), tails)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        route: Route = ctx.route
        _, put = route.on(grads[0].device)
        back = all_to_all(_packed(grads, ctx.tails, put.take), route.receive_counts, route.send_counts, ctx.group)
        total = torch.float64 if back.dtype == torch.float64 else torch.float32
        if route.gathers:
            added = back.unflatten(0, (-1, route.held)).sum(dim=0, dtype=total)
        else:
            added = back.new_zeros((route.held, *back.shape[1:]), dtype=total)
            takes = route.send_takes(back.device)
            for take, rows in zip(takes, back.split(list(route.send_counts)), strict=True):
                take.add(added, rows)
        return None, None, *(part.to(back.dtype) for part in _split(added, ctx.tails))


def _packed(parts: Sequence[Tensor], tails: Sequence[torch.Size], take: Take | None) -> Tensor:
    """Some rows of several tensors side by side, or all of them: (rows, batch, width)."""
    rows, batch = parts[0].shape[:2]
    widths = [tail.numel() for tail in tails]
    packed = parts[0].new_empty((rows if take is None else len(take.index), batch, sum(widths)))
    for part, tail, width, end in zip(parts, tails, widths, accumulate(widths), strict=True):
        place = packed.narrow(2, end - width, width).unflatten(2, tail)
        if take is None:
            place.copy_(part)
        elif not take.runs:
            place.copy_(part.index_select(0, take.index))
        else:
            start = 0
            for first, length in take.runs:
                place.narrow(0, start, length).copy_(part.narrow(0, first, length))
                start += length
    return packed


def _split(packed: Tensor, tails: Sequence[torch.Size]) -> tuple[Tensor, ...]:
    """Views of the tensors that lie side by side."""
    widths = [tail.numel() for tail in tails]
    ends = accumulate(widths)
    return tuple(
        packed.narrow(2, end - width, width).unflatten(2, tail)
        for tail, width, end in zip(tails, widths, ends, strict=True)
    )


def all_to_all(sent: Tensor, send: Sequence[int], receive: Sequence[int], group: Group | None) -> Tensor:
    """Send rows to each rank, as many as ``send`` says, and return those that arrive, in the order of the ranks."""
    if group is None:
        return sent
    received = sent.new_empty((sum(receive), *sent.shape[1:]))
    wire = on_wire(group)
    dist.all_to_all_single(wire(received), wire(sent), list(receive), list(send), group=group)
    return received


def _all_gather(rows: Tensor, count: int, group: Group | None) -> Tensor:
    if group is None:
        return rows
    received = rows.new_empty((count, *rows.shape[1:]))
    wire = on_wire(group)
    gather(wire(received), wire(rows), group=group)
    return received


def on_wire(group: Group) -> Callable[[Tensor], Tensor]:
    """Function that views a contiguous tensor in a dtype that the backend takes: gloo takes few."""
    if dist.get_backend(group) != "gloo":
        return lambda tensor: tensor
    return lambda tensor: tensor.view(torch.uint8)
