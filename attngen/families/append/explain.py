"""The plan of a kernel that appends to caches, in words."""

from __future__ import annotations

from collections.abc import Iterator

from attngen.dtypes import CHUNK_BYTES
from attngen.plan.model import Plan


def facts(plan: Plan) -> Iterator[tuple[str, str]]:
    """Label and text of each line of its explanation."""
    qk, v = plan.head_dim_qk, plan.head_dim_v
    widest = str(qk) if qk == v else f"{qk} for q and k, {v} for v"
    vectors = plan.threads * CHUNK_BYTES // plan.operands.k.bytes
    yield "does", "writes new keys and values into pages or dense caches; rotates keys and queries on the way"
    yield "head_dim", f"any whose rows are multiples of {CHUNK_BYTES} B; those of this spec up to {widest}"
    yield "block", f"{plan.threads} threads of {CHUNK_BYTES} B each: {vectors} numbers of a row of K, V or Q"
    yield "loads", f"by pointers; strides and addresses are multiples of {plan.alignment} B"
    yield "grid", "one block for as many rows of tokens and heads as it holds"
