"""The view of the template of the Hopper backward of keys by index."""

from __future__ import annotations

from dataclasses import dataclass

from attngen.families.latent_backward.indexed import IndexedBackward
from attngen.lang.listed import LISTS, KeyLists
from attngen.lang.statements import Code, Statement, reads
from attngen.parts.regions import SWIZZLES, RegionView
from attngen.plan.model import Plan
from attngen.render.biases import Bias
from attngen.render.cuda_arguments import argument_lines
from attngen.render.cuda_math import Steps, logits
from attngen.render.header import command, summary
from attngen.render.pipes import constant

_REGION_TEXTS = {
    "q": "Q", "dout": "dO", "k": "K of a tile", "p": "P of a tile, rows of heads", "ds": "dS of a tile, rows of heads",
    "entries": "keys of tiles, -1 for none", "kv": "K and V of a tile, for each stage of each warp",
}  # fmt: skip
_WRITTEN = {
    "preprocess": frozenset({"lse_log2", "delta", "dkv_sum"}),
    "dqkv": frozenset({"dq", "dkv_sum"}),
    "postprocess": frozenset({"dk", "dv"}),
}


@dataclass(frozen=True, slots=True)
class IndexedBackwardView:
    """Everything that the templates name beside the plan itself."""

    template: str
    command: str
    summary: str
    uses_expressions: bool
    regions: tuple[RegionView, ...]
    preprocess_lines: tuple[str, ...]
    dqkv_lines: tuple[str, ...]
    postprocess_lines: tuple[str, ...]
    max_seqlen_q: str
    uses_q_begin: bool  # where q_begin and k_begin follow from the batch entry
    uses_k_begin: bool
    work_lines: tuple[Statement, ...]
    partial: Steps
    full: Steps
    uses_kv: bool
    multiplier: Code
    swizzle: int
    lists: KeyLists
    drops_products: bool = False  # there is no score
    biases: tuple[Bias, ...] = ()
    searches: bool = False


def indexed_backward_view(plan: Plan, template: str) -> IndexedBackwardView:
    """View of a plan."""
    structure, code = plan.structure, logits(plan)
    assert isinstance(structure, IndexedBackward)
    assert plan.variant.keys is not None
    steps = reads([*code.partial.all, *code.full.all])
    own = reads(code.work) | steps

    def lines(name: str) -> tuple[str, ...]:
        return argument_lines(plan, plan.launch(name).arguments, written=_WRITTEN[name])

    return IndexedBackwardView(
        template=template,
        command=command(plan),
        summary=summary(plan),
        uses_expressions=plan.variant.masked,
        regions=tuple(
            RegionView(constant(region.name), region.offset, f"{region.bytes} B: {_REGION_TEXTS[region.name]}")
            for region in structure.shared
        ),
        preprocess_lines=lines("preprocess"),
        dqkv_lines=lines("dqkv"),
        postprocess_lines=lines("postprocess"),
        max_seqlen_q="max_seqlen_q" if plan.varlen else "seqlen_q",
        uses_q_begin="q_begin" in own,
        uses_k_begin="k_begin" in own,
        work_lines=code.work,
        partial=code.partial,
        full=code.full,
        uses_kv="kv_first" in steps,
        multiplier=code.multiplier,
        swizzle=SWIZZLES[structure.box_bytes],
        lists=LISTS[plan.variant.keys],
    )
