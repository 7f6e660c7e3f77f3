"""Lines of the shared memory map, and what all views of CUDA kernels write alike."""

from __future__ import annotations

from dataclasses import dataclass

from attngen.plan.model import Columns, Launch, Plan
from attngen.render.cuda_arguments import argument_lines

#: Swizzle fields of wgmma's descriptors, by the bytes of a row.
SWIZZLES = {128: 1, 64: 2, 32: 3}


@dataclass(frozen=True, slots=True)
class RegionView:
    """A line of the shared memory map."""

    constant: str
    offset: int
    text: str


def classifier_lines(plan: Plan, own: Launch) -> tuple[str, ...]:
    """Return the parameter list of a kernel that makes a tile map."""
    return argument_lines(plan, own.arguments, written=frozenset({"tile_map", "tile_hashes"}))


def padding(columns: Columns) -> str:
    """Return the comment that says how much of a padded width is real."""
    return "" if columns.used == columns.width else f"  // {columns.used} columns and zeros"
