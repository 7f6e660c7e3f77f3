"""The pipes of the Hopper kernels whose values are the head of the keys: a ring for each group of columns of K."""

from __future__ import annotations

from collections.abc import Sequence

from attngen.dtypes import LatentRow
from attngen.parts.ranges import COUNT_BYTES, WALK_BYTES
from attngen.plan.pipes import BARRIER_BYTES, WARPGROUP, NamedBarrier, Pipes, Ring, Role, Signal

#: Consumers, each of which holds half of the columns of O, and takes every other tile: two tiles in flight
#: (docs/notebook/hopper_mla.md, "A scorer with most of Q in registers, and three tiles in flight: not faster").
CONSUMERS = TILES = 2

#: Rows of a work item: M of wgmma; keys of a tile.
ROWS = KEYS = 64
#: Columns of a box, and boxes of a consumer's half of the values.
BOX_COLUMNS, HALF_BOXES = 64, 4

#: Shared memory in its order: matrices first, which need the most alignment, and words last.
_ORDER = ("q", "values", "more", "p", "row_max", "sums", "barriers", "begin", "last", "counts", "unfinished")
_WARPS = WARPGROUP * (CONSUMERS + 1)
_FLOAT = 4
#: Two records of work items that others have parts of: the item, the number of parts, the first worker, and which one
#: this is.
UNFINISHED_BYTES = 2 * 16


#: Arrivals that full barriers of rows copied by threads expect.
GATHERED = "each thread of the loaders, when its copies have landed"


def values_of_latents() -> Signal:
    """Signal that columns of a tile are converted, and that what is copied beside them is there."""
    stored = "each thread of the loaders, when it has stored what it has converted, and when its copies have landed"
    return Signal(2 * 32 * WARPGROUP, stored, "rows of a tile are there")


def converted_ring(name: str, stages: int, bytes_of: int, guards: str, readers: str, full: Signal) -> Ring:
    """A ring that loaders fill by threads, and whose stages one consumer releases."""
    return Ring(
        name, stages, "the loaders", readers,
        guards=guards,
        full=full,
        empty=Signal(WARPGROUP, "each warp of a consumer", "the consumer has multiplied them for the last time"),
        stored=((name, bytes_of),),
    )  # fmt: skip


def consumer_roles(registers: Sequence[int], alike: bool) -> tuple[Role, ...]:
    """Roles of the consumers: alike, or, where loaders need their registers, one that computes S of all tiles, and one
    that follows it."""
    if alike:
        return (Role("consumers", 0, WARPGROUP * CONSUMERS, registers[0]),)
    names = "scorer", "follower"
    return tuple(Role(name, WARPGROUP * i, WARPGROUP, registers[i]) for i, name in enumerate(names))


def mla_pipes(
    *,
    qk: int,
    v: int,
    element: int,
    registers: tuple[int, ...],
    latent_row: LatentRow | None = None,
    merges: bool = False,
) -> Pipes:
    """Pipes of a kernel with rows of ``qk`` columns, the first ``v`` of them values, of ``element`` bytes.

    ``registers`` are those of a thread of the producer, and of each consumer. ``latent_row``: how rows lie in memory,
    if loaders convert them. ``merges``: blocks merge the partial results of items that they share.
    """
    box = KEYS * BOX_COLUMNS * element
    others = {
        "q": ROWS * (v if latent_row is None else qk) * element,
        "p": (CONSUMERS if latent_row is None else 1) * ROWS * KEYS * element,
        "row_max": ROWS * _FLOAT,
        "sums": CONSUMERS * ROWS * _FLOAT,
        "begin": WALK_BYTES,
        "last": BARRIER_BYTES,
        "counts": _WARPS * COUNT_BYTES,
        **({"unfinished": UNFINISHED_BYTES} if merges else {}),
    }

    threads = 32 * WARPGROUP
    copied = values = Signal(1, "a loader", "a box has landed", bytes=True)
    if latent_row is not None:
        copied = Signal(threads, GATHERED, "rows of a tile have landed")
        values = values_of_latents()

    def ring(name: str, boxes: int, readers: str, guards: str, full: Signal) -> Ring:
        return Ring(
            name, TILES * boxes, "a loader", readers,
            guards=guards,
            full=full,
            empty=Signal(WARPGROUP, "each warp of a consumer", "a consumer has multiplied it for the last time"),
            stored=((name, box),),
        )  # fmt: skip

    more = (qk - v) // BOX_COLUMNS
    producer, *consumers = registers
    first = WARPGROUP * CONSUMERS
    if latent_row is not None:
        of_values = "the columns of a half of the values of a tile stay until its consumer has multiplied them"
        of_others = "the columns that are no values stay until the scorer has multiplied them"
        rings = [converted_ring("values", CONSUMERS * TILES, HALF_BOXES * box, of_values, "both consumers", values)]
        if more:
            rings.append(converted_ring("more", TILES, more * box, of_others, "the scorer", copied))
        return Pipes(
            tuple(rings),
            named=(
                NamedBarrier("consumers", 1, 1, CONSUMERS * threads, "Q and row sums are there, or have been read"),
                NamedBarrier("published", 2, 2, CONSUMERS * threads, "P is in shared memory, or has been multiplied"),
            ),
            roles=(*consumer_roles(consumers, alike=False), Role("loader", first, WARPGROUP, producer)),
            order=_ORDER,
            others=tuple(others.items()),
        )
    return Pipes(
        (
            ring(
                "values",
                CONSUMERS * HALF_BOXES,
                "both consumers",
                "a box of the columns of K that are values stays until both consumers have multiplied it",
                values,
            ),
            *(
                [
                    ring(
                        "more",
                        more,
                        "the consumer of the tile",
                        "the columns of K that are no values stay until the consumer of the tile has multiplied them",
                        copied,
                    )
                ]
                if more
                else []
            ),
        ),
        named=(
            NamedBarrier("consumers", 1, 1, CONSUMERS * threads, "Q and row sums are there, or have been read"),
            NamedBarrier("published", 2, 2, CONSUMERS * threads, "P of a consumer's tile is in shared memory"),
            NamedBarrier("zeroed", 4, 2, threads, "a consumer has cleared the values after the last key"),
            NamedBarrier("scored", 6, 1, CONSUMERS * threads, "S of the first consumer's tile is issued"),
        ),
        roles=(*consumer_roles(consumers, alike=True), Role("loader", first, WARPGROUP, producer)),
        order=_ORDER,
        others=tuple(others.items()),
    )
