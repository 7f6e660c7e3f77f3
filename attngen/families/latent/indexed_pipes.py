"""Rings and barriers of the Hopper kernel of keys by index, whose loaders gather rows of K by ``cp.async``."""

from __future__ import annotations

from attngen.dtypes import LatentRow
from attngen.families.latent.pipes import (
    BOX_COLUMNS,
    CONSUMERS,
    GATHERED,
    HALF_BOXES,
    KEYS,
    ROWS,
    TILES,
    UNFINISHED_BYTES,
    consumer_roles,
    values_of_latents,
)
from attngen.parts.ranges import COUNT_BYTES, WALK_BYTES
from attngen.plan.pipes import BARRIER_BYTES, WARPGROUP, NamedBarrier, Pipes, Ring, Role, Signal

#: Order of the regions of shared memory: matrices first, which need the most alignment.
_ORDER = (
    "q", "values", "more", "p", "row_max", "sums", "keys", "largest", "barriers", "begin", "walks", "lookups", "seldom",
    "parts", "last", "counts", "unfinished",
)  # fmt: skip
_WARPS = WARPGROUP * (CONSUMERS + 1)
_WORD = 4

#: What each warp of the loaders keeps in shared memory where its registers hold rows that become fp16.
_SELDOM_BYTES = 64

#: At least the bytes of a part of a work item, as kernels have it.
PART_BYTES = 128

#: Bytes of what a warp of the loaders knows of rows of four tiles, 16 each: two addresses, an entry, a page.
LOOKUP_BYTES = 4 * 16 * 24


def indexed_pipes(
    *,
    qk: int,
    v: int,
    element: int,
    registers: tuple[int, ...],
    latent_row: LatentRow | None = None,
    alike: bool = True,
    merges: bool = False,
) -> Pipes:
    """Pipes of a kernel with rows of ``qk`` columns, the first ``v`` of them values, of ``element`` bytes.

    ``registers`` are those of a thread of the loaders, and of a consumer. ``latent_row``: how rows lie in memory, if
    loaders convert them. ``alike``: each consumer computes S of every other tile; else one of them that of all tiles.
    ``merges``: blocks merge the partial results of items that they share.
    """
    box = KEYS * BOX_COLUMNS * element
    threads = 32 * WARPGROUP
    others = {
        "p": ROWS * KEYS * element * (1 if latent_row or qk > v else CONSUMERS),
        "row_max": ROWS * _WORD,
        "sums": CONSUMERS * ROWS * _WORD,
        "keys": TILES * KEYS * _WORD,
        **({"largest": 2 * WARPGROUP * _WORD, "seldom": WARPGROUP * _SELDOM_BYTES} if alike and latent_row else {}),
        "begin": WALK_BYTES,
        **({"walks": WARPGROUP * WALK_BYTES} if latent_row and not alike else {}),
        **({"lookups": WARPGROUP * LOOKUP_BYTES} if latent_row and latent_row.scales_after_rows else {}),
        "parts": 2 * PART_BYTES,
        "last": BARRIER_BYTES,
        "counts": _WARPS * COUNT_BYTES,
        **({"unfinished": UNFINISHED_BYTES} if merges else {}),
    }

    gathered = Signal(threads, GATHERED, "rows of the listed keys have landed")
    values = gathered if latent_row is None else values_of_latents()

    def ring(name: str, stages: int, boxes: int, what: str, readers: str, full: Signal, then: str = "") -> Ring:
        return Ring(
            name, stages, "the loaders", readers,
            guards=f"{what} of a tile stay until their consumer has multiplied them{then}",
            full=full,
            empty=Signal(WARPGROUP, "each warp of a consumer", "the consumer has multiplied them for the last time"),
            stored=((name, boxes * box),),
        )  # fmt: skip

    more = (qk - v) // BOX_COLUMNS
    landed = "Q of a work item has landed"
    q_full = Signal(threads + 1, f"{GATHERED}, and one that has left the part for the consumers", landed)
    producer, *consumers = registers
    first = WARPGROUP * CONSUMERS
    return Pipes(
        (
            Ring(
                "q", 1, "the loaders", "both consumers",
                guards="Q of a work item stays until both consumers have multiplied it with their last tile",
                full=q_full,
                empty=Signal(CONSUMERS * WARPGROUP, "each warp of both consumers", "the last S of an item is computed"),
                stored=(("q", ROWS * qk * element),),
            ),
            ring(
                "values",
                CONSUMERS * TILES,
                HALF_BOXES,
                "the columns of a half of the values",
                "both consumers",
                values,
            ),
            *(
                [
                    ring(
                        "more",
                        TILES,
                        more,
                        "columns that are no values",
                        "the consumer of the tile",
                        gathered,
                        ", and P in their place until the other one has" if alike else "",
                    )
                ]
                if more
                else []
            ),
        ),
        named=(
            NamedBarrier("consumers", 1, 1, CONSUMERS * threads, "row sums are there, or have been read"),
            NamedBarrier("published", 2, 2, CONSUMERS * threads, "P of a consumer's tile is in shared memory"),
            *(
                [NamedBarrier("multiplied", 4, 2, threads, "all warps of a consumer have computed S")]
                if more and alike
                else []
            ),
            *(
                [NamedBarrier("loaders", 6, 1, threads, "all loaders have left the largest scale of a part")]
                if alike and latent_row
                else []
            ),
        ),
        roles=(
            *consumer_roles(consumers, alike),
            Role("loader", first, WARPGROUP, producer),
        ),
        order=_ORDER,
        others=tuple(others.items()),
    )  # fmt: skip
