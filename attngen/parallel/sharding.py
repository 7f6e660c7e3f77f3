"""Shardings: which rows of a sequence each rank holds, tile by tile."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class Sharding:
    """Rows of a sequence by rank: tiles of ``tile`` rows, the last one ragged, or of at most as many rows where
    ``begins`` says which row is the first of each."""

    owner: np.ndarray
    ranks: int
    seqlen: int
    tile: int
    begins: np.ndarray | None = None

    @cached_property
    def bounds(self) -> np.ndarray:
        """The first row of each tile, and the end of the last one."""
        begins = np.arange(len(self.owner)) * self.tile if self.begins is None else self.begins
        return np.append(begins, self.seqlen)

    @cached_property
    def sizes(self) -> np.ndarray:
        """Rows of each tile."""
        return np.diff(self.bounds)

    def tiles_of(self, rows: np.ndarray) -> np.ndarray:
        """The tile that each row lies in."""
        if self.begins is None:
            return rows // self.tile
        return np.searchsorted(self.begins, rows, side="right") - 1

    def local(self, rows: np.ndarray) -> np.ndarray:
        """Local index of each row on the rank that holds it."""
        tiles = self.tiles_of(rows)
        places: np.ndarray = self.offsets[tiles] + rows - self.bounds[tiles]
        return places

    @cached_property
    def counts(self) -> np.ndarray:
        """Rows of each rank."""
        return np.bincount(self.owner, weights=self.sizes, minlength=self.ranks).astype(np.int64)

    @cached_property
    def one_holds_all(self) -> bool:
        """Whether a rank has all rows, and the others none: then its part of a tensor is the whole."""
        return int(self.counts.max()) == self.seqlen

    @cached_property
    def offsets(self) -> np.ndarray:
        """Offset of each tile on the rank that holds it."""
        starts: np.ndarray = np.empty(len(self.owner), dtype=np.int64)
        for rank in range(self.ranks):
            own = np.flatnonzero(self.owner == rank)
            starts[own] = np.cumsum(self.sizes[own]) - self.sizes[own]
        return starts

    def positions(self, rank: int) -> np.ndarray:
        """Positions in the sequence of the rows of a rank, ascending."""
        return self.spread(np.flatnonzero(self.owner == rank))

    def spread(self, tiles: np.ndarray, starts: np.ndarray | None = None) -> np.ndarray:
        """Rows of some tiles, one after the other; ``starts`` says where each begins, if not in the sequence."""
        sizes = self.sizes[tiles]
        first = self.bounds[tiles] if starts is None else starts
        return np.repeat(first - np.cumsum(sizes) + sizes, sizes) + np.arange(int(sizes.sum()))
