"""The plan of a kernel that widens caches, in words."""

from __future__ import annotations

from collections.abc import Iterator

from attngen.plan.model import Plan


def facts(plan: Plan) -> Iterator[tuple[str, str]]:
    """Label and text of each line of its explanation."""
    wide, narrow = plan.operands.q.bytes, plan.operands.k.bytes
    yield "does", f"writes the used keys and values of a cache in 8 bits in {plan.dtype_name}, times their scales"
    yield "head_dim", "any multiple of 8"
    yield "block", f"{plan.threads} threads: keys or values of {plan.tile_n} tokens of a sequence, of all heads"
    yield "runs", "before an ordinary kernel, where a call has many queries"
    yield "moves", f"{narrow} B of a number in, {wide} B out"
