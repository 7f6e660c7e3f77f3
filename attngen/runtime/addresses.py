"""Where each address stands in the list that launches take: one order for forwards and backwards.

A list begins with ``FORWARD`` or with ``BACKWARD``, which begins with it. The variant's own tensors follow, then their
gradients, then workspaces and tile maps, in an order that a prepared kernel tells (``PreparedLaunches.names``).
"""

from __future__ import annotations

FORWARD = (
    "q", "k", "v", "out", "lse", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "tile_counter", "page_table",
    "split_counters",
)  # fmt: skip
BACKWARD = (*FORWARD, "dout", "dlse", "dq", "dk", "dv")

(
    Q, K, V, OUT, LSE, CU_SEQLENS_Q, CU_SEQLENS_K, SEQUSED_K, TILE_COUNTER, PAGE_TABLE, SPLIT_COUNTERS, DOUT, DLSE, DQ,
    DK, DV,
) = range(len(BACKWARD))  # fmt: skip


def empty(*known: int, backward: bool = False) -> list[int]:
    """Return a list of addresses of which the first are ``known``, and the others 0."""
    return [*known, *[0] * (len(BACKWARD if backward else FORWARD) - len(known))]
