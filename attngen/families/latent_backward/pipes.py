"""The pipes of the Hopper backward of latent attention: those of ``dq``, and those of ``dkv``."""

from __future__ import annotations

from attngen.dtypes import CHUNK_COLUMNS, CHUNK_KEY_TILES, CHUNK_ROW_TILES, CHUNK_TILE
from attngen.families.latent.pipes import BOX_COLUMNS, GATHERED
from attngen.plan.pipes import WARPGROUP, NamedBarrier, Pipes, Ring, Role, Signal

#: Warpgroups that multiply, of either launch (docs/notebook/hopper_mla.md, "Backward").
CONSUMERS = 2
#: Stages of dkv, each with half of the rows of a tile. Not measured one against the other.
STAGES = 4
HALF_ROWS = CHUNK_TILE // 2
_THREADS = 32 * WARPGROUP
_WORD = 4

#: Registers of the threads of dq, whose first two warpgroups hold dQ. The block has 168 for each of its threads.
#: Not measured one against the other.
_REGISTERS = {"p": 200, "ds": 232, "loader": 72}
#: The same of dkv, whose consumers hold dK. Not measured: the most that there are.
_DKV_REGISTERS = 240, 24


def dq_pipes(*, qk: int, v: int, element: int) -> Pipes:
    """Pipes of ``dq``, with rows of ``qk`` columns, the first ``v`` of them values, of ``element`` bytes."""
    box = CHUNK_TILE * BOX_COLUMNS * element
    tile = CHUNK_TILE * CHUNK_TILE * element
    rows = {"q": CHUNK_TILE * qk * element, "dout": CHUNK_TILE * v * element, "p": tile, "ds": tile}
    return Pipes(
        (
            Ring(
                "k", qk // BOX_COLUMNS, "the loaders", "both consumers",
                guards="a box of columns of K stays until dQ has read it, the last product that does",
                full=Signal(_THREADS, GATHERED, "rows of a box have landed"),
                empty=Signal(WARPGROUP, "each warp of the consumer that has these columns of dQ", "dQ has read it"),
                stored=(("k", box),),
            ),
        ),
        named=(
            NamedBarrier("order", 1, 1, CONSUMERS * _THREADS, "half of S is multiplied, so that it is ahead of dP"),
            NamedBarrier("published", 2, 1, CONSUMERS * _THREADS, "P is in shared memory"),
            NamedBarrier("complete", 3, 1, CONSUMERS * _THREADS, "dS is in shared memory"),
            NamedBarrier("given", 4, 1, _THREADS + 32, "P and dS are in shared memory, for the warp that writes them"),
            NamedBarrier("written", 5, 2, _THREADS + 32, "P, or dS, has been read from there"),
        ),
        roles=tuple(
            Role(name, WARPGROUP * place, WARPGROUP, registers)
            for place, (name, registers) in enumerate(_REGISTERS.items())
        ),
        order=("q", "dout", "k", "p", "ds", "barriers"),
        others=tuple(rows.items()),
    )  # fmt: skip


def dkv_pipes(*, element: int) -> Pipes:
    """Pipes of ``dkv``."""
    consumer, loader = _DKV_REGISTERS
    first = WARPGROUP * CONSUMERS
    return Pipes(
        (
            Ring(
                "rows", STAGES, "the loader", "the consumers",
                guards="half of a tile of rows stays until each consumer has multiplied its tiles of keys with them",
                full=Signal(1, "the loader", "rows have landed", bytes=True),
                empty=Signal(first, "each warp of the consumers", "it has multiplied them"),
                stored=(
                    ("pairs", HALF_ROWS * 2 * CHUNK_KEY_TILES * CHUNK_TILE * element),
                    ("columns", HALF_ROWS * 2 * CHUNK_COLUMNS * element),
                ),
            ),
        ),
        named=(),
        roles=(Role("consumers", 0, first, consumer), Role("loader", first, WARPGROUP, loader)),
        order=("pairs", "columns", "barriers", "seen"),
        others=(("seen", CHUNK_ROW_TILES * _WORD),),
    )  # fmt: skip
