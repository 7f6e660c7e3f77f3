"""The view of the template of Hopper kernels of latent attention, whose values are the first columns of their keys."""

from __future__ import annotations

from dataclasses import replace

from attngen.families.decode.view import DecodeView, split_view
from attngen.families.latent.schedule import mla_pipes_of
from attngen.plan.model import Plan
from attngen.render.pipes import pipes_view

_REGION_TEXTS = {
    "q": "Q, or the columns of Q that V has", "values": "the columns of K that are V, a box per stage",
    "more": "the columns of K that only S needs", "p": "P of a tile of each consumer, for the other one",
    "row_max": "the row max of this P", "sums": "row sums of both consumers",
    "values_full": "barriers", "values_empty": "barriers",
    "more_full": "barriers", "more_empty": "barriers", "begin": "where the worker's range of the list begins",
    "last": "whether this block is the last of its item", "counts": "chunks and items that each warp has counted",
    "unfinished": "work items that other workers have parts of, too",
}  # fmt: skip


def mla_view(plan: Plan, template: str) -> DecodeView:
    """View of a plan."""
    view = split_view(plan, template, pipes_view(mla_pipes_of(plan)), _REGION_TEXTS)
    kind = "" if plan.latent_row is None else "widening_"
    return replace(
        view, loader=f"cuda/latent/_{kind}loader.cu.j2", consumer=f"cuda/latent/_{kind}consumer.cu.j2",
        scores="cuda/latent/scores/by_boxes.cu.j2",
        roles=f"cuda/latent/roles/{'copied_keys' if plan.latent_row is None else 'scorer_and_follower'}.cu.j2",
    )  # fmt: skip
