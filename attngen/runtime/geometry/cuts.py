"""Choice of the last tiles of keys of a backward that are cut into parts, so that all blocks end at about the same
time.

A block takes one tile of keys after the other and goes through the queries that see it. Where tiles are few, or the
last of them begin late, most blocks wait for a few. So the last tiles, in the order in which blocks take them, may be
cut: each part has a share of a tile's steps, and who is the last one adds up dK and dV of all. That costs a part some
steps more. What blocks do is played through here with steps as the unit of time, for a few cuts, and the best is taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import heapreplace

from attngen.lang.host import KEYS_OF_SCALAR, KEYS_OF_SMALL, evaluate
from attngen.runtime.arguments.checked import Call
from attngen.runtime.arguments.scalars import Number, assumed
from attngen.runtime.kernels.module import KernelLaunch

#: Steps that a tile of keys takes beside its own; those that a part of one takes, which stores dK and dV in float32;
#: and those that it takes for each part of its tile, since the last one reads them all
#: (docs/notebook/hopper_backward.md, "Parts of the last tiles").
_TILE, _PART, _READ = 2.6, 3.6, 0.5

#: Steps that a part of a query tile takes beside those of a whole tile, since it stores O in float32, and for each part
#: of its tile. Not measured.
_PART_OF_QUERIES, _READ_OF_QUERIES = 1.0, 0.3

#: Parts of a tile at most, and of all tiles, as a multiple of the blocks: they take memory. Not measured.
MOST_PARTS = 8
_ITEMS = 4

#: Tiles, as a multiple of the blocks, from which on a last one no longer matters. Not measured.
_MANY = 24

#: The same of query tiles that take equally long. Not measured.
_MANY_ALIKE = 16

#: First tiles of a unit that are cut, at most, unless all are. Not measured.
_ROWS = 4

#: Parts of a long row of a tile map (docs/notebook/softmax_and_masks.md, "Long rows, and blocks that end together"),
#: and the steps of one that are worth it, which were not measured.
_PARTS_OF_ROW, _LONG_STEPS = 4, 16

#: Least share of the time that a cut has to save (docs/notebook/hopper_backward.md, "Parts of the last tiles").
_GAIN = 0.01

#: Of the steps that a mask may have, what is taken to be there if data decide: one part of so many
#: (docs/notebook/softmax_and_masks.md, "Long rows, and blocks that end together").
_OF_DATA = 4

#: As ``_MANY``, of packed sequences of different lengths, the longest tiles of which may come last. Not measured.
_MANY_OF_SEQUENCES = 40

#: Share of the tokens that packed sequences would have if all were as long as the longest one: with fewer, they differ.
#: Not measured.
_ALIKE = 0.9


@dataclass(frozen=True, slots=True)
class Cut:
    """Number of the last tiles that are cut, and of the parts of each."""

    tiles: int = 0
    parts: int = 1


NONE = Cut()


def alike(call: Call) -> bool:
    """Whether all sequences of a call are about as long as the longest one."""
    if not call.ragged:
        return True
    most_q, most_k = call.batch * call.seqlen_q, call.batch * call.seqlen_k
    return _ALIKE * most_q <= call.total_q and _ALIKE * most_k <= call.total_k


def sequences_of(call: Call) -> tuple[Call, ...]:
    """Packed sequences of different lengths as calls of their own; none where the host does not know the lengths.

    Those of two sequences follow from the longest ones and the sums: then the second one is taken to be the longer one.
    """
    if call.lengths:
        return tuple(replace(call, batch=1, seqlen_q=rows, seqlen_k=keys) for rows, keys in call.lengths)
    if not call.ragged or call.batch != 2 or call.page_table is not None:
        return ()
    rest = call.total_q - call.seqlen_q, call.total_k - call.seqlen_k
    if not (0 <= rest[0] <= call.seqlen_q and 0 <= rest[1] <= call.seqlen_k):
        return ()
    return replace(call, batch=1, seqlen_q=rest[0], seqlen_k=rest[1]), replace(call, batch=1)


def steps_of(launch: KernelLaunch, call: Call) -> tuple[int, ...]:
    """Number of tiles of queries that probably see each tile of keys, the first keys first.

    Sequences are taken to be as long as the longest one, and a scalar of the call and what data decide to be a part of
    what they may be, a smaller one where first tiles may be cut: calls of the same shapes are cut alike.
    """
    m, n, seqlen_q, seqlen_k = launch.tile_m, launch.tile_n, call.seqlen_q, call.seqlen_k
    count, every = -(-seqlen_k // n), -(-seqlen_q // m)
    seen = [0 if launch.visible else every] * count
    starts = range(0, seqlen_k, n)
    names: dict[str, Number | list[int] | None] = {**call.extents, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    keys = KEYS_OF_SMALL if launch.cuts_first else KEYS_OF_SCALAR
    names |= {rule.name: assumed(rule, seqlen_k, keys) for rule in call.rules}
    names |= {"kv_lo": list(starts), "kv_hi": [min(start + n, seqlen_k) - 1 for start in starts]}
    for lo, hi in launch.visible:
        low = [max(at, 0) // m for at in evaluate(lo, names, count) or [0] * count]
        high = [min(-(-at // m), every) for at in evaluate(hi, names, count) or [seqlen_q] * count]
        seen = [steps + max(end - begin, 0) for steps, begin, end in zip(seen, low, high, strict=True)]
    of = _OF_DATA if launch.uneven else 1
    return tuple(-(-min(steps, every) // of) for steps in seen)


def may_pay(tiles: int, blocks: int, many: int = _MANY) -> bool:
    """Whether tiles are few enough that the last ones matter, and blocks can share them."""
    return blocks > 1 and 0 < tiles <= many * blocks


@lru_cache(maxsize=256)  # lengths differ more often than numbers of tiles
def best_cut(steps: tuple[int, ...], group: int, units: int, heads_in_l2: int, blocks: int) -> Cut:
    """Tiles to cut, and into how many parts.

    Each of ``units`` (KV heads of all sequences) has tiles of these ``steps`` for each of ``group`` query heads;
    ``heads_in_l2`` units run side by side on ``blocks`` blocks.
    """
    if not may_pay(len(steps) * units, blocks):
        return NONE
    times = [group * seen + _TILE for begin in range(0, units, heads_in_l2) for seen in steps
             for _ in range(min(heads_in_l2, units - begin))]  # fmt: skip
    return _best_of_last(times, range(len(times)), len(times), blocks)


@lru_cache(maxsize=256)
def best_cut_of_each(
    each: tuple[tuple[int, ...], ...], group: int, kv_heads: int, heads_in_l2: int, blocks: int
) -> Cut:
    """The same of packed sequences, of which each has tiles of so many steps. Blocks pass over the tiles that a
    sequence has fewer than the longest one; where some of these are cut, they count as tiles."""
    if not may_pay(sum(map(len, each)) * kv_heads, blocks, _MANY_OF_SEQUENCES):
        return NONE
    units, most = len(each) * kv_heads, max(map(len, each))
    times, places = list[float](), list[int]()
    for begin in range(0, units, heads_in_l2):
        side = [each[unit // kv_heads] for unit in range(begin, min(begin + heads_in_l2, units))]
        for tile in range(max(map(len, side))):
            for unit, steps in enumerate(side):
                if tile < len(steps):
                    times.append(group * steps[tile] + _TILE)
                    places.append(begin * most + tile * len(side) + unit)
    return _best_of_last(times, places, units * most, blocks)


def _best_of_last(times: Sequence[float], places: Sequence[int], count: int, blocks: int) -> Cut:
    """Choose which of the last tiles to cut: tiles take these ``times``, in the order in which blocks take them, and
    have these ``places`` among all ``count``."""
    real = len(times)
    sizes = {real, real % blocks, real % blocks + blocks, blocks // 2, blocks, 3 * blocks // 2}
    free = [0.0] * blocks  # when each block is done with what it has taken
    starts = {}
    for at, time in enumerate(times):
        if real - at in sizes:
            starts[at] = free[:]
        heapreplace(free, free[0] + time)
    best, ended = NONE, (1 - _GAIN) * max(free)
    if ended <= sum(free) / blocks:
        return NONE
    for at, before in starts.items():
        tiles = count - places[at]
        for parts in range(2, min(MOST_PARTS, _ITEMS * blocks // tiles) + 1):
            end = _end(before, times[at:], parts)
            if end < ended:
                best, ended = Cut(tiles, parts), end
    return best


@lru_cache(maxsize=256)
def best_first_cut(steps: tuple[int, ...], group: int, units: int, heads_in_l2: int, blocks: int) -> Cut:
    """The same of the first tiles of each unit, which take many more steps than others: none may outlast the rest."""
    return _best_of_first([group * seen for seen in steps], units, heads_in_l2, blocks, (_TILE, _PART, _READ))


@lru_cache(maxsize=256)
def best_query_cut(steps: tuple[int, ...], units: int, heads_in_l2: int, blocks: int, tile: float) -> Cut:
    """The same of the first query tiles of a forward, which take ``tile`` steps beside their own."""
    if len(steps) * units > _MANY_ALIKE * blocks and min(steps) == max(steps):
        return NONE
    return _best_of_first(steps, units, heads_in_l2, blocks, (tile, tile + _PART_OF_QUERIES, _READ_OF_QUERIES))


def _best_of_first(
    steps: Sequence[int], units: int, heads_in_l2: int, blocks: int, costs: tuple[float, float, float]
) -> Cut:
    """``costs``: what a tile takes beside its steps, what a part takes, and that for each part of its tile."""
    count, (tile, part, read) = len(steps), costs
    if not count * units:
        return NONE
    widths = [min(heads_in_l2, units - begin) for begin in range(0, units, heads_in_l2)]
    best, ended = NONE, (1 - _GAIN) * _end_of_lines([seen + tile for seen in steps], widths, blocks)
    for rows in sorted({*range(1, min(_ROWS, count) + 1), count}):
        for parts in range(2, min(MOST_PARTS, _ITEMS * blocks // (rows * units)) + 1):
            lines = [seen / parts + part + read * parts for seen in steps[:rows] for _ in range(parts)]
            end = _end_of_lines(lines + [seen + tile for seen in steps[rows:]], widths, blocks)
            if end < ended:
                best, ended = Cut(rows * units, parts), end
    return best


def long_rows_cut(rows: int, steps: int, units: int, blocks: int) -> Cut:
    """The most first rows of tile maps that are cut, and their parts; a row has at most so many ``steps``.

    The map itself says how many of its rows are long. Long rows of many units leave no block idle. If half of the
    blocks would be, all rows may be cut.
    """
    most = rows if 2 * rows * units <= blocks else rows // 2
    cut = min(blocks // (2 * units), most) if units else 0
    return Cut(cut * units, _PARTS_OF_ROW) if cut and steps >= _LONG_STEPS else NONE


def _end_of_lines(lines: Sequence[float], widths: Sequence[int], blocks: int) -> float:
    """Time at which all blocks are done: units that run side by side have the same lines of work, group after group."""
    free = [0.0] * blocks
    for width in widths:
        for time in lines:
            for _ in range(width):
                heapreplace(free, free[0] + time)
    return max(free)


def _end(free: list[float], times: Iterable[float], parts: int) -> float:
    """Time at which all blocks are done: they become ``free`` at these times, and then take cut tiles of ``times``."""
    free = free[:]
    for time in times:
        part = (time - _TILE) / parts + _PART + _READ * parts
        for _ in range(parts):
            heapreplace(free, free[0] + part)
    return max(free)
