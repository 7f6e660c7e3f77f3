"""The plan of a kernel that merges results, in words."""

from __future__ import annotations

from collections.abc import Iterator

from attngen.dtypes import CHUNK_BYTES
from attngen.plan.model import Plan


def facts(plan: Plan) -> Iterator[tuple[str, str]]:
    """Label and text of each line of its explanation."""
    yield "does", "joins results of one query over two sets of keys, weighted by their log-sum-exps"
    yield "head_dim", f"any whose rows are multiples of {CHUNK_BYTES} B"
    yield "block", f"{plan.threads} threads of {CHUNK_BYTES} B of an output each"
    yield "moves", "rows of both parts in, one out; 4 B of each log-sum-exp"
    yield "loads", f"by pointers; strides and addresses of outputs are multiples of {plan.alignment} B"
