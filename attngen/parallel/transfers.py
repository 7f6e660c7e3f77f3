"""Transfers: the rows that one rank sends to the others and gets from them, and collectives that are under way.

A collective is started, other work is enqueued, and what arrives is waited for: on a GPU by the stream alone. The way
back carries gradients of the received rows, which are added up in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from attngen.parallel.exchange import Group, gather, on_wire
from attngen.parallel.gathers import Gather, of_each, side_by_side, widths_of
from attngen.parallel.routes import Needs

#: Cycles of a GPU for which its stream waits, so that a collective's kernel starts before one that fills the GPU
#: (docs/notebook/parallel.md, "Overlap").
_HEAD_START = 20_000


@dataclass(frozen=True)
class Transfer:
    """Rows that one rank sends and gets. They lie in two tensors: its own, and those that arrive, in the order of
    ranks.

    ``places`` says where each tile begins in both together, its own rows first, and is −1 for one that is in neither.
    Where all ranks get all rows, own rows arrive too, and those that are received count.
    """

    held: int
    gathers: bool  # all ranks get all rows, their own too, and hold as many
    send_counts: tuple[int, ...]
    receive_counts: tuple[int, ...]
    send: np.ndarray  # own rows in the order of the ranks that get them
    places: np.ndarray

    @classmethod
    def of(cls, needs: Needs, rank: int) -> Transfer:
        """The transfer that meets the needs of all ranks."""
        sharding, owner = needs.sharding, needs.sharding.owner
        counts, ranks = sharding.counts, range(sharding.ranks)
        mine = owner == rank
        gathers = needs.runs.complete and int(counts.min()) == int(counts.max())
        others = [other for other in ranks if gathers or other != rank]
        sent = {other: np.flatnonzero(mine & needs.tiles[other]) for other in others}
        come = {other: np.flatnonzero((owner == other) & needs.tiles[rank]) for other in others}
        none: np.ndarray = np.empty(0, dtype=np.int64)
        send = [sharding.spread(tiles, sharding.offsets[tiles]) for tiles in sent.values()]
        places = np.where(mine, sharding.offsets, -1)
        order = np.concatenate([none, *come.values()])
        sizes = sharding.sizes[order]
        starts = int(counts[rank]) + np.cumsum(sizes) - sizes
        places[order] = starts
        return cls(
            int(counts[rank]),
            gathers,
            tuple(int(sharding.sizes[sent.get(other, none)].sum()) for other in ranks),
            tuple(int(sharding.sizes[come.get(other, none)].sum()) for other in ranks),
            np.concatenate([none, *send]),
            places,
        )

    @cached_property
    def received(self) -> int:
        """Rows that arrive."""
        return sum(self.receive_counts)

    @cached_property
    def _sends(self) -> Gather:
        """The rows that are sent, of own rows."""
        rows: np.ndarray = np.arange(self.held) if self.gathers else self.send
        return Gather(len(rows), np.arange(len(rows)), rows)

    @property
    def sent(self) -> int:
        """Rows that are sent."""
        return self.held if self.gathers else len(self.send)

    def start(self, k: Tensor, v: Tensor, group: Group, received: Tensor | None = None) -> PendingTransfer:
        """Start to send own rows, (batch, rows, heads, head_dim), to the ranks that need them, K and V side by side.
        ``received`` is where received rows go, if the caller has a place for them."""
        widths = widths_of(k, v)
        sent = k.new_empty((self.sent, k.shape[0], sum(widths)))
        self._sends(side_by_side(sent, widths), of_each(k, v))
        if received is None:
            received = k.new_empty((self.received, *sent.shape[1:]))
        wire = on_wire(group)
        if self.gathers:
            return PendingTransfer(gather(wire(received), wire(sent), group=group, async_op=True), sent, received)
        handle = self._exchanged(wire(received), wire(sent), self.receive_counts, self.send_counts, group)
        return PendingTransfer(handle, sent, received)

    def start_back(self, gradients: Tensor, group: Group) -> PendingTransfer:
        """Start to send gradients of the received rows, contiguous, to the ranks that sent them."""
        received = gradients.new_empty((len(self.send), *gradients.shape[1:]))
        wire = on_wire(group)
        handle = self._exchanged(wire(received), wire(gradients), self.send_counts, self.receive_counts, group)
        return PendingTransfer(handle, gradients, received)

    def _exchanged(
        self, received: Tensor, sent: Tensor, receive: Sequence[int], send: Sequence[int], group: Group
    ) -> Any:
        return dist.all_to_all_single(received, sent, list(receive), list(send), group=group, async_op=True)

    def summed(self, back: Tensor) -> Tensor:
        """The sum over the ranks of gradients that came back where all ranks get all rows, in float32 and rounded."""
        return back.unflatten(0, (-1, self.held)).sum(dim=0)


@dataclass
class PendingTransfer:
    """A collective that was started, with what is sent, which has to live until it is done."""

    handle: Any  # of torch.distributed
    sent: Tensor
    received: Tensor

    def wait(self) -> Tensor:
        """The received rows. On a GPU the current stream waits, not the host."""
        if self.handle is not None:
            self.handle.wait()
        self.handle = None
        return self.received


def head_start(device: torch.device) -> None:
    """Let collectives that were started begin before what is enqueued next: kernels of attention fill the GPU, and a
    collective that comes after one waits for its end."""
    if device.type == "cuda":
        torch.cuda._sleep(_HEAD_START)
