"""The pipes of the Hopper kernels of head dims beyond 256: rings of halves of K and of parts of V, P of two tiles."""

from __future__ import annotations

from attngen.families.latent.pipes import BOX_COLUMNS, CONSUMERS, HALF_BOXES, KEYS, ROWS
from attngen.parts.ranges import COUNT_BYTES, WALK_BYTES
from attngen.plan.pipes import BARRIER_BYTES, WARPGROUP, NamedBarrier, Pipes, Ring, Role, Signal

#: Halves of the columns of a tile of K in flight, and quarters of the columns of a tile of V, of each consumer.
#: Not measured one against the other.
_KEY_HALVES, _VALUE_PARTS = 2, 3
#: Tiles of P: one is written while another is multiplied.
_P_TILES = 2

#: Shared memory in its order: matrices first, which need the most alignment, and words last.
_ORDER = ("q", "keys", "values", "p", "alpha", "row_max", "sums", "barriers", "begin", "last", "counts")
_WARPS = WARPGROUP * (CONSUMERS + 2)
_FLOAT = 4


def wide_pipes(*, width_qk: int, element: int, register_boxes: int, registers: tuple[int, int, int]) -> Pipes:
    """Pipes of a kernel with ``width_qk`` columns of Q and K, and ``register_boxes`` of Q in registers.

    ``registers`` are those of a thread of the consumers, of the scorer, and of the loaders.
    """
    box = KEYS * BOX_COLUMNS * element
    boxes = width_qk // BOX_COLUMNS
    others = {
        "q": (boxes - register_boxes) * box,
        "p": _P_TILES * box,
        "alpha": _P_TILES * ROWS * _FLOAT,
        "row_max": _P_TILES * ROWS * _FLOAT,
        "sums": _P_TILES * ROWS * _FLOAT,
        "begin": WALK_BYTES,
        "last": BARRIER_BYTES,
        "counts": _WARPS * COUNT_BYTES,
    }

    def ring(name: str, stages: int, boxes: int, readers: str, guards: str) -> Ring:
        return Ring(
            name, stages, "a loader", readers,
            guards=guards,
            full=Signal(1, "a loader", "a box has landed", bytes=True),
            empty=Signal(
                2 * WARPGROUP,
                "each warp of the readers, of both blocks of a cluster, or twice of a single block",
                "the product of its tile is complete",
            ),
            stored=((name, boxes * box),),
        )  # fmt: skip

    threads = 32 * WARPGROUP
    handed = threads * (CONSUMERS + 1)
    consumer, scorer, loader = registers
    return Pipes(
        (
            ring(
                "keys", _KEY_HALVES, boxes // 2, "the scorer",
                "half of the columns of a tile of K stay until the scorer has multiplied them",
            ),
            ring(
                "values", _VALUE_PARTS * CONSUMERS, HALF_BOXES // 2, "a consumer",
                "a quarter of the columns of a tile of V stays until the consumer of these columns has multiplied it",
            ),
        ),
        named=(
            NamedBarrier("consumers", 1, 1, CONSUMERS * threads, "partial results are stored, or have been merged"),
            NamedBarrier("queries", 2, 1, threads, "columns of Q are in shared memory, or have been multiplied"),
            NamedBarrier("published", 3, _P_TILES, handed, "P of a tile is there, and S of the next one half done"),
            NamedBarrier("multiplied", 5, _P_TILES, handed, "both consumers have multiplied P"),
            NamedBarrier("zeroed", 7, 2, threads, "a consumer has cleared the values after the last key"),
        ),
        roles=(
            Role("consumers", 0, WARPGROUP * CONSUMERS, consumer),
            Role("scorer", WARPGROUP * CONSUMERS, WARPGROUP, scorer),
            Role("loader", WARPGROUP * (CONSUMERS + 1), WARPGROUP, loader),
        ),
        order=_ORDER,
        others=tuple(others.items()),
    )  # fmt: skip
