"""Which tile each kernel gets when its spec does not say, and how head dims become power-of-two column blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from attngen.arch import Arch
from attngen.plan.model import Columns, Plan
from attngen.spec.expand import Backward, Gradient, KernelSpec


@dataclass(frozen=True, slots=True)
class Tile:
    """Query rows by key rows of one step, loads in flight, warps per block, and the most registers of a thread.

    ``registers`` is set where it lets one more block run on a multiprocessor; the compile drops it if it spills.
    """

    m: int
    n: int
    stages: int
    warps: int
    registers: int | None = None


#: (family, largest head_dim) → tile, first match wins. The rows of "wgmma" were measured on an H200
#: (docs/performance.md); the others follow from registers and shared memory, and were not raced.
_TABLE: tuple[tuple[str, int, Tile], ...] = (
    ("wgmma", 64, Tile(64, 64, 3, 4, 128)),
    ("wgmma", 128, Tile(64, 64, 3, 4)),
    ("wgmma", 256, Tile(64, 32, 3, 4)),
    # random numbers take registers while they are made
    ("dropped", 128, Tile(64, 64, 3, 4)),
    ("dropped", 256, Tile(64, 32, 2, 8)),
    # every element of a tile loads a value of its own, whose addresses take two registers each
    ("gather", 64, Tile(64, 64, 3, 4)),
    ("gather", 128, Tile(64, 32, 2, 4)),
    ("gather", 256, Tile(64, 16, 2, 4)),
    ("descriptor", 128, Tile(64, 64, 3, 4)),
    ("descriptor", 256, Tile(64, 32, 2, 4)),
    ("pointer", 64, Tile(128, 64, 3, 4)),
    ("pointer", 128, Tile(64, 64, 3, 4)),
    ("pointer", 256, Tile(64, 32, 2, 4)),
    # loads of single elements, as strides may be anything
    ("unaligned", 64, Tile(64, 32, 2, 4)),
    ("unaligned", 128, Tile(64, 16, 2, 4)),
    ("unaligned", 256, Tile(64, 16, 2, 8)),
    # no tensor cores: products are FMAs on registers
    ("fp32", 128, Tile(32, 32, 1, 8)),
    ("fp32", 256, Tile(32, 16, 1, 8)),
)


#: The same for the two kernels of a backward: (family, largest head_dim) → tile of "dkdv", tile of "dq".
_GRADIENTS: tuple[tuple[str, int, Tile, Tile], ...] = (
    # plain masks of dense sequences at the head dims themselves: raced (docs/performance.md); the others avoid spills
    ("plain", 64, Tile(128, 64, 2, 4), Tile(64, 64, 2, 4)),
    ("plain", 128, Tile(64, 64, 2, 4), Tile(128, 64, 3, 8)),
    ("wgmma", 64, Tile(64, 128, 3, 8), Tile(128, 64, 3, 8)),
    ("wgmma", 128, Tile(64, 128, 2, 8), Tile(128, 64, 2, 8)),
    ("wgmma", 256, Tile(32, 32, 2, 4), Tile(64, 32, 2, 4)),
    # a score or packed sequences leave fewer registers to the products
    ("scored", 64, Tile(64, 128, 3, 8), Tile(128, 64, 3, 8)),
    ("scored", 128, Tile(32, 128, 2, 8), Tile(128, 64, 2, 8)),
    ("scored", 192, Tile(32, 32, 2, 4), Tile(64, 32, 2, 4)),
    ("scored", 256, Tile(16, 32, 2, 4), Tile(64, 16, 2, 4)),
    # tiles that are listed, and not ranges, are visited in nested loops, which leaves fewer still
    ("listed", 64, Tile(64, 128, 2, 8), Tile(128, 64, 3, 8)),
    ("listed", 128, Tile(16, 128, 2, 8), Tile(128, 64, 2, 8)),
    ("listed", 192, Tile(16, 32, 2, 4), Tile(64, 32, 2, 4)),
    ("listed", 256, Tile(16, 32, 2, 4), Tile(64, 16, 2, 4)),
    # chosen such that ptxas neither spills nor makes products wait for each other
    ("dropped", 64, Tile(64, 32, 2, 4), Tile(64, 64, 2, 4)),
    ("dropped", 96, Tile(16, 32, 2, 4), Tile(64, 16, 2, 4)),
    ("dropped", 128, Tile(64, 32, 2, 4), Tile(128, 64, 2, 8)),
    ("dropped", 256, Tile(16, 32, 2, 4), Tile(64, 16, 2, 4)),
    ("gather", 64, Tile(32, 64, 2, 4), Tile(64, 32, 2, 4)),
    ("gather", 128, Tile(16, 64, 2, 4), Tile(64, 32, 2, 4)),
    ("gather", 256, Tile(16, 32, 2, 4), Tile(64, 16, 2, 4)),
    # both: no spills beyond 8 bytes with Triton 3.6 and 3.9
    ("gather_dropped", 64, Tile(32, 64, 2, 4), Tile(64, 32, 2, 4)),
    ("gather_dropped", 128, Tile(32, 64, 2, 8), Tile(64, 32, 2, 4)),
    ("gather_dropped", 256, Tile(32, 32, 2, 8), Tile(64, 32, 2, 8)),
    ("descriptor", 64, Tile(64, 64, 2, 4), Tile(64, 64, 2, 4)),
    ("descriptor", 128, Tile(64, 64, 2, 8), Tile(64, 64, 2, 4)),
    ("descriptor", 256, Tile(16, 32, 1, 4), Tile(64, 32, 1, 8)),
    ("pointer", 64, Tile(32, 64, 2, 4), Tile(64, 32, 2, 4)),
    ("pointer", 128, Tile(32, 64, 2, 8), Tile(64, 32, 2, 4)),
    ("pointer", 256, Tile(16, 64, 1, 8), Tile(64, 16, 1, 8)),
    ("unaligned", 64, Tile(32, 64, 2, 8), Tile(64, 32, 2, 8)),
    ("unaligned", 128, Tile(16, 64, 1, 8), Tile(64, 16, 1, 8)),
    ("unaligned", 256, Tile(16, 16, 1, 8), Tile(16, 16, 1, 8)),
    ("fp32", 64, Tile(32, 32, 1, 8), Tile(32, 32, 1, 8)),
    ("fp32", 128, Tile(16, 16, 1, 8), Tile(16, 16, 1, 8)),
    ("fp32", 256, Tile(16, 16, 1, 8), Tile(16, 16, 1, 8)),
)


#: Columns that a product sums over, at least: the least K of ``tl.dot``.
_PRODUCT_DEPTH = 16

#: What is tried where the table's tile takes too many registers after all: tiles with fewer keys, more warps, and at
#: last such small ones that products are not of warpgroups, which ptxas neither serializes nor parts.
_SMALLER = (
    Tile(64, 64, 2, 4), Tile(64, 32, 2, 4), Tile(64, 64, 2, 8), Tile(64, 16, 2, 4), Tile(64, 32, 1, 8),
    Tile(32, 32, 2, 4), Tile(16, 16, 1, 4),
)  # fmt: skip

#: The same for the two kernels of a backward: tile of "dkdv", tile of "dq".
_SMALLER_GRADIENTS = (
    (Tile(32, 64, 2, 4), Tile(64, 32, 2, 4)),
    (Tile(64, 128, 2, 8), Tile(128, 64, 2, 8)),
    (Tile(32, 128, 2, 8), Tile(128, 32, 2, 8)),
    (Tile(16, 64, 2, 4), Tile(64, 16, 2, 4)),
    (Tile(32, 32, 1, 4), Tile(32, 32, 1, 4)),
    (Tile(16, 32, 1, 4), Tile(32, 16, 1, 4)),
    (Tile(16, 16, 1, 8), Tile(16, 16, 1, 8)),
)


def alternatives(spec: KernelSpec, first: Plan) -> Iterator[KernelSpec]:
    """Yield the spec of a forward with other tiles than that of its ``first`` plan, where it leaves them open."""
    rows = [tile for tile in _SMALLER if tile.m * tile.n <= first.tile_m * first.tile_n]
    for tile in dict.fromkeys(_completed(spec, tile) for tile in rows):
        yield replace(spec, tile_m=tile.m, tile_n=tile.n, stages=tile.stages, num_warps=tile.warps)


def gradient_alternatives(spec: KernelSpec, first: Plan) -> Iterator[KernelSpec]:
    """Yield the spec of a backward with other tiles than those of its ``first`` plan, where it leaves them open."""
    del first
    given = spec.backward or Backward()
    for dkdv, dq in _SMALLER_GRADIENTS:
        tiles = Backward(_gradient(_completed(given.dkdv, dkdv)), _gradient(_completed(given.dq, dq)))
        yield replace(spec, backward=tiles)


def _completed(given: KernelSpec | Gradient, tile: Tile) -> Tile:
    """Return a tile with what a spec fixes in place of its own."""
    return Tile(
        given.tile_m or tile.m, given.tile_n or tile.n, given.stages or tile.stages, given.num_warps or tile.warps
    )


def _gradient(tile: Tile) -> Gradient:
    return Gradient(tile.m, tile.n, tile.stages, tile.warps)


def family(arch: Arch, *, loads: str, aligned: bool, element_bytes: int, gathers: bool, dropout: bool = False) -> str:
    """Return which rows of the table a kernel takes; ``gathers``: mask or score load a value for every pair."""
    if element_bytes == 4:
        return "fp32"
    if loads == "descriptor":
        own = "dropped" if dropout else "wgmma"
        return "gather" if gathers else own if arch.wgmma else "descriptor"
    return "pointer" if aligned else "unaligned"


def default_tile(family: str, head_dim: int) -> Tile:
    """Return the table's tile for a kernel, before its budget is checked."""
    return next(tile for name, largest, tile in _TABLE if name == family and head_dim <= largest)


