"""Assignment of a sequence's tiles to ranks: equal numbers of tokens, balanced work, few bytes.

Several ways to cut and deal are tried: one run for each rank, and chunks dealt by their work, heaviest first, to the
rank that has least, then swapped between the rank that has most and others. Where two equal chunks for each rank are
not balanced, two of different lengths may be: a few of the first tiles, which are light under a window, and a run of
the others. The least predicted time wins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from attngen.parallel.cost import Cost
from attngen.parallel.overlap import overlap
from attngen.parallel.visits import TileRuns, runs_of_tiles

#: Chunks for each rank that are tried. Not measured.
CHUNKS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)

#: Work of the rank that has most, over the mean, which is not looked at any more. Not measured.
_BALANCED = 1.002

#: Number of ranks, those with least work, with which the rank that has most may swap
#: (docs/notebook/parallel.md, "Time of a plan").
_PARTNERS = 12

#: Seconds that a further run of rows costs a layer on a rank: a call of its own in a forward, and rows between others
#: (docs/notebook/parallel.md, "Two GPUs").
_RUN = 60e-6

#: Time of a finer cut, over that of the best one so far, that is better. Not measured.
_GAIN = 0.99

#: No cut is tried if packed documents take at most so many times as long as equal work without an exchange, and the
#: rank that has most work has at most so many times the mean (docs/notebook/parallel.md, "Two long documents on many
#: ranks").
_ENOUGH, _EVEN = 1.3, 1.05

#: The search ends after so many finer cuts in a row that are no better than the best one so far
#: (docs/notebook/parallel.md, "Time of a plan").
_WORSE = 3

#: Least share of the time of an exchange that is not hidden: rows are copied before and after. Not measured.
_COPIED = 0.25


@dataclass(frozen=True)
class Assignment:
    """The rank of each tile, the predicted seconds, and the chunks that each rank has."""

    owner: np.ndarray
    seconds: float
    chunks: int


@dataclass(frozen=True)
class VariantLoad:
    """The visits of a variant, how many layers have it, and whether ranks call it over segments, so that rows which see
    only keys of their own run need not wait for others. Where heads are alike, they can be computed in groups."""

    visits: TileRuns
    layers: float
    segments: bool
    heads_alike: bool

    def seconds(
        self, owner: np.ndarray, runs: tuple[np.ndarray, np.ndarray], ranks: int, tile: int, cost: Cost, *, whole: bool
    ) -> float:
        """Predicted seconds of the rank that takes longest; with ``whole`` all keys are sent, whoever holds which.
        ``runs``: the run of its rank that each tile lies in."""
        tiles = self.visits.tiles
        work = np.bincount(owner, weights=tiles, minlength=ranks)
        sending = self.visits.received(owner, ranks) if not whole else np.zeros(ranks)
        tile_seconds, token_seconds = cost.of_tiles(1.0, tile), cost.of_tokens(float(tile))
        if not self.segments:
            return float((work * tile_seconds + sending * (token_seconds / cost.kv_heads)).max() * self.layers)
        start, end = runs
        here = (self.visits.first >= start) & (self.visits.last <= end)
        hidden = np.bincount(owner, weights=np.where(here, tiles, 0.0), minlength=ranks) * tile_seconds
        exposed = np.maximum(sending * token_seconds - hidden, sending * (token_seconds * _COPIED))
        return float((work * tile_seconds + exposed).max() * self.layers)


def assign(
    each: Sequence[VariantLoad], tiles: int, ranks: int, tile: int, cost: Cost, *,
    chunks: int | None = None, whole: bool = False,
) -> Assignment:  # fmt: skip
    """Deal ``tiles`` to ``ranks``, balanced for all variants together.

    ``chunks`` fixes how many each rank gets. With ``whole`` all keys are sent anyway.
    """
    sums = np.concatenate([[0.0], np.cumsum(sum(one.visits.tiles * one.layers for one in each))])
    fair = cost.of_tiles(sums[-1] / ranks, tile)  # no cut takes less
    packed = _packed(each, tiles, ranks) if chunks is None and ranks > 1 and not whole else None
    if packed is not None:
        of_packed = Assignment(packed, overlapped(each, packed, ranks, tile, cost), runs_of_a_rank(packed, ranks))
        if is_enough(each, of_packed, ranks, tile, cost):
            return of_packed
    most = max(tiles // ranks, 1)
    tried = [chunks] if chunks is not None else [n for n in CHUNKS if n <= most]
    best: Assignment | None = None
    worse = 0
    for number in tried:
        owner = _dealt(sums, tiles, ranks, number)
        computing = cost.of_tiles(_computing(each, owner, ranks), tile)
        if best is not None and computing > best.seconds * _GAIN:
            seconds = np.inf  # whatever it sends
        else:
            runs = runs_of_tiles(owner)
            seconds = sum(one.seconds(owner, runs, ranks, tile, cost, whole=whole) for one in each)
        worse += 1
        if best is None or seconds < best.seconds * _GAIN:
            best, worse = Assignment(owner, seconds, number), 0
        if worse == _WORSE or computing <= _BALANCED * fair:  # finer cuts send more
            break
        if number == 2 and chunks is None and not whole:
            owner = _from_both_ends(sums, ranks)
            computing = cost.of_tiles(_computing(each, owner, ranks), tile)
            seconds = overlapped(each, owner, ranks, tile, cost) + _RUN * sum(one.layers for one in each)
            if seconds < overlapped(each, best.owner, ranks, tile, cost) * _GAIN:
                best, worse = Assignment(owner, seconds, number), 0
                if computing <= _BALANCED * fair:
                    break
    assert best is not None
    if packed is not None and of_packed.seconds < overlapped(each, best.owner, ranks, tile, cost):
        return of_packed
    return best


def is_enough(each: Sequence[VariantLoad], packed: Assignment, ranks: int, tile: int, cost: Cost) -> bool:
    """Whether documents are packed into ranks so well that no other way to deal them need be tried."""
    mean = sum(float(one.visits.tiles.sum()) * one.layers for one in each) / ranks
    even = _computing(each, packed.owner, ranks) <= _EVEN * mean
    return even and packed.seconds <= _ENOUGH * cost.of_tiles(mean, tile)


def runs_of_a_rank(owner: np.ndarray, ranks: int) -> int:
    """Mean number of runs of tiles of a rank, rounded up."""
    return -(-int(np.count_nonzero(np.diff(owner)) + 1) // ranks)


def overlapped(each: Sequence[VariantLoad], owner: np.ndarray, ranks: int, tile: int, cost: Cost) -> float:
    """Predicted seconds of all variants, if each overlaps as is best for it."""
    return sum(
        one.layers
        * overlap(
            one.visits, owner, one.visits.received(owner, ranks) * tile, tile, cost, segments=one.segments,
            heads_alike=one.heads_alike,
        )[1]
        for one in each
    )  # fmt: skip


def _packed(each: Sequence[VariantLoad], tiles: int, ranks: int) -> np.ndarray | None:
    """The rank of each tile if whole documents are packed into ranks, and few are cut; None without documents.

    Documents are ordered from the heaviest tiles to the lightest, the tiles of each from its last one to its first.
    """
    starts = _independent(each, tiles)
    if not 2 <= len(starts) <= tiles // 2 or tiles < ranks:  # others are so short that any cut is as good
        return None
    work = sum(one.visits.tiles * one.layers for one in each)
    sizes: np.ndarray = np.diff(np.append(starts, tiles))
    heaviest = np.argsort(-np.add.reduceat(work, starts) / sizes, kind="stable")
    ends, counts = (starts + sizes)[heaviest], sizes[heaviest]
    order = np.repeat(ends - 1 + np.cumsum(counts) - counts, counts) - np.arange(tiles)
    rank_of = _from_both_ends(np.concatenate([[0.0], np.cumsum(work[order])]), ranks)
    owner = np.empty_like(rank_of)
    owner[order] = rank_of
    return owner


def _from_both_ends(sums: np.ndarray, ranks: int) -> np.ndarray:
    """The rank of each tile if each rank takes tiles from both ends of what is left, as many of the first as make its
    work a fair share. ``sums`` are prefix sums of the work of tiles."""
    tiles = len(sums) - 1
    rank_of: np.ndarray = np.empty(tiles, dtype=np.int64)
    begin, end = 0, tiles
    for rank in range(ranks):
        count = (rank + 1) * tiles // ranks - rank * tiles // ranks
        # the load with so many of the first tiles, but for what is the same for all numbers of them
        loads = sums[begin : begin + count + 1] - sums[end - count : end + 1]
        fair = (sums[end] - sums[begin]) / (ranks - rank) + sums[begin] - sums[end]
        first = int(np.abs(loads - fair).argmin())
        rank_of[begin : begin + first] = rank
        rank_of[end - count + first : end] = rank
        begin, end = begin + first, end - count + first
    return rank_of


def _independent(each: Sequence[VariantLoad], tiles: int) -> np.ndarray:
    """The first tile of each run of tiles that sees itself alone, as a document does, but for a tile at its edge."""
    place: np.ndarray = np.arange(tiles)
    starts = place >= 0
    for one in each:
        after = np.minimum.accumulate(one.visits.first[::-1])[::-1]
        before = np.concatenate([[0], np.maximum.accumulate(one.visits.last)[:-1]])
        starts &= (after >= np.where(place > 1, place - 1, place)) & (before <= place + 1)
    starts[0] = True
    return np.flatnonzero(starts)


def _computing(each: Sequence[VariantLoad], owner: np.ndarray, ranks: int) -> float:
    """Tiles of the busiest rank, added up over the variants and their layers."""
    return sum(float(np.bincount(owner, weights=one.visits.tiles, minlength=ranks).max()) * one.layers for one in each)


def _dealt(sums: np.ndarray, tiles: int, ranks: int, chunks: int) -> np.ndarray:
    """The rank of each tile if each rank gets ``chunks`` runs of tiles. ``sums`` are prefix sums of the work of
    tiles."""
    if ranks == 1:
        return np.zeros(tiles, dtype=np.int64)
    count = ranks * chunks
    starts: np.ndarray = np.arange(count + 1) * tiles // count
    sizes = np.diff(starts)
    if chunks == 1:
        return np.repeat(np.arange(ranks), sizes)
    weights = np.diff(sums[starts])
    chunks_of: np.ndarray = np.empty((ranks, chunks), dtype=np.int64)
    load = np.zeros(ranks)
    order = np.lexsort((np.arange(count), -weights, -sizes))  # larger ones first, so that all get as many tokens
    for place in range(chunks):
        some = order[place * ranks : (place + 1) * ranks]
        some = some[np.argsort(-weights[some], kind="stable")]
        least = np.argsort(load, kind="stable")
        chunks_of[least, place] = some
        load[least] += weights[some]
    _swap(chunks_of, weights, sizes, load)
    rank_of: np.ndarray = np.empty(count, dtype=np.int64)
    rank_of[chunks_of] = np.arange(ranks)[:, None]
    return np.repeat(rank_of, sizes)


def _swap(chunks_of: np.ndarray, weights: np.ndarray, sizes: np.ndarray, load: np.ndarray) -> None:
    """Swap chunks of one size between the rank with most work and those with least, as long as the maximum falls."""
    enough = _BALANCED * load.mean()
    chunks = chunks_of.shape[1]
    for _ in range(4 * len(load)):
        most = int(load.argmax())
        if load[most] <= enough:
            return
        others = np.argpartition(load, min(_PARTNERS, len(load) - 1))[:_PARTNERS]
        others = others[others != most]
        mine, theirs = chunks_of[most], chunks_of[others]
        moved = weights[mine][:, None, None] - weights[theirs]
        after = np.maximum(load[most] - moved, load[others][:, None] + moved)
        after[sizes[mine][:, None, None] != sizes[theirs]] = np.inf
        place = int(after.argmin())
        if not after.flat[place] < load[most] * (1 - 1e-6):
            return
        a, rest = divmod(place, len(others) * chunks)
        row, b = divmod(rest, chunks)
        other, step = int(others[row]), float(moved.flat[place])
        load[most] -= step
        load[other] += step
        chunks_of[most, a], chunks_of[other, b] = chunks_of[other, b], chunks_of[most, a]
