"""The view of the template of Hopper kernels of head dims beyond 256."""

from __future__ import annotations

from dataclasses import replace

from attngen.families.decode.view import DecodeView, split_view
from attngen.families.wide.schedule import wide_pipes_of
from attngen.plan.model import Plan
from attngen.render.pipes import pipes_view

_REGION_TEXTS = {
    "q": "the columns of Q that are not in registers", "keys": "a tile of K, a box of columns per stage",
    "values": "two tiles of V, a box of columns per stage", "p": "P of a tile",
    "alpha": "what its row max rescales O by", "row_max": "the row max after all tiles", "sums": "row sums",
    "keys_full": "barriers", "keys_empty": "barriers", "values_full": "barriers", "values_empty": "barriers",
    "begin": "where the worker's range of the list begins", "last": "whether this block is the last of its item",
    "counts": "chunks and items that each warp has counted",
}  # fmt: skip


def wide_view(plan: Plan, template: str) -> DecodeView:
    """View of a plan."""
    view = split_view(plan, template, pipes_view(wide_pipes_of(plan)), _REGION_TEXTS)
    return replace(view, alternates=True)