def default_gradient_tile(kernel: str, family: str, head_dim: int) -> Tile:
    """Return the table's tile for ``dkdv`` or ``dq``, before its budget is checked."""
    row = next(row for row in _GRADIENTS if row[0] == family and head_dim <= row[1])
    return row[2] if kernel == "dkdv" else row[3]


def columns(head_dim: int) -> tuple[Columns, ...]:
    """Split ``head_dim`` into at most two power-of-two blocks, padding the last one where that is not exact.

    96 is 64 + 32, 192 is 128 + 64, 80 is 64 + 16; 112 would need three blocks and is padded to 128. No block is
    narrower than a product can be deep: 72 is 64 + 16, and 8 is padded to 16.
    """
    first = max(1 << (head_dim.bit_length() - 1), _PRODUCT_DEPTH)
    if first >= head_dim:
        return (Columns(0, first, head_dim),)
    rest = head_dim - first
    second = max(1 << (rest - 1).bit_length(), _PRODUCT_DEPTH)
    if second == first:
        return (Columns(0, 2 * first, head_dim),)
    return (Columns(0, first, first), Columns(first, second, rest))


def gradient_columns(head_dim: int, *, wgmma: bool) -> tuple[Columns, ...]:
    """Return the blocks of a backward, which ``wgmma`` multiplies or not.

    ptxas lets these products wait for each other where a block of 16 columns stands beside another, and often where
    head dims up to 128 are two blocks at all. Odd multiples of 8 are padded as far as it takes to have none: 8 to 32,
    40 to 64, 72 to 128, 136 to 128 + 64. But no copy of 64 columns may bring padding alone (``tensormap.windowed``).
    """
    if not wgmma or head_dim % 16 == 0:
        return columns(head_dim)
    if 128 < head_dim <= 192:
        return (Columns(0, 128, 128), Columns(128, 64, head_dim - 128))
    return (Columns(0, max(1 << (head_dim - 1).bit_length(), 32), head_dim),)


def padded_width(blocks: tuple[Columns, ...]) -> int:
    """Return how many columns the blocks hold, padding included."""
    return sum(block.width for block in blocks)
