"""Decisions of the Hopper backward by blocks beyond those of all plans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from attngen.plan.model import Region, Structure


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksBackward(Structure):
    """Roles and memory of a Hopper backward in CUDA whose consumers visit the blocks that their own rows see."""

    box_bytes: int  # of a row of one copy, over which it is swizzled
    of_queries: tuple[
        Region, ...
    ]  # shared memory of the kernel of dQ, as ``shared`` is that of the kernel of dK and dV

    #: Constant of the kernel of dK and dV: query rows of a step whose elements a warp has.
    queries_of_warp: ClassVar[str] = "kBlockM"
    #: P passes to the products in pairs of 16 bits, and rows of LSE and D are read where they lie.
    packed: ClassVar[bool] = True
    rows_ahead: ClassVar[int] = 0
    overlap: ClassVar[str] = "blocks"
    cluster: ClassVar[int] = 1
    own_spans: ClassVar[bool] = True
    stores_apart: ClassVar[bool] = True
    pingpong: ClassVar[bool] = False

    @property
    def holds_mask_bits(self) -> bool:
        """See ``Structure``."""
        return True

    @property
    def queries_bytes(self) -> int:
        """Shared memory of a block of the kernel of dQ."""
        return self.of_queries[-1].offset + self.of_queries[-1].bytes
