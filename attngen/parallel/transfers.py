"""Transfers: the rows that one rank sends to the others and gets from them, and collectives that are under way.

A collective is started, other work is enqueued, and what arrives is waited for: on a GPU by the stream alone. The way
back carries gradients of the rows that arrived, which are added up in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from attngen.parallel.exchange import Group, gather, on_wire
from attngen.parallel.routes import Needs, Take

#: Cycles of a GPU for which its stream waits, so that a collective's kernel starts before one that fills the GPU.
_HEAD_START = 20_000


@dataclass(frozen=True)
class Transfer:
    """What one rank sends and gets. Rows lie in two tensors: its own, and those that arrive, in the order of ranks.

    ``places`` says where each tile begins in both together, its own rows first, and is −1 for one that is in neither.
    Where all ranks get all rows, own rows arrive too, and those that arrived count.
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
        tokens, owner = needs.tokens, needs.tokens.owner
        counts, ranks = tokens.counts, range(tokens.ranks)
        mine = owner == rank
        gathers = bool(needs.tiles.all()) and int(counts.min()) == int(counts.max())
        others = [other for other in ranks if gathers or other != rank]
        sent = {other: np.flatnonzero(mine & needs.tiles[other]) for other in others}
        come = {other: np.flatnonzero((owner == other) & needs.tiles[rank]) for other in others}
        none: np.ndarray = np.empty(0, dtype=np.int64)
        send = [tokens.spread(tiles, tokens.offsets[tiles]) for tiles in sent.values()]
        places = np.where(mine, tokens.offsets, -1)
        order = np.concatenate([none, *come.values()])
        sizes = tokens.sizes[order]
        arrived = int(counts[rank]) + np.cumsum(sizes) - sizes
        places[order] = arrived
        return cls(
            int(counts[rank]),
            gathers,
            tuple(int(tokens.sizes[sent.get(other, none)].sum()) for other in ranks),
            tuple(int(tokens.sizes[come.get(other, none)].sum()) for other in ranks),
            np.concatenate([none, *send]),
            places,
        )

    @cached_property
    def received(self) -> int:
        """Rows that arrive."""
        return sum(self.receive_counts)

    def take(self, device: torch.device) -> Take:
        """What takes the rows that are sent."""
        if device not in self._takes:
            self._takes[device] = Take.of(torch.from_numpy(self.send), device)
        return self._takes[device]

    def take_back(self, device: torch.device) -> list[tuple[Take, int]]:
        """The own rows that gradients from each rank go to, and how many these are."""
        if device not in self._back:
            parts = np.split(self.send, list(accumulate(self.send_counts))[:-1])
            self._back[device] = [(Take.of(torch.from_numpy(part), device), len(part)) for part in parts if len(part)]
        return self._back[device]

    @cached_property
    def _takes(self) -> dict[torch.device, Take]:
        return {}

    @cached_property
    def _back(self) -> dict[torch.device, list[tuple[Take, int]]]:
        return {}

    def start(self, own: Tensor, group: Group) -> Flight:
        """Start to send own rows, contiguous, to the ranks that need them."""
        arrived = own.new_empty((self.received, *own.shape[1:]))
        wire = on_wire(group)
        if self.gathers:
            work = gather(wire(arrived), wire(own), group=group, async_op=True)
            return Flight(work, own, arrived)
        sent = self.take(own.device)(own)
        return Flight(self._exchanged(wire(arrived), wire(sent), self.receive_counts, self.send_counts, group),
                      sent, arrived)  # fmt: skip

    def start_back(self, gradients: Tensor, group: Group) -> Flight:
        """Start to send gradients of the rows that arrived, contiguous, to where they came from."""
        arrived = gradients.new_empty((len(self.send), *gradients.shape[1:]))
        wire = on_wire(group)
        work = self._exchanged(wire(arrived), wire(gradients), self.send_counts, self.receive_counts, group)
        return Flight(work, gradients, arrived)

    def _exchanged(
        self, arrived: Tensor, sent: Tensor, receive: Sequence[int], send: Sequence[int], group: Group
    ) -> Any:
        return dist.all_to_all_single(arrived, sent, list(receive), list(send), group=group, async_op=True)

    def collected(self, total: Tensor | None, back: Tensor) -> Tensor:
        """Gradients of the own rows: those that came back, rank by rank, and ``total``, in float32."""
        if total is None:  # own rows are among those that arrived
            return back.unflatten(0, (-1, self.held)).sum(dim=0)  # of float32 sums, rounded once
        start = 0
        for take, count in self.take_back(total.device):
            take.add(total, back.narrow(0, start, count))
            start += count
        return total


@dataclass
class Flight:
    """A collective that was started; ``sent`` is kept until it is done."""

    work: Any
    sent: Tensor | None
    arrived: Tensor

    def wait(self) -> Tensor:
        """What arrived. On a GPU the current stream waits, not the host."""
        if self.work is not None:
            self.work.wait()
        self.work = self.sent = None
        return self.arrived


def head_start(device: torch.device) -> None:
    """Let collectives that were started begin before what is enqueued next: kernels of attention fill the GPU, and a
    collective that comes after one waits for its end."""
    if device.type == "cuda":
        torch.cuda._sleep(_HEAD_START)
