"""Which tile each kernel gets when its spec does not say, and how head dims become power-of-two column blocks."""

from __future__ import annotations

from dataclasses import dataclass

from attngen.arch import Arch
from attngen.plan.model import Columns


@dataclass(frozen=True, slots=True)
class Tile:
    """Query rows by key rows of one step, loads in flight, warps per block, and the most registers of a thread.

    ``registers`` is set where it lets one more block run on a multiprocessor, at no cost in spills.
    """

    m: int
    n: int
    stages: int
    warps: int
    registers: int | None = None


#: (least capability, largest head_dim, element bytes) → tile, first match wins. The sm90a rows were measured on an
#: H200 (docs/performance.md); the rows of other targets follow from their shared memory and were not raced.
_TABLE: tuple[tuple[int, int, int, Tile], ...] = (
    (90, 64, 2, Tile(64, 64, 3, 4, 128)),
    (90, 128, 2, Tile(64, 64, 3, 4)),
    (90, 256, 2, Tile(64, 32, 3, 4)),
    (80, 64, 2, Tile(128, 64, 3, 4)),
    (80, 128, 2, Tile(64, 64, 3, 4)),
    (80, 256, 2, Tile(64, 32, 2, 4)),
    (80, 64, 4, Tile(32, 32, 2, 4)),
    (80, 256, 4, Tile(32, 16, 2, 4)),
)


#: Where every element of a tile loads a value of its own, addresses take two registers each: fewer keys per step.
_GATHER_TILE = Tile(64, 32, 3, 4)


def default_tile(
    arch: Arch, head_dim_qk: int, head_dim_v: int, element_bytes: int, *, gathers: bool = False
) -> Tile:
    """Return the table's tile for a kernel, before its budget is checked.

    ``gathers``: mask or score read a tensor at indices that differ from element to element.
    """
    head_dim = max(head_dim_qk, head_dim_v)
    if gathers and element_bytes == 2:
        return _GATHER_TILE if head_dim > 64 else Tile(64, 64, 3, 4)
    for capability, largest, size, tile in _TABLE:
        if arch.capability >= capability and head_dim <= largest and element_bytes == size:
            return tile
    raise KeyError(f"no tile for {arch.name}, head_dim {head_dim}, {element_bytes} bytes")


def columns(head_dim: int) -> tuple[Columns, ...]:
    """Split ``head_dim`` into at most two power-of-two blocks, padding the last one where that is not exact.

    96 is 64 + 32, 192 is 128 + 64, 80 is 64 + 16; 112 would need three blocks and is padded to 128.
    """
    first = 1 << (head_dim.bit_length() - 1)
    if first == head_dim:
        return (Columns(0, head_dim, head_dim),)
    rest = head_dim - first
    second = 1 << (rest - 1).bit_length()
    if second == first:
        return (Columns(0, 2 * first, head_dim),)
    return (Columns(0, first, first), Columns(first, second, rest))


def padded_width(blocks: tuple[Columns, ...]) -> int:
    """Return how many columns the blocks hold, padding included."""
    return sum(block.width for block in blocks)
