"""The view of the template of Hopper kernels of keys by index."""

from __future__ import annotations

from dataclasses import replace

from attngen.dtypes import CHUNK_BYTES
from attngen.families.decode.schedule import HopperDecode
from attngen.families.decode.view import DecodeView, decode_view, split_view
from attngen.families.latent.indexed import indexed_pipes_of
from attngen.families.latent.schedule import HopperMla
from attngen.lang.listed import LISTS
from attngen.plan.model import Plan
from attngen.render.pipes import pipes_view

_REGION_TEXTS = {
    "q": "Q", "values": "the columns of K that are V, half of them per stage",
    "more": "the columns of K that only S needs", "p": "P of a tile, for the other consumer",
    "row_max": "the row max of this P", "sums": "row sums of both consumers",
    "keys": "entries of the list, or which rows exist",
    "q_full": "barriers", "q_empty": "barriers", "values_full": "barriers", "values_empty": "barriers",
    "more_full": "barriers", "more_empty": "barriers", "begin": "where the worker's range of the list begins",
    "largest": "largest scales of the last two parts, one for each warp of the loaders",
    "seldom": "what each warp of the loaders needs seldom",
    "parts": "two parts of work items: one that consumers work on, and the next",
    "lookups": "what each warp of the loaders knows of the next rows",
    "walks": "where each warp of the loaders is in it",
    "last": "whether this block is the last of its item", "counts": "chunks and items that each warp has counted",
    "unfinished": "work items that other workers have parts of, too",
}  # fmt: skip


def indexed_view(plan: Plan, template: str) -> DecodeView:
    """View of a kernel of latent attention."""
    view = _listed(plan, split_view(plan, template, pipes_view(indexed_pipes_of(plan)), _REGION_TEXTS))
    assert isinstance(plan.structure, HopperMla)
    consumer = "consumer" if plan.structure.alike else "widening_consumer"
    loader = "loader" if plan.latent_row is None else "fp16_loader" if plan.structure.alike else "widening_loader"
    if plan.latent_row is not None and plan.latent_row.scales_after_rows:
        loader = "looking_ahead_loader"
    return replace(
        view, loader=f"cuda/latent/indexed/_{loader}.cu.j2", consumer=f"cuda/latent/indexed/_{consumer}.cu.j2",
        scores="cuda/latent/scores/by_halves.cu.j2",
        roles=f"cuda/latent/roles/{'gathered_keys' if plan.structure.alike else 'scorer_and_follower'}.cu.j2",
    )  # fmt: skip


def mma_indexed_view(plan: Plan, template: str) -> DecodeView:
    """View of a kernel by mma.sync, which is the split-KV forward with another loader."""
    view = _listed(plan, decode_view(plan, template))
    assert isinstance(plan.structure, HopperDecode)
    assert view.lists is not None
    run = min(view.lists.block, plan.tile_n)
    copied = 32 * CHUNK_BYTES // plan.structure.box_bytes  # rows that a warp copies at once
    loader = "mma_block_loader" if run >= copied else "mma_loader"
    return replace(view, loader=f"cuda/latent/indexed/_{loader}.cu.j2", run=run)


def _listed(plan: Plan, view: DecodeView) -> DecodeView:
    """The view whose work items visit all tiles of a query's list."""
    assert plan.variant.keys is not None
    return replace(
        view,
        items="cuda/latent/indexed/_items.cu.j2",
        places="cuda/latent/indexed/_places.cu.j2",
        lists=LISTS[plan.variant.keys],
    )
