"""The Hopper kernel that scores blocks of keys for an index: the largest q k in each, for each head, in float32.

It differs from that of index scores in what becomes of the products. Lanes and warps that have rows of the same columns
compare their maxima once for a block of keys, so that the comparisons within a thread are what a product waits for:
one for each pair, half of the time of a product of 16 bits.
"""

from __future__ import annotations

from attngen.families.index_scores.schedule import Reduction, schedule_of
from attngen.operations import BLOCK_SCORES

#: Heads of an index that chooses for each KV head are few. With few queries tiles are as narrow as lanes can share.
#: Columns, and blocks of a multiprocessor: not measured.
MAXIMA = Reduction(
    BLOCK_SCORES, "maxima over blocks of keys of q k, in float32", (2, 4, 8), 32, 3, ("out",), "bsh",
    sizes=("block_tiles",), column_bytes=2 * 4 * 4,
)  # fmt: skip

SCHEDULE = schedule_of(MAXIMA)
