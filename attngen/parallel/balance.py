"""Which rank gets which tiles of the sequence: equal numbers of tokens, balanced work, few bytes.

Several ways to cut and deal are tried: one run for each rank, and chunks dealt by their work, heaviest first, to the
rank that has least, then swapped between the rank that has most and others. The least predicted time wins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from attngen.parallel.cost import Cost
from attngen.parallel.visits import Visits, runs_of_tiles

#: Chunks for each rank that are tried.
CHUNKS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)

#: Work of the rank that has most, over the mean, which is not looked at any more.
_BALANCED = 1.002

#: A finer cut has to be better by this share.
_GAIN = 0.99

#: Least share of the time of an exchange that is not hidden: rows are copied before and after.
_COPIED = 0.25


@dataclass(frozen=True)
class Dealt:
    """The rank of each tile, the predicted seconds, and the chunks that each rank has."""

    owner: np.ndarray
    seconds: float
    chunks: int


@dataclass(frozen=True)
class Weighed:
    """The visits of a variant, how many layers have it, and whether ranks call it over segments, so that rows which see
    only keys of their own run need not wait for others."""

    visits: Visits
    layers: float
    segments: bool

    def seconds(self, owner: np.ndarray, ranks: int, tile: int, cost: Cost, *, whole: bool) -> float:
        """Predicted seconds of the rank that takes longest; with ``whole`` all keys are sent, whoever holds which."""
        tiles = self.visits.tiles
        work = np.bincount(owner, weights=tiles, minlength=ranks)
        sending = self.visits.received(owner, ranks) if not whole else np.zeros(ranks)
        tile_seconds, token_seconds = cost.of_tiles(1.0, tile), cost.of_tokens(float(tile))
        if not self.segments:
            return float((work * tile_seconds + sending * (token_seconds / cost.kv_heads)).max() * self.layers)
        start, end = runs_of_tiles(owner)
        here = (self.visits.first >= start) & (self.visits.last <= end)
        hidden = np.bincount(owner, weights=np.where(here, tiles, 0.0), minlength=ranks) * tile_seconds
        exposed = np.maximum(sending * token_seconds - hidden, sending * (token_seconds * _COPIED))
        return float((work * tile_seconds + exposed).max() * self.layers)


def deal(
    each: Sequence[Weighed], tiles: int, ranks: int, tile: int, cost: Cost, *,
    chunks: int | None = None, whole: bool = False,
) -> Dealt:  # fmt: skip
    """Deal ``tiles`` to ``ranks``, balanced for all variants together.

    ``chunks`` fixes how many each rank gets. With ``whole`` all keys are sent anyway.
    """
    work = sum(one.visits.tiles * one.layers for one in each)
    most = max(tiles // ranks, 1)
    tried = [chunks] if chunks is not None else [n for n in CHUNKS if n <= most]
    best: Dealt | None = None
    for number in tried:
        owner = _dealt(np.asarray(work), tiles, ranks, number)
        if best is not None:
            computing = sum(
                float(np.bincount(owner, weights=one.visits.tiles, minlength=ranks).max()) * one.layers for one in each
            )
            if cost.of_tiles(computing, tile) > best.seconds * _GAIN:
                continue  # whatever it sends
        seconds = sum(one.seconds(owner, ranks, tile, cost, whole=whole) for one in each)
        if best is None or seconds < best.seconds * _GAIN:
            best = Dealt(owner, seconds, number)
    assert best is not None
    return best


def _dealt(work: np.ndarray, tiles: int, ranks: int, chunks: int) -> np.ndarray:
    """The rank of each tile if each rank gets ``chunks`` runs of them."""
    if ranks == 1:
        return np.zeros(tiles, dtype=np.int64)
    count = ranks * chunks
    starts: np.ndarray = np.arange(count + 1) * tiles // count
    sizes = np.diff(starts)
    if chunks == 1:
        return np.repeat(np.arange(ranks), sizes)
    sums = np.concatenate([[0.0], np.cumsum(work)])
    weights = sums[starts[1:]] - sums[starts[:-1]]
    rank_of: np.ndarray = np.empty(count, dtype=np.int64)
    load = np.zeros(ranks)
    order = np.lexsort((np.arange(count), -weights, -sizes))  # larger ones first, so that all get as many tokens
    for first in range(0, count, ranks):
        some = order[first : first + ranks]
        some = some[np.argsort(-weights[some], kind="stable")]
        least = np.argsort(load, kind="stable")
        rank_of[some] = least
        load[least] += weights[some]
    _swap(rank_of, weights, sizes, load)
    return np.repeat(rank_of, sizes)


def _swap(rank_of: np.ndarray, weights: np.ndarray, sizes: np.ndarray, load: np.ndarray) -> None:
    """Swap chunks of one size between the rank with most work and others, while that makes the most less."""
    for _ in range(4 * len(load)):
        most = int(load.argmax())
        if load[most] <= _BALANCED * load.mean():
            return
        mine = np.flatnonzero(rank_of == most)
        others = np.flatnonzero(rank_of != most)
        moved = weights[mine][:, None] - weights[others][None, :]
        after = np.maximum(load[most] - moved, load[rank_of[others]][None, :] + moved)
        after = np.where(sizes[mine][:, None] == sizes[others][None, :], after, np.inf)
        place = int(after.argmin())
        a, b = mine[place // len(others)], others[place % len(others)]
        if not after.flat[place] < load[most] * (1 - 1e-6):
            return
        other = int(rank_of[b])
        step = weights[a] - weights[b]
        load[most], load[other] = load[most] - step, load[other] + step
        rank_of[a], rank_of[b] = other, most
