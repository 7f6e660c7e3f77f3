"""Overlap of calls with exchanges. It follows from the visits of all ranks, so that all decide alike."""

from __future__ import annotations

from typing import Literal

import numpy as np

from attngen.parallel.cost import Cost
from attngen.parallel.segments import RowSegments
from attngen.parallel.sharding import Sharding
from attngen.parallel.visits import TileRuns, in_order_of_ranks, runs_of_tiles

#: By rows, by heads, or not at all.
Overlap = Literal["rows", "heads", "none"]

#: Seconds that groups of heads cost: more launches, and small calls, whose last blocks leave multiprocessors idle
#: (150 in docs/notebook/parallel.md, "Streams, collectives and copies"; 200 was not measured).
_GROUP = 200e-6

#: Least seconds of an exchange that is cut into groups of heads. Not measured.
_WORTH = 40e-6

#: Seconds that one more group of heads costs a forward pass whose exchange is already cut, and most groups
#: (docs/notebook/parallel.md, "More groups of heads").
_FURTHER, _MOST_GROUPS = 60e-6, 4

#: Seconds that a forward has to take, so that the host has time to enqueue it in two groups of heads
#: (docs/notebook/parallel.md, "Host time of a step").
_HOST = 1e-3

#: Share of the time of an exchange that nothing hides, if calls overlap by rows: rows are copied before and after.
#: Not measured.
_COPIED = 0.25

#: Seconds of an exchange of any size. Not measured: the first exchanges of docs/notebook/parallel.md take 38 to 53 µs.
_LATENCY = 30e-6

#: Bytes that a GPU copies in a second, read and written. Not measured.
_COPIES = 1.2e12


def first_group(heads: int, kv_heads: int) -> int:
    """KV heads that travel first: those of four heads, fewer of which would leave multiprocessors idle, but at most a
    quarter."""
    return max(min(-(-4 * kv_heads // max(heads, 1)), kv_heads // 4), 1)


def _groups(work: np.ndarray, sent: np.ndarray, cost: Cost) -> tuple[int, float]:
    """Groups of heads in which keys of a forward pass travel with least time, and the predicted seconds of the rank
    that takes longest. ``work`` and ``sent``: seconds of each rank's attention, and of its exchange.

    The first group is that of ``first_group``, which hides the second one; without GQA the keys of all other heads
    would take longer than that, so they travel in several groups, each behind the attention of the one before.
    """
    first = first_group(cost.heads, cost.kv_heads) / cost.kv_heads
    best = 2, np.inf
    for groups in range(2, _MOST_GROUPS + 1):
        late = np.maximum(sent * (1 - first) / (groups - 1) - work * first, 0)
        seconds = float((work + sent * first + late).max()) + _LATENCY + _GROUP + _FURTHER * (groups - 2)
        if seconds < best[1]:
            best = groups, seconds
    return best


def local_tiles(visits: TileRuns, owner: np.ndarray) -> np.ndarray:
    """Whether each tile of rows sees only keys of the run of tiles of its rank that it lies in."""
    start, end = runs_of_tiles(owner)
    return (visits.first >= start) & (visits.last <= end)


def overlap(
    visits: TileRuns,
    owner: np.ndarray,
    sending: np.ndarray,
    tile: int,
    cost: Cost,
    *,
    segments: bool,
    heads_alike: bool,
) -> tuple[Overlap, float]:
    """Choose the overlap of a layer with the least time; also return the predicted seconds of the slowest rank.

    ``sending`` is how many rows of keys each rank gets. By rows only where kernels take segments, by heads only where
    heads are alike.
    """
    ranks = len(sending)
    tile_seconds = cost.of_tiles(1.0, tile)
    work = visits.work(owner, ranks) * tile_seconds
    sent = sending * cost.of_tokens(1.0)
    choices: dict[Overlap, float] = {"none": float((work + np.where(sent > 0, sent + _LATENCY, 0)).max())}
    if heads_alike and cost.kv_heads > 1 and sent.max() > _WORTH:
        choices["heads"] = _groups(work, sent, cost)[1]
    if segments and sent.max() > 0:
        here, in_parts = visits.of_owner("alone", owner, _alone, ranks)
        exposed = np.maximum(sent - here * tile_seconds, sent * _COPIED)
        row_seconds = 2 * cost.heads * cost.head_dim * cost.itemsize / _COPIES
        moved = in_parts * tile * row_seconds
        choices["rows"] = float((work + exposed + moved).max())
    best = min(choices, key=lambda each: choices[each])
    return best, choices[best]


def forward_groups(
    visits: TileRuns, owner: np.ndarray, sending: np.ndarray, tile: int, cost: Cost, *, way: Overlap, heads_alike: bool
) -> int:
    """Groups of heads in which keys of a layer's forward pass travel: 1 where it does not overlap by heads.

    A layer that else does not overlap may still get the keys of few heads first in its forward pass. Then little of
    that exchange is waited for. In the backward, whose exchange is none where keys are kept, calls of a few heads would
    leave multiprocessors idle.
    """
    work = visits.work(owner, len(sending)) * cost.of_tiles(1.0, tile)
    sent = sending * cost.of_tokens(1.0)
    if way == "heads":
        return _groups(work, sent, cost)[0]
    if way == "rows" or not heads_alike or cost.kv_heads == 1 or sent.max() < 2 * _WORTH:
        return 1
    return 2 if work.min() / cost.passes > _HOST else 1


def _alone(visits: TileRuns, owner: np.ndarray, ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """Work of the tiles of each rank that see only keys of their own run, and the count of ``_tiles_in_parts``."""
    alone = local_tiles(visits, owner)
    here = np.bincount(owner, weights=np.where(alone, visits.tiles, 0.0), minlength=ranks)
    return here, _tiles_in_parts(alone, owner, ranks)


def _tiles_in_parts(alone: np.ndarray, owner: np.ndarray, ranks: int) -> np.ndarray:
    """Count the tiles of each rank that are not ``alone``, if they are not one run of its tiles: their rows are
    copied."""
    order = in_order_of_ranks(owner, ranks)
    others, of_rank = ~alone[order], owner[order]
    begins = others.copy()
    begins[1:] &= ~others[:-1] | (of_rank[1:] != of_rank[:-1])
    runs = np.bincount(of_rank[begins], minlength=ranks)
    return np.where(runs > 1, np.bincount(owner[~alone], minlength=ranks), 0)


def cut(
    segments: RowSegments, visits: TileRuns, sharding: Sharding, *, positions: bool
) -> tuple[RowSegments, RowSegments]:
    """The segments of one rank in two: those whose keys lie in their own run of rows, and the others."""
    start, end = runs_of_tiles(sharding.owner)
    bounds, run = sharding.bounds, sharding.tiles_of(segments.begin)
    low, high = bounds[start[run]], bounds[end[run]]
    at = np.where((segments.lo >= low) & (segments.hi <= high), segments.begin, segments.end)
    first = segments.lo.copy()
    if positions:
        for i in np.flatnonzero((at == segments.end) & (at > segments.begin)).tolist():
            ends = sharding.tiles_of(np.array([segments.begin[i], segments.end[i] - 1]))
            tiles = np.arange(ends[0], ends[1] + 1)
            inside = np.flatnonzero(bounds[visits.first[tiles]] >= low[i])
            if len(inside):
                at[i] = max(segments.begin[i], bounds[tiles[inside[0]]])
                first[i] = bounds[visits.first[tiles[inside[0]]]]
    rest, here = segments.split(at, first)
    return here, rest
