"""The view of the template of the Hopper backward of latent attention."""

from __future__ import annotations

from dataclasses import dataclass

from attngen.families.latent_backward.schedule import MlaBackward, pipes_of
from attngen.lang.statements import Code, Statement, reads
from attngen.parts.regions import SWIZZLES, RegionView
from attngen.plan.model import Plan, Region
from attngen.render.biases import Bias
from attngen.render.cuda_arguments import argument_lines
from attngen.render.cuda_math import Steps, logits
from attngen.render.cuda_tiles import Ends, tiles
from attngen.render.header import command, summary
from attngen.render.pipes import PipesView, constant, pipes_view

_REGION_TEXTS = {
    "q": "Q", "dout": "dO", "k": "K of a tile", "p": "P of a tile", "ds": "dS of a tile",
    "k_full": "barriers", "k_empty": "barriers", "rows_full": "barriers", "rows_empty": "barriers",
    "pairs": "P and dS of half of the rows of tiles, a pair for each tile of keys",
    "columns": "Q and dO of these rows, some columns",
    "seen": "tiles of keys that each tile of rows sees, a bit for each",
}  # fmt: skip
_WRITTEN = {
    "preprocess": frozenset({"lse_log2", "delta", "dkv_sum"}),
    "dq": frozenset({"dq", "products", "rows", "ranges"}),
    "dkv": frozenset({"dkv_sum"}),
    "postprocess": frozenset({"dk"}),
}


@dataclass(frozen=True, slots=True)
class MlaBackwardView:
    """Everything that the templates name beside the plan itself."""

    template: str
    command: str
    summary: str
    uses_expressions: bool
    searches: bool
    regions: tuple[RegionView, ...]
    dkv_regions: tuple[RegionView, ...]
    pipes: PipesView
    dkv_pipes: PipesView
    preprocess_lines: tuple[str, ...]
    dq_lines: tuple[str, ...]
    dkv_lines: tuple[str, ...]
    postprocess_lines: tuple[str, ...]
    uses_q_begin: bool  # where q_begin and k_begin follow from the batch entry
    uses_k_begin: bool
    uses_q_start: bool
    uses_q_hi: bool
    uses_kv_tiles: bool
    uses_whole_tiles: bool
    visible_ranges: tuple[Ends, ...]
    full_ranges: tuple[Ends, ...]
    span_lines: tuple[Statement, ...]
    span_values: tuple[Code, ...]
    work_lines: tuple[Statement, ...]
    partial: Steps
    full: Steps
    uses_kv: bool
    multiplier: Code
    swizzle: int
    drops_products: bool = False  # there is no score
    biases: tuple[Bias, ...] = ()


def mla_backward_view(plan: Plan, template: str) -> MlaBackwardView:
    """View of a plan."""
    structure, code, span = plan.structure, logits(plan), tiles(plan)
    assert isinstance(structure, MlaBackward)
    pipes, of_dkv = pipes_of(plan.head_dim_qk, plan.head_dim_v, plan.operands.k.bytes)
    steps = reads([*code.partial.all, *code.full.all])
    in_spans = reads([*span.lines, *span.values.values()])
    own = reads(code.work) | steps | in_spans

    def lines(name: str) -> tuple[str, ...]:
        return argument_lines(plan, plan.launch(name).arguments, written=_WRITTEN[name])

    def regions(of: tuple[Region, ...]) -> tuple[RegionView, ...]:
        return tuple(
            RegionView(constant(region.name), region.offset, f"{region.bytes} B: {_REGION_TEXTS[region.name]}")
            for region in of
        )

    return MlaBackwardView(
        template=template,
        command=command(plan),
        summary=summary(plan),
        uses_expressions=plan.variant.masked,
        searches=any("first_at_least(" in line.text for line in span.lines),
        regions=regions(structure.shared),
        dkv_regions=regions(structure.dkv_shared),
        pipes=pipes_view(pipes),
        dkv_pipes=pipes_view(of_dkv),
        preprocess_lines=lines("preprocess"),
        dq_lines=lines("dq"),
        dkv_lines=lines("dkv"),
        postprocess_lines=lines("postprocess"),
        uses_q_begin="q_begin" in own,
        uses_k_begin="k_begin" in own,
        uses_q_start=not in_spans.isdisjoint({"q_start"}),
        uses_q_hi="q_hi" in in_spans,
        uses_kv_tiles="kv_tiles" in in_spans,
        uses_whole_tiles="whole_tiles" in in_spans,
        visible_ranges=span.visible,
        full_ranges=span.full,
        span_lines=span.lines,
        span_values=span.ends,
        work_lines=code.work,
        partial=code.partial,
        full=code.full,
        uses_kv="kv_first" in steps,
        multiplier=code.multiplier,
        swizzle=SWIZZLES[structure.box_bytes],
    )
