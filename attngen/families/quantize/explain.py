"""The plan of a kernel that quantizes, in words."""

from __future__ import annotations

from collections.abc import Iterator

from attngen.dtypes import CHUNK_BYTES
from attngen.plan.model import Plan


def facts(plan: Plan) -> Iterator[tuple[str, str]]:
    """Label and text of each line of its explanation."""
    if plan.loads == "descriptor":
        yield from _of_tiles(plan)
        return
    given = plan.operands.q.bytes
    yield "does", "rounds Q, K and V to 8 bits and finds their scales; rotates and transforms rows of Q and K"
    yield "head_dim", f"any multiple of {CHUNK_BYTES // given} up to 256"
    yield "block", f"some rows of a head; a thread has {4 * CHUNK_BYTES} B, up to {plan.threads} threads"
    yield "loads", f"by pointers; strides and addresses are multiples of {plan.alignment} B"
    yield "launches", "1 with a scale for each block of tokens; else 2, which find the largest numbers and round"
    yield "moves", f"{given} B of a number in, 1 B out; with 2 launches twice the former"


def _of_tiles(plan: Plan) -> Iterator[tuple[str, str]]:
    heads, groups = 128 // plan.head_dim_qk, plan.num_warps // 4
    shared = plan.launches[0].shared_bytes
    yield "does", "rounds Q, K and V to 8 bits and finds scales but those of tensors; rotates and transforms Q and K"
    yield "head_dim", str(plan.head_dim_qk)
    yield "tile", f"{plan.tile_m} tokens of {heads} heads, for {groups} groups of 4 warps"
    yield "loads", f"by the copy engine, {plan.stages} tiles of a group at a time; {shared} B"
    yield "launches", "1; with rotation 2 for scales of tokens and 3 for those of heads, of which V has one"
    yield "moves", f"{plan.operands.q.bytes} B of a number in, 1 B out"
