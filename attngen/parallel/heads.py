"""The method ``heads``: ranks exchange rows for heads, so that each has all tokens of some heads, and back.

Each rank then makes the call of one GPU for its heads. A variant may read the number of a head only to index tensors
that have something for each head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from attngen.lang.variant import Variant
from attngen.parallel.exchange import Group, all_to_all
from attngen.parallel.groups import GroupReference
from attngen.parallel.routes import Route
from attngen.parallel.stages import CallOptions, attended, given_of, local_gradients
from attngen.runtime.arguments.given import Given
from attngen.runtime.autograd.transforms import HEADS, stand_alone


def heads_are_alike(variant: Variant) -> bool:
    """Whether a rank may have some heads of a variant alone."""
    return stand_alone(variant, HEADS)


def against(heads: int, kv_heads: int, ranks: int) -> str | None:
    """Reason why ranks cannot get equal numbers of heads, or None."""
    if heads % ranks == 0 and kv_heads % ranks == 0:
        return None
    numbers = f"{heads} heads and {kv_heads} KV heads"
    return f"{numbers} are not multiples of the number of ranks, {ranks}; allowed: method='exchange'"


@dataclass(frozen=True, eq=False)
class HeadParallelAttention:
    """The work of one rank in a call by heads: the call of one GPU, for all rows of its heads. ``offsets`` are those of
    packed documents; ``route`` brings all rows."""

    group: GroupReference
    route: Route
    source: Any
    offsets: tuple[int, ...] | None

    def kept_shapes(self, q: Sequence[int], k: Sequence[int], v: Sequence[int]) -> list[tuple[int, ...]]:
        """Shapes of what ``forward`` keeps: q, k and v side by side, the output and its log-sum-exp, of all rows."""
        ranks, rows = len(self.route.receive_counts), self.route.rows
        width = (q[2] * q[3] + k[2] * k[3] + v[2] * v[3]) // ranks
        heads = q[2] // ranks
        lse = (q[0], heads, rows) if self.offsets is None else (heads, rows)
        out = (q[0], rows, heads, v[3]) if self.offsets is None else (rows, heads, v[3])
        return [(rows, q[0], width), out, lse]

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, values: Mapping[str, Any], options: CallOptions, *, lse: bool, keep: bool
    ) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        """Output, log-sum-exp and what the backward needs. q, k and v are (batch, rows, heads, head_dim)."""
        whole = _to_rows(self.route, self.group(), [x.transpose(0, 1) for x in (q, k, v)])
        given = self._given(whole, q, k, v, values, options)._replace(return_lse=lse or keep)
        heads = q.shape[2] // len(self.route.receive_counts)
        computed, sums, note_largest = attended(given, options, (heads * dist.get_rank(self.group()), heads))
        note_largest()
        (out,) = _to_heads(self.route, self.group(), [self._rows_first(computed)])
        lse_here = None
        if lse and sums is not None:
            of_rows = sums.movedim(2, 0) if self.offsets is None else sums.transpose(0, 1).unsqueeze(1)
            lse_here = _to_heads(self.route, self.group(), [of_rows])[0].movedim(0, 2)
        return out.transpose(0, 1), lse_here, [whole, computed, sums] if keep and sums is not None else []

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None,
        kept: Sequence[Tensor], values: Mapping[str, Any], asked: Sequence[str], options: CallOptions,
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:  # fmt: skip
        """Gradients of q, k and v, and of the tensors ``asked``."""
        whole, computed, sums = kept
        heads = q.shape[2]
        above: list[Tensor | None] = []
        for x, rows_first in ((dout, lambda x: x.transpose(0, 1)), (dlse, lambda x: x.movedim(2, 0)[..., None])):
            if x is None:
                above.append(None)
                continue
            rows = rows_first(x)
            whole_above = _to_rows(self.route, self.group(), [rows])
            above += _side_by_side(whole_above, [(heads, *rows.shape[3:])], len(self.route.receive_counts))
        d_out = None if above[0] is None else self._as_called(above[0])
        d_lse = above[1]
        if d_lse is not None:
            d_lse = d_lse[..., 0].movedim(0, 2) if self.offsets is None else d_lse[:, 0, :, 0].transpose(0, 1)
            d_lse = d_lse.contiguous()
        given = self._given(whole, q, k, v, values, options)._replace(return_lse=True)
        gradients = local_gradients(given, computed, sums, d_out, d_lse, asked)
        *parts, own = gradients
        dq, dk, dv = _to_heads(self.route, self.group(), [self._rows_first(x) for x in parts])
        return dq.transpose(0, 1), dk.transpose(0, 1), dv.transpose(0, 1), own

    def _given(
        self, whole: Tensor, q: Tensor, k: Tensor, v: Tensor, values: Mapping[str, Any], options: CallOptions
    ) -> Given:
        ranks = len(self.route.receive_counts)
        of_heads = [(x.shape[2], x.shape[3]) for x in (q, k, v)]
        rows = [self._as_called(x) for x in _side_by_side(whole, of_heads, ranks)]
        if self.offsets is None:
            return given_of(rows, values, self.source, options, None)
        offsets = torch.tensor(self.offsets, dtype=torch.int32, device=q.device)
        longest = max(b - a for a, b in pairwise(self.offsets))
        return given_of(rows, values, self.source, options, (offsets, offsets, longest, longest))

    def _as_called(self, rows: Tensor) -> Tensor:
        """(rows, batch, heads, head_dim) as calls take it."""
        return rows.transpose(0, 1) if self.offsets is None else rows.squeeze(1)

    def _rows_first(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1) if self.offsets is None else x.unsqueeze(1)


def _to_rows(route: Route, group: Group, parts: Sequence[Tensor]) -> Tensor:
    """All rows of this rank's heads, side by side, of (rows of this rank, batch, heads, …)."""
    ranks, (rows, batch) = len(route.receive_counts), parts[0].shape[:2]
    tails = [_tail(part, ranks) for part in parts]
    widths = [tail.numel() for tail in tails]
    sent = parts[0].new_empty((ranks, rows, batch, sum(widths)))
    for part, tail, width, end in zip(parts, tails, widths, accumulate(widths), strict=True):
        by_rank = part.unflatten(2, (ranks, tail[0])).movedim(2, 0)
        sent.narrow(3, end - width, width).unflatten(3, tail).copy_(by_rank)
    received = all_to_all(sent.flatten(0, 1), [rows] * ranks, route.receive_counts, group)
    _, put = route.on(received.device)
    return put(received)


