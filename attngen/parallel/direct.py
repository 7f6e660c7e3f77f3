"""Keys sent from where they lie among a rank's keys to where they belong among another's, without copies.

A collective gathers what it sends, and what arrives lies in the order of the ranks. For long exchanges of few runs of
rows, such as the chunks of a causal mask, each run is a point-to-point transfer instead, all in one batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist
from torch import Tensor

from attngen.parallel.assembly import Assembly
from attngen.parallel.exchange import Group, on_wire
from attngen.parallel.gathers import Gather, of_each, side_by_side, widths_of
from attngen.parallel.routes import Needs
from attngen.parallel.transfers import PendingTransfer, Transfer

#: Most runs that a rank sends and receives in a batch: the host starts each by itself. Not measured.
MOST_RUNS = 64


class Run(NamedTuple):
    """Tiles ``begin`` to ``end - 1``, held by one rank and needed by another."""

    source: int
    target: int
    begin: int
    end: int


def runs_of(needs: Needs) -> list[Run]:
    """Runs of rows that ranks send to each other, the same list on every rank."""
    owner, runs = needs.sharding.owner, list[Run]()
    for target, needed in enumerate(needs.tiles):
        source = np.where(needed & (owner != target), owner, -1)
        breaks = np.flatnonzero(np.diff(source, prepend=-1, append=-1))
        for begin, end in zip(breaks[:-1].tolist(), breaks[1:].tolist(), strict=True):
            if source[begin] >= 0:
                runs.append(Run(int(source[begin]), target, begin, end))
    return runs


class _Window(NamedTuple):
    """Rows of the keys, or of copies, that go to a rank or come from it; ``tag`` tells runs between two ranks apart."""

    peer: int
    start: int
    rows: int
    tag: int
    copied: bool


@dataclass(frozen=True, eq=False)
class DirectTransfer:
    """The runs that one rank sends and gets: windows of its keys where a run lies in one piece there, and of copies
    elsewhere."""

    most: int  # runs that a rank sends and gets, over all ranks
    sends: tuple[_Window, ...]
    receives: tuple[_Window, ...]
    packed: Gather  # copies of own rows that are sent
    placed: Gather  # received rows at all other places where they are keys, from the keys and from copies

    @classmethod
    def of(cls, needs: Needs, rank: int, transfer: Transfer, assembly: Assembly) -> DirectTransfer | None:
        """The transfer of a rank; None, on all ranks, where there are too many runs."""
        runs = runs_of(needs)
        most = int(np.bincount([end for run in runs for end in (run.source, run.target)], minlength=1).max())
        if not runs or most > MOST_RUNS:
            return None
        # Keys that an own row is for the first time, and a received one for the last time: there most others follow.
        first: np.ndarray = np.full(transfer.held + transfer.received, -1, dtype=np.int64)
        last = first.copy()
        keys = np.flatnonzero(assembly.source >= 0)
        last[assembly.source[keys]] = keys
        first[assembly.source[keys[::-1]]] = keys[::-1]
        none: np.ndarray = np.empty(0, dtype=np.int64)
        sends, receives, packed, arrived = list[_Window](), list[_Window](), [none], [none]
        for run in runs:
            if rank not in (run.source, run.target):
                continue
            sending = run.source == rank
            place, windows, copies = (first, sends, packed) if sending else (last, receives, arrived)
            tiles: np.ndarray = np.arange(run.begin, run.end)
            rows = needs.sharding.spread(tiles, transfer.places[tiles])
            at = place[rows]
            copied = at[0] < 0 or bool((np.diff(at) != 1).any())
            start = sum(map(len, copies)) if copied else int(at[0])
            windows.append(_Window(run.target if sending else run.source, start, len(rows), run.begin, copied))
            if copied:
                copies.append(rows)
        own, received = np.concatenate(packed), np.concatenate(arrived)
        last[received] = assembly.rows + np.arange(len(received))  # copies count behind the keys
        late = keys[assembly.source[keys] >= transfer.held]
        origin = last[assembly.source[late]]
        moved = origin != late
        number = np.arange(len(late))
        return cls(
            most, tuple(sends), tuple(receives), Gather(len(own), np.arange(len(own)), own),
            Gather(int(moved.sum()), number[: int(moved.sum())], origin[moved], late[moved]),
        )  # fmt: skip

    def start(self, keys: Tensor, k: Tensor, v: Tensor, group: Group) -> PendingTransfer:
        """Start to send and to receive rows of ``keys``, (batch, keys, width), where own rows are already. k and v are
        own rows, (batch, rows, heads, head_dim)."""
        batch, _, width = keys.shape
        sent, received = (
            keys.new_empty((batch, sum(each.rows for each in windows if each.copied), width))
            for windows in (self.sends, self.receives)
        )
        self.packed(side_by_side(sent, widths_of(k, v), batch_first=True), of_each(k, v))
        wire = on_wire(group)
        operations = [
            dist.P2POp(operation, wire((copies if each.copied else keys)[sequence].narrow(0, each.start, each.rows)),
                       group=group, tag=each.tag, group_peer=each.peer)
            for operation, windows, copies in ((dist.isend, self.sends, sent), (dist.irecv, self.receives, received))
            for each in windows
            for sequence in range(batch)
        ]  # fmt: skip
        return PendingTransfer(_Works(dist.batch_isend_irecv(operations) if operations else []), sent, received)

    def put_received(self, keys: Tensor, widths: Sequence[int], received: Tensor) -> None:
        """Put rows that have arrived where else they are keys."""
        sides = [side_by_side(x, widths, batch_first=True) for x in (keys, received)]
        self.placed(sides[0], *sides[: 1 + bool(received.shape[1])])


class _Works:
    """The works of a batch."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        """Wait for all of them."""
        for work in self._works:
            work.wait()
