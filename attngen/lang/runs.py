"""Positions in runs: a tensor by row that goes up by one within each so many rows.

It says where the rows of a call lie that has tiles of a longer sequence. Each tile is one of consecutive positions: one
distance leads from its rows to these, and kernels treat them as they treat the rows' own numbers.
"""

from __future__ import annotations

from functools import lru_cache

from attngen.lang.facts import index
from attngen.lang.ir import POSITION, Expr, Load, Type, rewrite
from attngen.lang.variant import Variant

#: Most rows of which a kernel takes one distance: runs that it uses are multiples of so many.
TILE = 128


@lru_cache(maxsize=256)
def positions(variant: Variant) -> Load | None:
    """The element of a tensor that says for each row of a kernel's tile where it lies; None if there is none, or if
    several tensors do."""
    tensors = [
        tensor
        for tensor in variant.tensors
        if tensor.monotone is not None
        and (tensor.monotone.runs or 1) % TILE == 0
        and (tensor.dtype, tensor.shape) == ("int32", ("seqlen_q",))
    ]
    return Load(tensors[0].name, (index("q"),), Type.INT) if len(tensors) == 1 else None


def by_position(expr: Expr, variant: Variant) -> Expr:
    """An expression of a variant as kernels evaluate it: with a symbol for the position of a row."""
    load = positions(variant)
    return expr if load is None else rewrite(expr, lambda node: POSITION if node == load else None)


def score_by_position(variant: Variant) -> Expr | None:
    """The score of a variant as kernels evaluate it."""
    return None if variant.score is None else by_position(variant.score, variant)
