"""Packed sequences as one row: a variant over documents that reads positions in the packed tensor alone.

A call over packed sequences counts ``q`` and ``kv`` within a document. Here a document's begin, end and number are
tensors by row, so that the same mask and score are those of one dense sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from attngen.lang.facts import index
from attngen.lang.ir import MAX_SEQLEN, Expr, Load, Op, Type, Var, rewrite
from attngen.lang.simplify import COMPLEMENT, Linear, linear, make, sub
from attngen.lang.variant import VISIBLE, Bound, Monotone, Scalar, Tensor, Variant
from attngen.parallel.segments import ends_at_query

#: Tensors of one row that say in which document each token is. No name of a variant can be one of these twice.
BEGIN, END, NUMBER, LENGTH = "document_begin", "document_end", "document_number", "document_length"

#: Extents of packed tensors, and what they are for one row.
_EXTENTS = {
    "b": "documents",
    "seqlen_q": "longest",
    "seqlen_k": "longest",
    "total_q": "seqlen_q",
    "total_k": "seqlen_k",
}


def as_one_row(variant: Variant) -> Variant:
    """The variant of one dense sequence that computes what ``variant`` does over packed ones."""
    q, kv = index("q"), index("kv")
    begin, end, number, length = (Load(name, (q,), Type.INT) for name in (BEGIN, END, NUMBER, LENGTH))
    names: dict[str, Expr] = {
        "q": sub(q, begin), "q_pos": sub(q, begin), "kv": sub(kv, begin), "b": number,
        "seqlen_q": length, "seqlen_k": length, "q_global": q, "kv_global": kv,
        "total_q": index("seqlen_q"), "total_k": index("seqlen_k"),
    }  # fmt: skip

    def rewritten(expr: Expr) -> Expr:
        return rewrite(expr, lambda node: names.get(node.name) if isinstance(node, Var) else None)

    inside: Expr = Op("le", (begin, kv), Type.BOOL)
    if not ends_at_query(variant):
        inside = Op("and", (inside, Op("lt", (kv, end), Type.BOOL)), Type.BOOL)
    mask = inside
    if variant.mask != VISIBLE:
        mask = Op("and", (inside, rewrite(rewritten(variant.mask), _shorter)), Type.BOOL)
    tables = tuple(Tensor(name, "int32", ("seqlen_q",), Monotone(0), (0, MAX_SEQLEN)) for name in (BEGIN, END, NUMBER))
    lengths = Tensor(LENGTH, "int32", ("seqlen_q",), None, (1, MAX_SEQLEN))
    return replace(
        variant,
        name=f"{variant.name}_in_documents"[:64],
        mask=mask,
        score=None if variant.score is None else rewritten(variant.score),
        sink=None if variant.sink is None else rewritten(variant.sink),
        scalars=tuple(scalar_without_lengths(scalar) for scalar in variant.scalars),
        tensors=(*(_renamed(tensor_without_lengths(tensor)) for tensor in variant.tensors), *tables, lengths),
        let=(), mask_text=None, score_text=None, sink_text=None,
    )  # fmt: skip


def _shorter(node: Expr) -> Expr | None:
    """A comparison of integers without the terms that both sides have, such as the document's begin."""
    if not isinstance(node, Op) or node.op not in COMPLEMENT or any(arg.type is not Type.INT for arg in node.args):
        return None
    left, right = (linear(arg) for arg in node.args)
    total = left.plus(right, -1)
    if not len(total.terms) < len({*left.terms, *right.terms}):
        return None
    more = Linear({t: c for t, c in total.terms.items() if c > 0}, max(total.constant, 0))
    less = Linear({t: -c for t, c in total.terms.items() if c < 0}, max(-total.constant, 0))
    return make(node.op, more.expr(), less.expr())


def documents(cu_seqlens: Sequence[int]) -> dict[str, torch.Tensor]:
    """Begin, end, number and length of the document of each token, by the names of the tensors of one row."""
    offsets = np.asarray(cu_seqlens, dtype=np.int32)
    lengths = np.diff(offsets)
    numbers: np.ndarray = np.arange(len(lengths), dtype=np.int32)
    values = {BEGIN: offsets[:-1], END: offsets[1:], NUMBER: numbers, LENGTH: lengths}
    return {name: torch.from_numpy(np.repeat(value, lengths)) for name, value in values.items()}


def scalar_without_lengths(scalar: Scalar) -> Scalar:
    """A scalar whose bounds name no length of a sequence, which is another one on a rank: numbers hold for all."""
    return replace(scalar, min=_number(scalar.min, 0), max=_number(scalar.max, MAX_SEQLEN))


def tensor_without_lengths(tensor: Tensor) -> Tensor:
    """A tensor whose range names no length of a sequence."""
    if tensor.range is None:
        return tensor
    return replace(tensor, range=(_number(tensor.range[0], 0), _number(tensor.range[1], MAX_SEQLEN)))


def _number(bound: Bound, otherwise: int) -> Bound:
    lengths = ("b", "seqlen_q", "seqlen_k", "total_q", "total_k")
    return otherwise if isinstance(bound, str) and bound in lengths else bound


def _renamed(tensor: Tensor) -> Tensor:
    return replace(tensor, shape=tuple(_EXTENTS.get(extent, extent) if isinstance(extent, str) else extent
                                       for extent in tensor.shape))  # fmt: skip
