"""The view of the template of Hopper kernels of keys by index."""

from __future__ import annotations

from dataclasses import replace

from attngen.plan.model import Plan
from attngen.plan.schedules.hopper_indexed import indexed_pipes_of
from attngen.render.pipes import pipes_view
from attngen.render.views.hopper_decode import DecodeView, split_view

_REGION_TEXTS = {
    "q": "Q", "values": "columns of K that are values, a half of them per stage",
    "more": "the columns of K that are no values", "p": "P of a tile, for the other consumer",
    "row_max": "its running max", "sums": "row sums of consumers", "keys": "what the list says of each key of a tile",
    "q_full": "barriers", "q_empty": "barriers", "values_full": "barriers", "values_empty": "barriers",
    "more_full": "barriers", "more_empty": "barriers", "begin": "where the share begins",
    "last": "whether the block came last", "counts": "what each warp has counted",
}  # fmt: skip


def indexed_view(plan: Plan, template: str) -> DecodeView:
    """View of a plan. All tiles of a query's list are visited: its keys lie anywhere, so that no bounds skip any."""
    view = split_view(plan, template, pipes_view(indexed_pipes_of(plan), base="here + "), _REGION_TEXTS)
    return replace(
        view,
        span_fields=(),
        span_lines=(),
        span_values="",
        count="",
        tile_lines=("return number;",),
        key_place="",
        kv_first="0",  # elements have the places of their keys
        logit_partial="true" if plan.variant.masked else "!listed",
        rows_end="work.rows_end",
        items="cuda/indexed/_items.cu.j2",
    )
