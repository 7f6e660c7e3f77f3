"""Routes: which rows each rank sends to which, and where a received key lies, as numbers and as index tensors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from attngen.parallel.local import Positions
from attngen.parallel.sharding import Sharding
from attngen.parallel.visits import RankTiles

#: Keys that lie here as a run may have holes of this share, which cost memory; more, and a table says where they lie.
#: Not measured.
_HOLES = 0.875


@dataclass(frozen=True, eq=False)
class Needs:
    """Tiles of keys that each rank gets, and their places there."""

    sharding: Sharding
    runs: RankTiles
    keys: Positions

    @classmethod
    def of(cls, sharding: Sharding, runs: RankTiles) -> Needs:
        """Needs that lie as a run where that has few holes on every rank, else by a table."""
        if runs.complete:
            return cls(sharding, runs, "all")
        return cls(sharding, runs, "run" if (runs.counts >= runs.spans * (1 - _HOLES)).all() else "table")

    @classmethod
    def of_all(cls, sharding: Sharding) -> Needs:
        """All tiles on every rank."""
        return cls(sharding, RankTiles.all_of(sharding.ranks, len(sharding.owner)), "all")

    @property
    def tiles(self) -> np.ndarray:
        """The tiles of each rank: bools (ranks, tiles)."""
        return self.runs.table

    def place(self, rank: int) -> tuple[np.ndarray, int, int]:
        """Offset of each tile of keys on a rank (−1: it is not there), the first key's position, and the number of
        rows."""
        sharding, need = self.sharding, self.tiles[rank]
        held = np.flatnonzero(need)
        places: np.ndarray = np.full(len(need), -1, dtype=np.int64)
        if not len(held):
            return places, 0, 0
        if self.keys == "table":
            sizes = sharding.sizes[held]
            places[held] = np.cumsum(sizes) - sizes
            return places, int(sharding.bounds[held[0]]), int(sizes.sum())
        begin = 0 if self.keys == "all" else int(sharding.bounds[held[0]])
        end = sharding.seqlen if self.keys == "all" else int(sharding.bounds[held[-1] + 1])
        places[held] = sharding.bounds[held] - begin
        return places, begin, end - begin

    def route(self, rank: int) -> Route:
        """Rows that ``rank`` sends and receives."""
        sharding, owner = self.sharding, self.sharding.owner
        places, begin, rows = self.place(rank)
        mine = owner == rank
        sent = [np.flatnonzero(mine & self.tiles[other]) for other in range(sharding.ranks)]
        come = [np.flatnonzero((owner == other) & self.tiles[rank]) for other in range(sharding.ranks)]
        send = [sharding.spread(tiles, sharding.offsets[tiles]) for tiles in sent]
        receive = [sharding.spread(tiles, places[tiles]) for tiles in come]
        equal = int(sharding.counts.min()) == int(sharding.counts.max())
        return Route(
            rank,
            int(sharding.counts[rank]),
            rows,
            begin,
            self.keys == "all" and equal,
            tuple(map(len, send)),
            tuple(map(len, receive)),
            torch.from_numpy(np.concatenate(send)),
            torch.from_numpy(np.concatenate(receive)),
        )

    def key_positions(self, rank: int) -> np.ndarray:
        """Positions in the sequence of the keys on a rank, holes too."""
        if self.keys == "table":
            return self.sharding.spread(np.flatnonzero(self.tiles[rank]))
        _, begin, rows = self.place(rank)
        return np.arange(begin, begin + rows)

    @cached_property
    def received(self) -> np.ndarray:
        """Rows that each rank receives from others."""
        if self.keys == "all":
            return self.sharding.seqlen - self.sharding.counts
        sharding = self.sharding
        rows = self.runs.rows(sharding.bounds)
        own = np.where(self.runs.visited_by(sharding.owner), sharding.sizes, 0)
        return (rows - np.bincount(sharding.owner, weights=own, minlength=sharding.ranks)).astype(np.int64)


@dataclass(frozen=True)
class Route:
    """Rows that one rank sends and receives: local rows in the order of the ranks that get them, and the places of
    those that arrive, in the order of the ranks that they come from. Rows that stay here are in both."""

    rank: int
    held: int  # rows of this rank
    rows: int  # keys that lie here afterwards
    begin: int  # position of the first of them, if they are a run
    gathers: bool  # every rank gets all rows, and all ranks hold as many
    send_counts: tuple[int, ...]
    receive_counts: tuple[int, ...]
    send: torch.Tensor
    receive: torch.Tensor

    @cached_property
    def dense(self) -> bool:
        """Whether every place gets a row."""
        return len(self.receive) == self.rows

    @cached_property
    def _on(self) -> dict[torch.device, tuple[Take, Put]]:
        return {}

    @cached_property
    def _takes(self) -> dict[torch.device, list[Take]]:
        return {}

    def send_takes(self, device: torch.device) -> list[Take]:
        """The rows that each rank gets."""
        if device not in self._takes:
            self._takes[device] = [Take.of(part, device) for part in self.send.split(list(self.send_counts))]
        return self._takes[device]

    def on(self, device: torch.device) -> tuple[Take, Put]:
        """Gather of the rows to send and scatter of those that arrive, with indices on ``device``."""
        if device not in self._on:
            self._on[device] = Take.of(self.send, device), Put(Take.of(self.receive, device), self.rows, self.dense)
        return self._on[device]


@dataclass(frozen=True)
class Take:
    """Some rows of a tensor in some order: as few slices, or by index."""

    index: torch.Tensor
    runs: tuple[tuple[int, int], ...]  # start and length, if there are few

    #: Most runs that are copied one by one.
    MOST = 8

    @classmethod
    def of(cls, index: torch.Tensor, device: torch.device) -> Take:
        """Take the rows of an index."""
        order = index.numpy()
        if not len(order):
            return cls(index.to(device), ())
        breaks: np.ndarray = np.flatnonzero(np.diff(order) != 1) + 1
        starts = np.concatenate([[0], breaks])
        runs: tuple[tuple[int, int], ...] = ()
        if len(starts) <= cls.MOST:
            lengths = np.diff(np.concatenate([starts, [len(order)]]))
            runs = tuple((int(order[s]), int(n)) for s, n in zip(starts, lengths, strict=True))
        return cls(index.to(device), runs)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows of a tensor, contiguous or a view."""
        if len(self.runs) == 1:
            return rows.narrow(0, *self.runs[0])
        if self.runs:
            return torch.cat([rows.narrow(0, *run) for run in self.runs])
        return rows.index_select(0, self.index)

    def add(self, total: torch.Tensor, rows: torch.Tensor) -> None:
        """Add rows to where they were taken from; no place is there twice, so that the order of sums is fixed."""
        if not self.runs:
            total.index_add_(0, self.index, rows.to(total.dtype))
            return
        start = 0
        for place, length in self.runs:
            total.narrow(0, place, length).add_(rows.narrow(0, start, length))
            start += length


@dataclass(frozen=True)
class Put:
    """The inverse of a ``Take``: rows go to their places of a new tensor, whose other rows are 0."""

    take: Take
    rows: int
    dense: bool

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """The new tensor."""
        runs = self.take.runs
        if self.dense and len(runs) == 1 and runs[0] == (0, len(rows)):
            return rows
        shape = (self.rows, *rows.shape[1:])
        whole = rows.new_empty(shape) if self.dense else rows.new_zeros(shape)
        if not runs:
            return whole.index_copy_(0, self.take.index, rows)
        start = 0
        for place, length in runs:
            whole.narrow(0, place, length).copy_(rows.narrow(0, start, length))
            start += length
        return whole