def _side_by_side(whole: Tensor, of_heads: Sequence[tuple[int, ...]], ranks: int) -> list[Tensor]:
    """The parts of (rows, batch, width): each has (heads, …) on all ranks together."""
    parts, start = [], 0
    for heads, *rest in of_heads:
        tail = (heads // ranks, *rest)
        width = int(np.prod(tail))
        parts.append(whole.narrow(2, start, width).unflatten(2, tail))
        start += width
    return parts


def _to_heads(route: Route, group: Group, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """This rank's rows of all heads, of (all rows, batch, own heads, …)."""
    ranks, rows, batch = len(route.receive_counts), route.held, parts[0].shape[1]
    tails = [part.shape[2:] for part in parts]
    widths = [tail.numel() for tail in tails]
    _, put = route.on(parts[0].device)
    sent = parts[0].new_empty((len(put.take.index), batch, sum(widths)))
    for part, tail, width, end in zip(parts, tails, widths, accumulate(widths), strict=True):
        sent.narrow(2, end - width, width).unflatten(2, tail).copy_(put.take(part))
    received = all_to_all(sent, route.receive_counts, [rows] * ranks, group).unflatten(0, (ranks, rows))
    return tuple(
        received.narrow(3, end - width, width).unflatten(3, tail).movedim(0, 2).flatten(2, 3)
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
