"""Decisions of the backward by mma.sync beyond those of all plans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from attngen.plan.model import Structure


@dataclass(frozen=True, slots=True, kw_only=True)
class MmaBackward(Structure):
    """Tile and memory of a backward by mma.sync, whose warps have S and dP of 32 keys and some queries each."""

    blocks: int  # that a multiprocessor runs at once
    columns_qk: int  # that are multiplied: multiples of 32; rows in shared memory may be longer
    columns_v: int
    box_bytes: int  # of a row, over which it is swizzled
    bounded_rows: bool  # the compiler knows how many rows are copied at once
    shares_p: bool  # several warps have the same keys, and divide the columns of dV and dK
    late_columns: int  # of dQ of a warp, that are added to the sums among the products of the next step; 0: all at once
    keys_once: bool  # registers hold the values of keys that the mask loads
    late_beside_s: int  # additions of a lane among the products of S, of as many as these columns; others beside dP
    by_columns: bool  # dQ is computed 16 columns after the other, some of which are added among the products of others
    centered: bool  # dP begins with -D
    ordered: bool  # dQ is added up in a fixed order, by counters of tiles of keys after the dQ accumulator
    cuts_first: bool  # several blocks may divide one of the first tiles of keys of a KV head

    one_address: ClassVar[bool] = True
    queries_of_warp: ClassVar[str] = "kWarpM"
    #: P passes to the products in pairs of 16 bits, and rows of LSE and D lie in their order.
    packed: ClassVar[bool] = True
    rows_ahead: ClassVar[int] = 0
    overlap: ClassVar[str] = "nothing"
    cluster: ClassVar[int] = 0
    own_spans: ClassVar[bool] = False
