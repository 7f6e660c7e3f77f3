"""Tiles of keys that each tile of queries visits in one call: by the bands of its mask, evaluated for all tiles at
once; what bands do not bound is classified tile by tile, with the least and greatest values of what it reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from attngen.lang.bands import bands, classify
from attngen.lang.facts import KV_START, Q_START, Facts
from attngen.lang.ir import Expr, Type
from attngen.lang.searches import evaluate_bound
from attngen.lang.statistics import Statistic, separated
from attngen.lang.variant import Variant

#: Names by which a mask differs from head to head.
_HEADS = frozenset(("h", "hk", "heads", "kv_heads"))

#: Most nodes of a bound of a tile: the host has no registers to save. Not measured.
_NODES = 4096

#: Most tiles that are classified at once. Not measured.
_BLOCK = 2**20

T = TypeVar("T")


@dataclass(frozen=True)
class TileRuns:
    """Runs of tiles: the queries of tile ``row[i]`` visit the tiles of keys ``lo[i]`` to ``hi[i] - 1``.

    Runs of one sequence and head are disjoint; ``tiles`` counts the tiles of keys of each tile of queries, as the mean
    over heads and the sum over sequences.
    """

    row: np.ndarray
    lo: np.ndarray
    hi: np.ndarray
    tiles: np.ndarray
    _kept: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def ascending(self) -> bool:
        """Whether runs of later rows begin no earlier."""
        return bool((self.lo[1:] >= self.lo[:-1]).all())

    @cached_property
    def first(self) -> np.ndarray:
        """The first tile of keys of each tile of queries; itself for one that visits none."""
        first: np.ndarray = np.arange(len(self.tiles))
        none = self.tiles == 0
        ends = np.where(none, first, len(first))
        np.minimum.at(ends, self.row, self.lo)
        return ends

    @cached_property
    def last(self) -> np.ndarray:
        """The end of the tiles of keys of each tile of queries."""
        ends: np.ndarray = np.zeros(len(self.tiles), dtype=np.int64)
        np.maximum.at(ends, self.row, self.hi)
        return ends

    def of_owner(self, name: str, owner: np.ndarray, make: Callable[[TileRuns, np.ndarray, int], T], ranks: int) -> T:
        """Result of ``make`` for an assignment of tiles to ranks, kept until another assignment comes."""
        if name not in self._kept or self._kept[name][0] is not owner:
            self._kept[name] = owner, make(self, owner, ranks)
        result: T = self._kept[name][1]
        return result

    def needs(self, owner: np.ndarray, ranks: int) -> RankTiles:
        """Tiles of keys that each rank visits, if ``owner`` gives the rank of each tile."""
        return self.of_owner("needs", owner, RankTiles.of, ranks)

    def work(self, owner: np.ndarray, ranks: int) -> np.ndarray:
        """Tiles of keys that the rows of each rank visit, each as often as it is visited."""
        return self.of_owner("work", owner, _work, ranks)

    def in_documents(self, offsets: Sequence[int], tile: int, seqlen: int, *, positions: bool) -> TileRuns:
        """The visits of packed documents, from those of one sequence, for a variant that sees the same distances in
        both; without ``positions`` rows see all of their document."""
        begins = np.asarray(offsets, dtype=np.int64)
        first: np.ndarray = np.arange(len(self.tiles)) * tile
        last = np.minimum(first + tile, seqlen) - 1
        of_first, of_last = (np.searchsorted(begins, rows, side="right") - 1 for rows in (first, last))
        begin = begins[of_first] // tile
        if positions:
            lo = np.maximum(self.lo, begin[self.row])
            some = lo < self.hi
            row, lo, hi = self.row[some], lo[some], self.hi[some]
        else:
            row, lo, hi = np.arange(len(self.tiles)), begin, -(-begins[of_last + 1] // tile)
        return TileRuns(row, lo, hi, np.bincount(row, weights=hi - lo, minlength=len(self.tiles)))

    def received(self, owner: np.ndarray, ranks: int) -> np.ndarray:
        """Number of tiles of keys that each rank visits and does not hold."""
        return self.of_owner("received", owner, _received, ranks)


def _work(visited: TileRuns, owner: np.ndarray, ranks: int) -> np.ndarray:
    return np.bincount(owner, weights=visited.tiles, minlength=ranks)


def _received(visited: TileRuns, owner: np.ndarray, ranks: int) -> np.ndarray:
    needs = visited.needs(owner, ranks)
    return needs.counts - np.bincount(owner, weights=needs.visited_by(owner), minlength=ranks)


def in_order_of_ranks(rank: np.ndarray, ranks: int) -> np.ndarray:
    """Order of entries by their ranks, and as they are within each."""
    if ranks <= np.iinfo(np.int16).max:
        rank = rank.astype(np.int16)  # small numbers sort in linear time
    return rank.argsort(kind="stable")


def runs_of_tiles(owner: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first tile, and the end, of the run of tiles of one rank that each tile lies in."""
    breaks = np.concatenate([[0], np.flatnonzero(np.diff(owner)) + 1, [len(owner)]])
    counts = np.diff(breaks)
    return np.repeat(breaks[:-1], counts), np.repeat(breaks[1:], counts)


