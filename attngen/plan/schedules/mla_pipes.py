"""The pipes of the Hopper kernels whose values are the head of the keys: a ring for each group of columns of K."""

from __future__ import annotations

from attngen.plan.pipes import BARRIER_BYTES, WARPGROUP, NamedBarrier, Pipes, Ring, Role, Signal
from attngen.plan.schedules.decode_pipes import COUNT_BYTES, WALK_BYTES

#: Consumers, each of which holds half of the columns of O, and takes every other tile: two tiles in flight.
CONSUMERS = TILES = 2

ROWS = KEYS = 64
#: Columns of a box, and boxes of a consumer's half of the values.
BOX_COLUMNS, HALF_BOXES = 64, 4

#: Shared memory in its order: matrices first, which need the most alignment, and words last.
_ORDER = ("q", "values", "more", "p", "row_max", "sums", "barriers", "begin", "last", "counts")
_WARPS = WARPGROUP * (CONSUMERS + 1)
_FLOAT = 4


def mla_pipes(*, qk: int, v: int, element: int, registers: tuple[int, int]) -> Pipes:
    """Pipes of a kernel with rows of ``qk`` columns, the first ``v`` of them values, of ``element`` bytes.

    ``registers`` are those of a thread of the producer, and of a consumer.
    """
    box = KEYS * BOX_COLUMNS * element
    others = {
        "q": ROWS * qk * element,
        "p": ROWS * KEYS * element,
        "row_max": ROWS * _FLOAT,
        "sums": CONSUMERS * ROWS * _FLOAT,
        "begin": WALK_BYTES,
        "last": BARRIER_BYTES,
        "counts": _WARPS * COUNT_BYTES,
    }

    def ring(name: str, boxes: int, what: str, readers: str) -> Ring:
        return Ring(
            name, TILES * boxes, "the loader", readers,
            guards=f"a box of {what} of K stays until {readers} have multiplied it",
            full=Signal(1, "the loader", "a box has landed", bytes=True),
            empty=Signal(
                2 * WARPGROUP,
                "each warp of a consumer, of both blocks of a cluster, or twice of a single block",
                "a consumer has multiplied it for the last time",
            ),
            stored=((name, box),),
        )  # fmt: skip

    more = (qk - v) // BOX_COLUMNS
    producer, consumer = registers
    first = WARPGROUP * CONSUMERS
    threads = 32 * WARPGROUP
    return Pipes(
        (
            ring("values", CONSUMERS * HALF_BOXES, "the values", "both consumers"),
            *([ring("more", more, "the columns that are no values", "the consumer of the tile")] if more else []),
        ),
        named=(
            NamedBarrier("consumers", 1, 1, CONSUMERS * threads, "Q and row sums are there, or have been read"),
            NamedBarrier("published", 2, 2, CONSUMERS * threads, "P of a consumer's tile is in shared memory"),
            NamedBarrier("zeroed", 4, 2, threads, "a consumer has cleared the values after the last key"),
        ),
        roles=(
            Role("consumers", 0, first, consumer),
            Role("loader", first, 1, producer),
            Role("idle", first + 1, WARPGROUP - 1, producer),
        ),
        order=_ORDER,
        others=tuple(others.items()),
    )
