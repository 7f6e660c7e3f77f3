"""Tiles of packed documents, each of one document, and which rank gets which of them.

A tile with the end of one document and the beginning of another would lie on one rank, and rows of the other document
would wait for the few keys that it has of theirs. Where documents are packed into ranks whole, most of them then need
nothing from other ranks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from attngen.parallel.visits import TileRuns

#: Most tiles, over those of one sequence without documents: more documents are so short that their tiles are small. Not
#: measured.
_MOST = 1.5

#: Deals of rows that are looked at together, for so few ranks: one tile of a long document is some percent of a rank's
#: work there (docs/notebook/parallel.md, "Tiles of one document").
_DEALS, _FEW_RANKS = 8, 8


@dataclass(frozen=True, eq=False)
class DocumentTiles:
    """Tiles of at most ``tile`` rows: the first row of each, its document, and the number of its tile in the document.

    Tiles that were cut in two have the same number.
    """

    begins: np.ndarray
    document: np.ndarray
    number: np.ndarray
    seqlen: int
    tile: int

    @classmethod
    def of(cls, offsets: Sequence[int], tile: int) -> DocumentTiles | None:
        """The tiles of documents between these offsets; None where documents are few or short."""
        bounds = _distinct(np.asarray(offsets, dtype=np.int64))
        counts = -(-np.diff(bounds) // tile)
        if len(counts) < 2 or int(counts.sum()) > _MOST * (int(bounds[-1]) / tile):
            return None
        document: np.ndarray = np.repeat(np.arange(len(counts)), counts)
        number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
        return cls(bounds[document] + number * tile, document, number, int(bounds[-1]), tile)

    @cached_property
    def ends(self) -> np.ndarray:
        """The end of each tile."""
        return np.append(self.begins[1:], self.seqlen)

    def cut(self, rows: np.ndarray) -> DocumentTiles:
        """The same tiles, cut before some rows."""
        begins = _distinct(np.sort(np.append(self.begins, rows[rows < self.seqlen])))
        origin: np.ndarray = _places(self.begins, begins + 1) - 1
        return DocumentTiles(begins, self.document[origin], self.number[origin], self.seqlen, self.tile)

    def work(self, alone: TileRuns, *, positions: bool) -> np.ndarray:
        """The work of each tile: the tiles of keys that it visits; see ``visits``."""
        if positions:
            return alone.tiles[self.number]
        return np.bincount(self.document)[self.document]

    def visits(self, alone: TileRuns, *, positions: bool) -> TileRuns:
        """The visits of these tiles, from those of one sequence as long as all documents, for a variant that sees the
        same distances in both, and no later keys; without ``positions`` rows see all of their document.

        Of tiles that were cut in two, each visits all that the whole one did, up to itself; a cut tile of keys counts
        once.
        """
        count = len(self.begins)
        base: np.ndarray = self.document * (count + 1)
        key = base + self.number  # ascending
        if not positions:
            row: np.ndarray = np.arange(count)
            lo, hi = _places(key, base), _places(key, base + count)
            tiles = self.number[hi - 1] + 1
        else:
            order = np.argsort(alone.row, kind="stable")
            start = _places(alone.row[order], np.arange(len(alone.tiles) + 1))
            first, runs = start[self.number], start[self.number + 1] - start[self.number]
            row = np.repeat(np.arange(count), runs)
            of_run = order[np.repeat(first - np.cumsum(runs) + runs, runs) + np.arange(len(row))]
            lo = _places(key, base[row] + alone.lo[of_run])
            hi = np.minimum(_places(key, base[row] + alone.hi[of_run]), row + 1)
            some = lo < hi
            row, lo, hi = row[some], lo[some], hi[some]
            tiles = np.bincount(row, weights=self.number[hi - 1] + 1 - self.number[lo], minlength=count)
        return TileRuns(row, lo, hi, tiles)

    def covering(self, visited: TileRuns) -> TileRuns:
        """At least the visits of these tiles, from those of equal tiles of the whole sequence, for any variant."""
        first: np.ndarray = self.begins // self.tile
        last: np.ndarray = (self.ends - 1) // self.tile
        lo = np.minimum(visited.first[first], visited.first[last]) * self.tile
        hi = np.minimum(np.maximum(visited.last[first], visited.last[last]) * self.tile, self.seqlen)
        row = np.flatnonzero(lo < hi)
        lo, hi = _places(self.begins, lo[row] + 1) - 1, _places(self.begins, hi[row])
        return TileRuns(row, lo, hi, np.bincount(row, weights=hi - lo, minlength=len(self.begins)))

    def packed(self, work: np.ndarray, ranks: int) -> tuple[DocumentTiles, np.ndarray]:
        """Tiles, some of which are cut, and the rank of each: documents are packed whole, but for few that are cut, and
        all ranks get as many rows. ``work`` is that of each tile.

        Documents are ordered from the heaviest rows to the lightest, the tiles of each from its last one to its first.
        Each rank takes rows from both ends of what is left, as many of the first as make its work a fair share.
        """
        sizes = self.ends - self.begins
        starts = np.flatnonzero(np.diff(self.document, prepend=-1))
        rows_of = np.add.reduceat(sizes, starts)
        heaviest = np.argsort(-np.add.reduceat(work, starts) / rows_of, kind="stable")
        counts = np.diff(np.append(starts, len(sizes)))[heaviest]
        ends = starts[heaviest] + counts
        order = np.repeat(ends - 1 + np.cumsum(counts) - counts, counts) - np.arange(len(sizes))
        rows = np.concatenate([[0], np.cumsum(sizes[order])])
        sums = np.concatenate([[0.0], np.cumsum(work[order])])
        deals = [_Deal(0.0, (0,), (self.seqlen,), 0.0, float(sums[-1]))]
        numbers, points = rows.tolist(), rows.astype(np.float64)
        for rank in range(ranks):
            count = (rank + 1) * self.seqlen // ranks - rank * self.seqlen // ranks
            every = [deal for before in deals for deal in before.then(numbers, points, sums, count, ranks - rank)]
            deals = sorted(every)[: _DEALS if ranks <= _FEW_RANKS else 1]
        bounds = [*deals[0].firsts, *deals[0].lasts[-2::-1]]
        owners = [*range(ranks), *range(ranks - 1, -1, -1)]
        cuts = np.asarray(bounds[1:-1], dtype=np.int64)
        place = np.minimum(_places(rows, cuts + 1) - 1, len(order) - 1)
        tiles = self.cut(self.ends[order[place]] - (cuts - rows[place]))
        place_of: np.ndarray = np.empty(len(order), dtype=np.int64)
        place_of[order] = rows[:-1]  # where each of these tiles lies in the order, its last rows first
        origin: np.ndarray = _places(self.begins, tiles.begins + 1) - 1
        at = place_of[origin] + self.ends[origin] - tiles.ends
        owner = np.asarray(owners)[_places(np.asarray(bounds[1:]), at + 1)]
        return tiles, owner


class _Deal(NamedTuple):
    """State of dealing rows to ranks: the most work of a rank, where the rows that each got from the begin end, and
    where those from the end begin, and the work before these places."""

    most: float
    firsts: tuple[int, ...]
    lasts: tuple[int, ...]
    at_begin: float
    at_end: float

    def then(self, numbers: list[int], points: np.ndarray, sums: np.ndarray, count: int, ranks: int) -> list[_Deal]:
        """Deals that also give ``count`` rows to the next of so many ``ranks``, about a fair share of the work.

        ``numbers`` and ``sums`` are rows and work before each tile, ``points`` these rows in floating point. Rows from
        the begin end with a tile, unless a rank gets no others.
        """
        begin, end = self.firsts[-1], self.lasts[-1]
        low, high = bisect_left(numbers, begin + 1), bisect_left(numbers, begin + count)
        ends: np.ndarray = np.empty((2, high - low + 2))
        firsts, lasts = ends
        firsts[0], firsts[1:-1], firsts[-1] = begin, points[low:high], begin + count
        np.add(firsts, end - count - begin, out=lasts)
        work = np.interp(ends, points, sums)
        loads = work[0] - work[1]
        loads += self.at_end - self.at_begin
        apart = np.abs(loads - (self.at_end - self.at_begin) / ranks)
        best = int(apart.argmin())
        chosen = [best]
        if len(apart) > 1:
            apart[best] = np.inf
            chosen.append(int(apart.argmin()))
        return [
            _Deal(
                max(self.most, float(loads[n])), (*self.firsts, int(firsts[n])), (*self.lasts, int(lasts[n])),
                float(work[0, n]), float(work[1, n]),
            )
            for n in chosen
        ]  # fmt: skip


def _distinct(ascending: np.ndarray) -> np.ndarray:
    """The values, each once."""
    return ascending[np.append(True, ascending[1:] != ascending[:-1])]


def _places(ascending: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Number of entries of ``ascending`` below each value."""
    return np.asarray(np.searchsorted(ascending, values))
