"""Values of a score that all pairs of a consumer's part of a tile share: elements that it reads by blocks of queries
and of keys, as ``table[kind[q // 128, kv // 128]]``. They are read once for that part, at any of its pairs."""

from __future__ import annotations

from collections.abc import Mapping

from attngen.lang.blocks import Block, loads_at_corner
from attngen.lang.emit import Binding
from attngen.lang.intervals import Range
from attngen.lang.ir import MAX_SEQLEN, Expr
from attngen.plan.model import Plan

#: A query and a key of that part: the first ones of the lane, or the last ones of the sequence.
BINDINGS = {
    "q_lo": Binding("min({q_first}, {seqlen_q} - 1)"),
    "kv_lo": Binding("min({kv_first}, {seqlen_k} - 1)"),
}
RANGES: Mapping[str, Range] = dict.fromkeys(BINDINGS, (0, MAX_SEQLEN))


def once_for_tile(plan: Plan, expr: Expr) -> Expr:
    """Return an expression that reads such elements at ``q_lo`` and ``kv_lo``."""
    block = _part(plan)
    return loads_at_corner(expr, block) if block else expr


def _part(plan: Plan) -> Block | None:
    """Queries and keys of a consumer's part of a tile; None if it may begin anywhere."""
    rows = plan.structure.own_rows
    if not rows or plan.pack_gqa or plan.variant.keys is not None:
        return None
    return (rows, plan.tile_n) if plan.direction == "forward" else (plan.tile_m, rows)
