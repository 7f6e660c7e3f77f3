"""Plan → what the template of the Hopper kernels whose values are the head of their keys is filled with."""

from __future__ import annotations

from attngen.plan.model import Plan
from attngen.plan.schedules.hopper_mla import mla_pipes_of
from attngen.render.pipes import pipes_view
from attngen.render.views.hopper_decode import DecodeView, split_view

_REGION_TEXTS = {
    "q": "Q, the columns of the values", "values": "columns of K that are values, a box per stage",
    "more": "the columns of K that are no values", "p": "P of a tile of each consumer, for the other one",
    "row_max": "its running max", "sums": "row sums of consumers",
    "values_full": "barriers", "values_empty": "barriers",
    "more_full": "barriers", "more_empty": "barriers", "begin": "where the share begins",
    "last": "whether the block came last", "counts": "what each warp has counted",
}  # fmt: skip


def mla_view(plan: Plan, template: str) -> DecodeView:
    """View of a plan."""
    return split_view(plan, template, pipes_view(mla_pipes_of(plan), base="here + "), _REGION_TEXTS)
