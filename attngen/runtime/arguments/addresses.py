"""Positions of addresses in the list that launches take: one order for both passes.

A list begins with ``FORWARD`` or with ``BACKWARD``, which begins with it. The variant's own tensors follow, then their
gradients, then workspaces and tile maps, in an order that a prepared kernel tells (``Launches.names``).
"""

from __future__ import annotations

from collections.abc import Sequence

from attngen.runtime.arguments.given import TENSORS

FORWARD = (*TENSORS, "lse", "tile_counter", "split_counters")
BACKWARD = (*FORWARD, "dout", "dlse", "dq", "dk", "dv")

OUT, LSE, TILE_COUNTER, SPLIT_COUNTERS, DOUT, DLSE, DQ, DK, DV = map(
    BACKWARD.index, ("out", "lse", "tile_counter", "split_counters", "dout", "dlse", "dq", "dk", "dv")
)

#: The addresses behind those of q, k and v: 0 for what is absent, or allocated later.
NO_FORWARD = (0,) * (len(FORWARD) - 3)
NO_BACKWARD = (0,) * (len(BACKWARD) - 3)


def known_of(names: Sequence[str], addresses: Sequence[int]) -> dict[str, int]:
    """Addresses that the selection of a kernel looks at, from a list of those of a backward: of a call's tensors, and
    of its variant's own, which have these ``names``."""
    known = dict(zip(TENSORS, addresses, strict=False))
    return known | {f"tensor:{name}": address for name, address in zip(names, addresses[len(BACKWARD) :], strict=True)}