@dataclass(frozen=True, eq=False)
class RankTiles:
    """Tiles of keys of each rank, as runs on one line, which do not touch: rank r has the places from r * tiles on."""

    ranks: int
    tiles: int
    begin: np.ndarray  # ascending
    end: np.ndarray

    @classmethod
    def of(cls, visited: TileRuns, owner: np.ndarray, ranks: int) -> RankTiles:
        """The tiles that the rows of each rank visit."""
        rank, tiles = owner[visited.row], len(owner)
        if visited.ascending:
            order = in_order_of_ranks(rank, ranks)
        else:
            order = (rank * tiles + visited.lo).argsort(kind="stable")
        start = rank[order] * tiles
        lo, hi = start + visited.lo[order], start + visited.hi[order]
        reach = np.maximum.accumulate(hi)
        begins: np.ndarray = np.flatnonzero((lo[1:] > reach[:-1]) | (start[1:] != start[:-1])) + 1
        begins = np.concatenate([[0], begins]) if len(lo) else begins
        ends: np.ndarray = np.append(begins[1:], len(lo))[: len(begins)] - 1
        return cls(ranks, tiles, lo[begins], reach[ends])

    @classmethod
    def all_of(cls, ranks: int, tiles: int) -> RankTiles:
        """All tiles of every rank."""
        begin: np.ndarray = np.arange(ranks) * tiles
        return cls(ranks, tiles, begin, begin + tiles)

    @cached_property
    def counts(self) -> np.ndarray:
        """Number of tiles of each rank."""
        counts = np.bincount(self.begin // self.tiles, weights=self.end - self.begin, minlength=self.ranks)
        return counts.astype(np.int64)

    @cached_property
    def complete(self) -> bool:
        """Whether each rank has all tiles."""
        return int(self.counts.sum()) == self.ranks * self.tiles

    @cached_property
    def spans(self) -> np.ndarray:
        """Tiles from the first to the last one of each rank."""
        rank: np.ndarray = self.begin // self.tiles
        spans: np.ndarray = np.zeros(self.ranks, dtype=np.int64)
        first: np.ndarray = np.flatnonzero(np.diff(rank, prepend=-1))
        last: np.ndarray = np.flatnonzero(np.diff(rank, append=self.ranks))
        spans[rank[first]] = self.end[last] - self.begin[first]
        return spans

    def rows(self, bounds: np.ndarray) -> np.ndarray:
        """Rows of the tiles of each rank. ``bounds``: the first row of each tile, and the end of the last one."""
        rank: np.ndarray = self.begin // self.tiles
        begin: np.ndarray = rank * self.tiles
        return np.bincount(rank, weights=bounds[self.end - begin] - bounds[self.begin - begin], minlength=self.ranks)

    @cached_property
    def table(self) -> np.ndarray:
        """Table of the tiles of each rank: bools (ranks, tiles)."""
        places = np.concatenate([[0], np.stack([self.begin, self.end], axis=1).ravel(), [self.ranks * self.tiles]])
        here: np.ndarray = np.zeros(len(places) - 1, dtype=bool)
        here[1::2] = True
        return np.repeat(here, np.diff(places)).reshape(self.ranks, self.tiles)

    def visited_by(self, ranks: np.ndarray) -> np.ndarray:
        """Whether each tile is one of those of the rank that is given for it."""
        if not len(self.begin):
            return np.zeros(self.tiles, dtype=bool)
        places = ranks * self.tiles + np.arange(self.tiles)
        run = np.searchsorted(self.begin, places, side="right") - 1
        return (run >= 0) & (self.end[run] > places)


def visits(
    variant: Variant, seqlen: int, tile: int, values: Mapping[str, Any], batch: int, heads: int, kv_heads: int
) -> TileRuns:
    """Find the tiles of ``tile`` keys that each tile of ``tile`` queries visits in a dense call of ``seqlen`` tokens.

    ``values`` holds all that the mask reads, tensors on the CPU. What is visited is never less than what is visible.
    """
    read, loaded = variant.uses(variant.mask)
    shapes = {extent for name in loaded for extent in variant.tensor(name).shape}
    sequences = batch if "b" in read or "b" in shapes else 1
    places = [(b, h) for b in range(sequences) for h in range(heads if read & _HEADS else 1)]
    each = [_SequenceGrid(variant, seqlen, tile, values, place, (batch, heads, kv_heads)).runs() for place in places]
    row, lo, hi = (np.concatenate(parts) for parts in zip(*each, strict=True))
    tiles = np.bincount(row, weights=hi - lo, minlength=-(-seqlen // tile))
    return TileRuns(row, lo, hi, tiles * (batch / len(places)))


class _SequenceGrid:
    """All tiles of queries of one sequence and head: their corners as a column of numbers."""

    def __init__(
        self, variant: Variant, seqlen: int, tile: int, values: Mapping[str, Any], place: tuple[int, int],
        sizes: tuple[int, int, int],
    ) -> None:  # fmt: skip
        self._variant, self._seqlen, self._tile = variant, seqlen, tile
        self._count = -(-seqlen // tile)
        self._facts = Facts.of(variant)
        self._tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        (b, h), (batch, heads, kv_heads) = place, sizes
        self._plain: dict[str, Any] = {
            "seqlen_q": seqlen, "seqlen_k": seqlen, "total_q": batch * seqlen, "total_k": batch * seqlen,
            "heads": heads, "kv_heads": kv_heads, "b": b, "h": h, "hk": h // max(heads // kv_heads, 1),
            **{s.name: s.const for s in variant.scalars if s.const is not None},
            **{name: value for name, value in values.items() if name not in self._tensors},
            Q_START.name: b * seqlen, KV_START.name: b * seqlen,
        }  # fmt: skip
        self._plain |= {
            extent: length
            for name, tensor in self._tensors.items()
            for extent, length in zip(variant.tensor(name).shape, tensor.shape, strict=True)
            if isinstance(extent, str) and extent not in self._plain
        }
        first = torch.arange(self._count, device="cpu") * tile
        last = (first + tile - 1).clamp(max=seqlen - 1)
        self._corners = {"q_lo": first, "q_hi": last, "q_pos_lo": first, "q_pos_hi": last}

    def runs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Row, first and last tile (exclusive) of each run."""
        known = bands(self._variant.mask, self._facts, over="kv")
        tiles = np.arange(self._count)
        lows, highs = [], []
        for interval in known.visible:
            lo, hi = (
                torch.tensor(bound, device="cpu") if end is None else self._value(end, self._corners)
                for end, bound in ((interval.lo, 0), (interval.hi, self._seqlen))
            )
            lo, hi = (end.clamp(0, self._seqlen).to(torch.int64).expand(self._count).numpy() for end in (lo, hi))
            first, last = lo // self._tile, -(-hi // self._tile)
            lows.append(np.where(lo < hi, first, self._count))
            highs.append(np.where(lo < hi, last, self._count))
        if not known.exact:
            return self._classified(lows, highs)
        rows, lo, hi = [tiles[:0]], [tiles[:0]], [tiles[:0]]
        order = np.argsort(np.array(lows).reshape(-1, self._count), axis=0, kind="stable")
        done: np.ndarray = np.zeros(self._count, dtype=np.int64)
        for place in range(len(lows)):
            column = order[place]
            first = np.maximum(np.array(lows)[column, tiles], done)
            last = np.array(highs)[column, tiles]
            some = first < last
            rows, lo, hi = [*rows, tiles[some]], [*lo, first[some]], [*hi, last[some]]
            done = np.maximum(done, last)
        return np.concatenate(rows), np.concatenate(lo), np.concatenate(hi)

    def _classified(self, lows: list[np.ndarray], highs: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Runs of the tiles within the bands of which some pair may be visible."""
        parts = separated(self._variant.mask, self._facts)
        may, _ = classify(parts.mask, self._facts, nodes=_NODES, statistics=parts.statistics)
        first = torch.arange(self._count, device="cpu")[None, :] * self._tile
        keys: dict[str, Tensor] = {"kv_lo": first, "kv_hi": (first + self._tile - 1).clamp(max=self._seqlen - 1)}
        queries = {name: corner[:, None] for name, corner in self._corners.items()}
        for statistic in parts.statistics:
            column = statistic.axis == "q"
            for name, end in self._ends(statistic):
                (queries if column else keys)[name] = end[:, None] if column else end[None, :]
        rows: list[np.ndarray] = []
        lo: list[np.ndarray] = []
        hi: list[np.ndarray] = []
        tiles = np.arange(self._count)
        height = max(_BLOCK // self._count, 1)
        for start in range(0, self._count, height):
            part = slice(start, min(start + height, self._count))
            corners = {**keys, **{name: corner[part] for name, corner in queries.items()}}
            shape = (part.stop - start, self._count)
            seen = self._value(may, corners).broadcast_to(shape).numpy()
            inside: np.ndarray = np.zeros(shape, dtype=bool)
            for low, high in zip(lows, highs, strict=True):
                inside |= (tiles >= low[part, None]) & (tiles < high[part, None])
            steps = np.diff((seen & inside).astype(np.int8), axis=1, prepend=0, append=0)
            where = np.nonzero(steps == 1)
            rows.append(where[0] + start)
            lo.append(where[1])
            hi.append(np.nonzero(steps == -1)[1])
        return np.concatenate(rows), np.concatenate(lo), np.concatenate(hi)

    def _ends(self, statistic: Statistic) -> Iterator[tuple[str, Tensor]]:
        """The least and greatest value of a statistic over each tile, its residues, and whether all are numbers, by
        their names."""
        first = torch.arange(self._count, device="cpu")[:, None] * self._tile
        axes = ("q", "q_pos", "q_global") if statistic.axis == "q" else ("kv", "kv_global")
        places = (first + torch.arange(self._tile, device="cpu")[None, :]).clamp(max=self._seqlen - 1)
        values, guard = (
            self._value(each, dict.fromkeys(axes, places)).broadcast_to(places.shape)
            for each in (statistic.value, statistic.guard)
        )
        if statistic.value.type is Type.BOOL:
            values = values.to(torch.int8)
        counted = guard.int().argmax(1, keepdim=True)  # a position that meets the guard, if any does
        values = torch.where(guard, values, values.gather(1, counted))
        floats = values.is_floating_point()
        least, greatest = values.nan_to_num(nan=torch.inf).amin(1) if floats else values.amin(1), values.amax(1)
        for name, end in zip(statistic.ends, (least, greatest), strict=True):
            yield name.name, end.bool() if statistic.value.type is Type.BOOL else end
        if statistic.value.type is Type.INT:
            residues = torch.stack([(values % 32 == residue).any(1) for residue in range(32)])
            yield statistic.residues.name, (residues << torch.arange(32, device="cpu")[:, None]).sum(0).int()
        if floats:
            yield statistic.numbers.name, ~values.isnan().any(1)

    def _value(self, expr: Expr, corners: Mapping[str, Any]) -> Tensor:
        """The value of an expression for all tiles."""
        return evaluate_bound(expr, {**self._plain, **corners}, self._tensors)
