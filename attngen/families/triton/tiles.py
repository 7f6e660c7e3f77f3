"""Tiles of Triton kernels: the family of a kernel in the tables, and the column blocks of a head dim."""

from __future__ import annotations

from dataclasses import dataclass

from attngen.arch import Arch
from attngen.dtypes import DType
from attngen.plan.choices import TILE_SIZES
from attngen.plan.model import Columns
from attngen.plan.operands import dot_precision
from attngen.schema.kernel_spec import Gradient, KernelSpec

#: Columns of a block whose elements mma.sync multiplies in parts: 16 keys take 64 registers a thread
#: (docs/notebook/triton_forward.md, "Float32").
_SPLIT_COLUMNS = 64


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


def product_depth(element: DType) -> int:
    """Least number of elements that a product sums over: the least K of ``tl.dot``."""
    return max(16, element.mma_k)


def depth_sizes(element: DType) -> tuple[int, ...]:
    """Return the sizes of a tile that products sum over."""
    return tuple(size for size in TILE_SIZES if size >= product_depth(element))


def completed(given: KernelSpec | Gradient, tile: Tile) -> Tile:
    """Return a tile with what a spec fixes in place of its own."""
    return Tile(
        given.tile_m or tile.m, given.tile_n or tile.n, given.stages or tile.stages, given.num_warps or tile.warps
    )


def family(
    arch: Arch, *, loads: str, aligned: bool, element: DType, fast_math: bool, gathers: bool, dropout: bool = False
) -> str:
    """Family of the table's rows that a kernel takes; ``gathers``: mask or score load a value for every pair."""
    if element.mma is None:
        return dot_precision(arch, fast_math=fast_math)
    if loads == "descriptor":
        own = "dropped" if dropout else "wgmma"
        return "gather" if gathers else own if arch.wgmma else "descriptor"
    return "pointer" if aligned else "unaligned"


def widest_block(arch: Arch, element: DType, *, fast_math: bool) -> int | None:
    """Most columns of a block; None where it may have any power of two.

    With "tf32x3" each warp has a whole block of K in registers, in two parts.
    """
    split = element.mma is None and dot_precision(arch, fast_math=fast_math) == "tf32x3"
    return _SPLIT_COLUMNS if split else None


def columns(head_dim: int, element: DType, widest: int | None = None) -> tuple[Columns, ...]:
    """Split ``head_dim`` into at most two power-of-two blocks, padding the last one where that is not exact; or into
    blocks of ``widest`` columns.

    96 is 64 + 32, 192 is 128 + 64, 80 is 64 + 16; 112 would need three blocks and is padded to 128. No block is
    narrower than a product can be deep: of 16 bits, 72 is 64 + 16, and 8 is padded to 16.
    """
    depth = product_depth(element)
    if widest is not None and head_dim > widest:
        starts = range(0, head_dim, widest)
        used = [min(widest, head_dim - start) for start in starts]
        widths = [max(1 << (count - 1).bit_length(), depth) for count in used]
        return tuple(map(Columns, starts, widths, used))
    first = max(1 << (head_dim.bit_length() - 1), depth)
    if first >= head_dim:
        return (Columns(0, first, head_dim),)
    rest = head_dim - first
    second = max(1 << (rest - 1).bit_length(), depth)
    if second == first:
        return (Columns(0, 2 * first, head_dim),)
    return (Columns(0, first, first), Columns(first, second, rest))


def gradient_columns(head_dim: int, element: DType, *, wgmma: bool, widest: int | None = None) -> tuple[Columns, ...]:
    """Return the blocks of a backward, which ``wgmma`` multiplies or not.

    ptxas lets these products wait for each other where a block of 16 columns stands beside another, and often where
    head dims up to 128 are two blocks at all. Odd multiples of 8 are padded as far as it takes to have none: 8 to 32,
    40 to 64, 72 to 128, 136 to 128 + 64. But no copy of 64 columns may bring padding alone (``tensormap.windowed``).
    """
    if head_dim > 256:
        return _wide_columns(head_dim)
    if not wgmma or head_dim % 16 == 0:
        return columns(head_dim, element, widest)
    if 128 < head_dim <= 192:
        return (Columns(0, 128, 128), Columns(128, 64, head_dim - 128))
    return (Columns(0, max(1 << (head_dim - 1).bit_length(), 32), head_dim),)


def _wide_columns(head_dim: int) -> tuple[Columns, ...]:
    """Blocks of 256, 128 and 64 columns, in which no copy of 64 columns brings padding alone; 512 are one block."""
    if head_dim > 448:
        return (Columns(0, 512, head_dim),)
    blocks, start = [], 0
    for width in (256, 128, 64):
        if head_dim - start > (0 if width == 64 else width // 2):
            blocks.append(Columns(start, width, min(width, head_dim - start)))
            start += width
    return tuple(blocks)
