"""Columns of a head dim in the blocks of a Triton kernel."""

from __future__ import annotations

from attngen.plan.model import Columns


def padded_width(blocks: tuple[Columns, ...]) -> int:
    """Columns that the blocks hold, padding included."""
    return sum(block.width for block in blocks)
