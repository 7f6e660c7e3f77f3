"""Predicted time of a call on a kernel: its work tiles, in the order in which blocks take them, times measured
constants.

A block spends ``tile`` nanoseconds on a work tile and ``step`` on each of its tiles of keys, and a launch takes
``launch``; a manifest has the three as ``times``. As many blocks work at once as the device has multiprocessors, and
each takes the next tile when it is done with one, so that the last wave may be a short one, or one of few tiles. What
rows see of the keys is taken from ``visible``, bounds that follow from lengths; what only tensors know counts as seen,
and a scalar that the call passes is taken to be a part of the keys. So calls of the same shapes run the same kernel,
whatever came before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from heapq import heappush, heapreplace
from itertools import pairwise
from math import inf

from attngen.lang.host import evaluate, names_in
from attngen.runtime.arguments.checked import Call
from attngen.runtime.arguments.scalars import Number, assumed
from attngen.runtime.geometry.heads_in_l2 import group_of, sequences_at_work, tiles_of
from attngen.runtime.geometry.splits import clusters_at_once
from attngen.runtime.kernels.module import Kernel

#: Tiles of queries of a unit that are looked at one by one; of more, as many, each for its neighbours
#: (docs/notebook/tiles.md, "Waves").
_LOOKED_AT = 12

#: Waves from which on the last one no longer matters. Not measured.
_MANY_WAVES = 6

#: Share of the bandwidth of a card that its memory reaches in these calls
#: (docs/notebook/hopper_forward.md, "Sharing the keys of a tile").
_USABLE = 0.8

#: Time of a step of tiles that end with the last visible key, where heads share their rows, over that of the measured
#: kernels, which have code to skip tiles (docs/notebook/tiles.md, "Narrow bands").
_ALIKE = 0.92

#: Steps that a work tile loses where its consumers skip what their own rows do not see, and wait for one another
#: (docs/notebook/tiles.md, "Narrow bands").
_LOST_STEPS = 2


@dataclass(frozen=True, slots=True)
class Prediction:
    """The nanoseconds of a call, its work tiles, and what the block that is done last has of them: tiles, and tiles
    of keys over all of these; and how many blocks share the keys of each."""

    nanoseconds: float
    tiles: int
    path: tuple[float, float]
    shares: int = 1

    @property
    def microseconds(self) -> float:
        """The same in microseconds."""
        return self.nanoseconds / 1e3

    def __str__(self) -> str:
        tiles, steps = self.path
        shared = f", whose keys {self.shares} blocks share" if self.shares > 1 else ""
        return f"{self.tiles} work tiles{shared}, {tiles:.3g} of them one after the other with {steps:.4g} steps"


@dataclass(frozen=True, slots=True)
class Card:
    """Properties of a GPU for predictions: how many blocks run at once, one per multiprocessor, its name, and the bytes
    that its memory could move in a nanosecond."""

    blocks: int
    name: str = ""
    bandwidth: float = inf


def predict(
    kernel: Kernel,
    call: Call,
    card: Card,
    times: Sequence[float] | None = None,
    *,
    clusters: Callable[[int, int], int] = clusters_at_once,
) -> Prediction | None:
    """Predicted time of a forward pass on a card; None if the plan does not tell.

    ``times`` stand for those of the manifest. Lengths are those that the host knows: packed sequences are taken to be
    equally long, and caches full. ``clusters`` says how many clusters run at once, of the blocks that do and of a size.
    """
    times = times or kernel.times_on.get(card.name) or kernel.times
    if not times:
        return None
    launch, tile, step = times
    call = at_work(call)
    if _sees_alike(kernel, call):
        step *= _ALIKE
    seqlen_q, seqlen_k = lengths(call)
    q_tiles, units = tiles_of(call, kernel.tile_m, pack_gqa=kernel.pack_gqa, seqlen_q=seqlen_q)
    rows, tiles = _rows(kernel, call, q_tiles, seqlen_q, seqlen_k), q_tiles * units
    path = _path(rows, units, card.blocks, tile, step)
    alone = Prediction(launch + path[0] * tile + path[1] * step, tiles, path)
    counts = [count for count in range(2, kernel.main.shares + 1) if tiles <= clusters(card.blocks, count)]
    if not counts:
        return alone
    # all clusters run at once; where memory binds, more blocks have only more to merge
    most = max(seen for seen, _ in rows)
    row_bytes = (call.head_dim_qk + call.head_dim_v) * kernel.dtype_of("k").bytes
    kv_bytes = call.batch * call.kv_heads * min(most * kernel.tile_n, seqlen_k) * row_bytes
    least = launch + tile + kv_bytes / (_USABLE * card.bandwidth)

    def with_shares(count: int) -> Prediction:
        steps = -(-most // count)
        return Prediction(max(launch + tile + steps * step, least), tiles, (1.0, float(steps)), count)

    return min((alone, *map(with_shares, counts)), key=lambda time: time.nanoseconds)


def may_share(kernel: Kernel, call: Call, clusters: int) -> bool:
    """Whether blocks may share the keys of a tile of queries: there are at most as many tiles as ``clusters`` of two
    blocks that run at once."""
    call = at_work(call)
    q_tiles, units = tiles_of(call, kernel.tile_m, pack_gqa=kernel.pack_gqa, seqlen_q=lengths(call)[0])
    return q_tiles * units <= clusters


def shares(kernel: Kernel, call: Call, card: Card, clusters: Callable[[int], int]) -> int:
    """Blocks that should share the keys of a tile of queries; ``clusters`` says how many clusters of so many
    blocks the card runs at once."""
    predicted = predict(kernel, call, card, clusters=lambda _, size: clusters(size))
    return predicted.shares if predicted else 1


def pairs_of_tiles(kernel: Kernel, call: Call) -> int | None:
    """Return the pairs of a row and a key in the tiles that a forward visits, over all heads and sequences; None if a
    scalar of the call decides."""
    scalars = {rule.name for rule in call.rules if rule.const is None}
    if any(scalars & names_in(end) for interval in kernel.visible for end in interval if end is not None):
        return None
    call = at_work(call)
    seqlen_q, seqlen_k = lengths(call)
    q_tiles, units = tiles_of(call, kernel.tile_m, pack_gqa=kernel.pack_gqa, seqlen_q=seqlen_q)
    rows = _rows(kernel, call, q_tiles, seqlen_q, seqlen_k)
    return units * kernel.tile_m * kernel.tile_n * sum(seen * width for seen, width in rows)


def at_work(call: Call) -> Call:
    """A call over pages of which one sequence may have all queries, as one of several prefixes that a batch shares may
    (``attngen.shared_prefix``), as one of that sequence; any other call as it is. Blocks of sequences without queries
    leave at once, and where all have some, keys shared among many blocks cost little
    (docs/notebook/hopper_decode.md, "Several prefixes")."""
    if call.batch <= 1 or not call.page_size or not 0 < call.total_q <= call.seqlen_q:
        return call
    own = copy(call)
    own.batch = 1
    return own


def lengths(call: Call) -> tuple[int, int]:
    """Queries and keys of a sequence, of those of a ragged call as if all were equally long."""
    if not call.ragged:
        return call.seqlen_q, call.seqlen_k
    batch = sequences_of(call)
    total_q = call.total_q - (call.batch - batch if call.least_queries else 0)
    seqlen_q = min(-(-total_q // batch), call.seqlen_q)
    return max(seqlen_q, 1), call.seqlen_k if call.page_size else max(min(-(-call.total_k // batch), call.seqlen_k), 1)


def sequences_of(call: Call) -> int:
    """Sequences of a ragged call, at least one; of those that it leaves out, as many as there probably are."""
    return max(sequences_at_work(call), 1)


def _sees_alike(kernel: Kernel, call: Call) -> bool:
    """Whether the rows of a tile see nearly the same keys, though these end on both sides: they are heads of few
    queries."""
    return kernel.pack_gqa and group_of(call) > 1 and kernel.structure.end_alignment > 0


def _rows(kernel: Kernel, call: Call, q_tiles: int, seqlen_q: int, seqlen_k: int) -> list[tuple[int, int]]:
    """KV tiles of each query tile of a head, in order, run-length encoded: (KV tiles, query tiles with as many)."""
    m, n = kernel.tile_m, kernel.tile_n
    every = -(-seqlen_k // n)
    visible = kernel.visible
    if not visible:
        return [(every, q_tiles)]
    group = group_of(call) if kernel.pack_gqa else 1
    names: dict[str, Number | list[int] | None] = {**call.extents, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    names |= {rule.name: assumed(rule, seqlen_k) for rule in call.rules}
    position, last = seqlen_k - seqlen_q, seqlen_q - 1
    count = min(q_tiles, _LOOKED_AT)
    starts = [i * q_tiles // count for i in range(count + 1)]
    widths = [end - begin for begin, end in pairwise(starts)]
    firsts = [(begin + (width - 1) // 2) * m for begin, width in zip(starts[:-1], widths, strict=True)]
    q_lo = [min(first // group, last) for first in firsts]
    q_hi = [min((first + m - 1) // group, last) for first in firsts]
    names |= {
        "q_lo": q_lo, "q_hi": q_hi, "q_pos_lo": [q + position for q in q_lo], "q_pos_hi": [q + position for q in q_hi],
    }  # fmt: skip
    seen = [0] * count
    for lo, hi in visible:
        low = [max(at, 0) // n for at in evaluate(lo, names, count) or [0] * count]
        high = [min(-(-at // n), every) for at in evaluate(hi, names, count) or [seqlen_k] * count]
        seen = [tiles + max(end - begin, 0) for tiles, begin, end in zip(seen, low, high, strict=True)]
    rows: list[tuple[int, int]] = []
    lost = _LOST_STEPS if kernel.skips and not _sees_alike(kernel, call) else 0
    step = 1 if kernel.structure.from_first else -1
    for tiles, width in zip(seen[::step], widths[::step], strict=True):
        steps = min(tiles, every) + lost
        if rows and rows[-1][0] == steps:
            rows[-1] = steps, rows[-1][1] + width
        else:
            rows.append((steps, width))
    return rows


def _path(
    rows: Sequence[tuple[int, int]], units: int, blocks: int, tile: float, step: float
) -> tuple[float, float]:  # fmt: skip
    """Return the work tiles, and the tiles of keys over these, of the block that is done last.

    All units begin with the first of the rows; a block that is done takes the next tile.
    """
    count = units * sum(width for _, width in rows)
    if len(rows) == 1 or count <= blocks:
        most = max(seen for seen, _ in rows)
        waves = -(-count // blocks)
        return float(waves), float(waves * most)
    if count > _MANY_WAVES * blocks:
        steps = units * sum(seen * width for seen, width in rows)
        return count / blocks, steps / blocks
    at_work: list[tuple[float, int, int, int]] = [(0.0, blocks, 0, 0)]  # till when how many, with which tiles and steps
    for seen, width in rows:
        took, left = tile + seen * step, units * width
        while left:
            until, free, tiles, steps = at_work[0]
            taken = min(free, left)
            heapreplace(at_work, (until + took, taken, tiles + 1, steps + seen))
            if free > taken:
                heappush(at_work, (until, free - taken, tiles, steps))
            left -= taken
    _, _, tiles, steps = max(at_work)
    return float(tiles), float(steps)
