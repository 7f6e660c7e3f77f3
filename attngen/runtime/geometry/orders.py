"""The order in which blocks of a forward take tiles of queries that see different numbers of keys, as under causal
masks.

A block that is done with a tile takes the longest one that is left. Where blocks take two or three tiles each, the sums
of two are alike, and many blocks then wait for the third tiles of some. So the shortest tiles may come earlier, after
some of the longest. This module simulates a few such orders and takes the best.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapreplace
from itertools import pairwise

from attngen.lang.host import KEYS_OF_SCALAR, KEYS_OF_SMALL, evaluate
from attngen.runtime.arguments.checked import Call
from attngen.runtime.arguments.scalars import Number, assumed
from attngen.runtime.kernels.module import KernelLaunch

#: Work tiles, as a multiple of the blocks, beyond which the order hardly matters
#: (docs/notebook/softmax_and_masks.md, "Long rows, and blocks that end together").
_MOST_WAVES = 4

#: Least share of the time that another order has to save. Not measured.
_GAIN = 0.01


@dataclass(frozen=True, slots=True)
class Order:
    """Order of the tiles of a unit: so many of the longest come first, and so many of the shortest follow, from the
    shortest on."""

    long: int = 0
    short: int = 0


LONGEST_FIRST = Order()


def order_of(launch: KernelLaunch, call: Call, units: int, heads_in_l2: int, blocks: int) -> Order:
    """Order of a call whose ``units`` all run side by side, else longest first."""
    if units > heads_in_l2 or not launch.times:
        return LONGEST_FIRST
    _, tile, step = launch.times
    return best_order(steps_of_queries(launch, call), units, blocks, round(tile / step, 2))


@lru_cache(maxsize=256)
def best_order(steps: tuple[int, ...], units: int, blocks: int, start: float) -> Order:
    """Order in which ``units`` of tiles of these ``steps``, which do not ascend, end first on ``blocks`` blocks.

    ``start``: what a tile takes beside its steps, in steps.
    """
    tiles = len(steps)
    if not blocks < tiles * units <= _MOST_WAVES * blocks or any(a < b for a, b in pairwise(steps)):
        return LONGEST_FIRST
    best, ended = LONGEST_FIRST, (1 - _GAIN) * _end(steps, units, blocks, start)
    for order in _orders(tiles, units, blocks):
        short = tiles - order.short
        end = _end((*steps[: order.long], *steps[: short - 1 : -1], *steps[order.long : short]), units, blocks, start)
        if end < ended:
            best, ended = order, end
    return best


def _orders(tiles: int, units: int, blocks: int) -> Iterator[Order]:
    """Yield orders in which about as many tiles are short as a last wave would have."""
    last = tiles * units % blocks / units
    for short in sorted({max(round(last + more), 1) for more in (-1, 0, 1, 2, 4)}):
        for long in sorted({round(part * blocks / units) for part in (0.25, 0.5, 0.75, 0.9, 1.0)}):
            if long + short < tiles:
                yield Order(long, short)


def _end(steps: tuple[int, ...], units: int, blocks: int, start: float) -> float:
    """Time at which all blocks are done."""
    free = [0.0] * blocks
    for number in steps:
        for _ in range(units):
            heapreplace(free, free[0] + start + number)
    return max(free)


def steps_of_queries(launch: KernelLaunch, call: Call) -> tuple[int, ...]:
    """Number of KV tiles that each tile of queries probably sees, the last queries first.

    A scalar of the call is taken to be a part of what it may be, a smaller one where first tiles may be cut.
    """
    m, n, seqlen_q, seqlen_k = launch.tile_m, launch.tile_n, call.seqlen_q, call.seqlen_k
    count, every = -(-seqlen_q // m), -(-seqlen_k // n)
    first = list(range(0, seqlen_q, m))
    last = [min(at + m, seqlen_q) - 1 for at in first]
    position = seqlen_k - seqlen_q
    names: dict[str, Number | list[int] | None] = {
        **call.extents,
        "seqlen_q": seqlen_q,
        "seqlen_k": seqlen_k,
        "q_lo": first,
        "q_hi": last,
    }
    names |= {"q_pos_lo": [at + position for at in first], "q_pos_hi": [at + position for at in last]}
    keys = KEYS_OF_SMALL if launch.cuts else KEYS_OF_SCALAR
    names |= {rule.name: assumed(rule, seqlen_k, keys) for rule in call.rules}
    seen = [0 if launch.visible else every] * count
    for lo, hi in launch.visible:
        low = [max(at, 0) // n for at in evaluate(lo, names, count) or [0] * count]
        high = [min(-(-at // n), every) for at in evaluate(hi, names, count) or [seqlen_k] * count]
        seen = [tiles + max(end - begin, 0) for tiles, begin, end in zip(seen, low, high, strict=True)]
    return tuple(min(tiles, every) for tiles in reversed(seen))
