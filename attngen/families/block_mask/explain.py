"""The plan of a kernel that makes block masks, in words."""

from __future__ import annotations

from collections.abc import Iterator

from attngen.plan.model import Plan


def facts(plan: Plan) -> Iterator[tuple[str, str]]:
    """Label and text of each line of its explanation."""
    yield "does", "writes for each block of queries which blocks of keys its list names"
    yield "block", f"{plan.tile_m} warps with a row each, of which shared memory holds {plan.tile_n} B"
    yield "moves", "4 B of an entry in, once for so many blocks of keys; 1 B of a block of keys out"
