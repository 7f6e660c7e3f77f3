"""Names in the split-KV templates: facts of the plan, and lines of the user's mathematics."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from attngen.families.decode.pipes import KEY_SCALES, decode_pipes_of, multiplied
from attngen.families.decode.schedule import HopperDecode
from attngen.lang.listed import KeyLists
from attngen.lang.statements import Code, Statement, reads
from attngen.parts.regions import SWIZZLES, RegionView, padding
from attngen.plan.model import Plan
from attngen.render.biases import Bias
from attngen.render.cuda_arguments import argument_lines
from attngen.render.cuda_math import Sink, Steps, logits, sink
from attngen.render.cuda_statements import int_constant
from attngen.render.cuda_tiles import Ends, tiles
from attngen.render.header import command, summary
from attngen.render.pipes import PipesView, constant, pipes_view

_REGION_TEXTS = {
    "kv": "K and V, a tile of each per stage", "merge": "partial results of warps",
    "q": "Q, for all warps", "kv_full": "barriers", "kv_empty": "barriers", "begin": "where the range begins",
    "scales": "scales of the pages of a step", "entries": "entries of the list of keys",
    "last": "whether the block came last", "counts": "what each warp has counted",
}  # fmt: skip
_WRITTEN = frozenset({"out", "lse", "partials", "split_counters", "begun"})
#: Fields that differ from work item to work item, in the order in which they are kept.
_FIELDS = ("q_begin", "k_begin", "seqlen_q", "seqlen_k")


@dataclass(frozen=True, slots=True)
class DecodeView:
    """Everything that the template names beside the plan itself."""

    template: str
    command: str
    summary: str
    uses_expressions: bool
    searches: bool
    width_qk: int
    padding_qk: str
    width_v: int
    padding_v: str
    regions: tuple[RegionView, ...]
    pipes: PipesView
    argument_lines: tuple[str, ...]
    work_fields: tuple[str, ...]
    visible_ranges: tuple[Ends, ...]
    full_ranges: tuple[Ends, ...]
    uses_q_begin: bool  # where q_begin and k_begin follow from the batch entry
    uses_k_begin: bool
    uses_q_start: bool
    uses_q_hi: bool
    uses_kv_tiles: bool
    uses_whole_tiles: bool
    span_lines: tuple[Statement, ...]
    span_values: tuple[Code, ...]
    swizzle: int
    work_lines: tuple[Statement, ...]
    partial: Steps
    full: Steps
    uses_kv: bool
    drops_products: bool  # elements are numbered, but their products not read
    multiplier: Code
    sink: Sink | None
    widens: bool  # K and V have 8 bits, and products take 16
    key_scales: bool  # scales come with the keys of a step: those of their pages,
    token_scales: bool  # or of each of them
    head_scales: bool  # all values of a KV head share a scale
    unit_scales: tuple[str, ...]  # tensors with the scales of Q and K that all rows of a work item share
    alternates: bool = False  # items with the last and the first rows of a sequence take turns
    biases: tuple[Bias, ...] = ()  # whose tiles come with those of K: none here
    items: str = "cuda/decode/_items.cu.j2"  # templates: how work items are numbered,
    places: str = "cuda/decode/_places.cu.j2"  # and which rows and tiles they have
    loader: str = "cuda/decode/_loader.cu.j2"  # and how their keys are loaded,
    consumer: str = ""  # and multiplied, where kernels of one template differ,
    scores: str = ""  # and how consumers of latent attention that are alike compute S,
    roles: str = ""  # and what warpgroups that multiply do
    lists: KeyLists | None = None  # what the lists of a call hold
    run: int = 1  # keys of a step that follow each other in a listed block


def decode_view(plan: Plan, template: str) -> DecodeView:
    """Return the view of a plan."""
    texts = _REGION_TEXTS | ({"scales": "scales of the keys of a step"} if plan.token_scales else {})
    return split_view(plan, template, pipes_view(decode_pipes_of(plan)), texts)


def split_view(plan: Plan, template: str, pipes: PipesView, texts: Mapping[str, str]) -> DecodeView:
    """View of a kernel whose blocks share the keys of sequences; ``texts`` say what regions of shared memory hold."""
    decode = plan.structure
    assert isinstance(decode, HopperDecode)
    span, code = tiles(plan), logits(plan)
    in_spans = reads([*span.lines, *span.values.values()])
    steps = reads([*code.partial.all, *code.full.all])
    fields = _fields(plan, reads(code.work) | steps)
    work_lines = _work_lines(plan, reads(code.work) | steps, code.work)
    begins = in_spans if plan.key_access == "contiguous" else frozenset()
    return DecodeView(
        template=template,
        command=command(plan),
        summary=summary(plan),
        uses_expressions=any((plan.variant.masked, plan.variant.score, plan.variant.sink)),
        searches=any("first_at_least(" in line.text for line in span.lines),
        width_qk=(qk := multiplied(plan.columns_qk[0], plan.operands.k)).width,
        padding_qk=padding(qk),
        width_v=(v := multiplied(plan.columns_v[0], plan.operands.v)).width,
        padding_v=padding(v),
        regions=tuple(
            RegionView(constant(region.name), region.offset, f"{region.bytes} B: {texts[region.name]}")
            for region in decode.shared
        ),
        pipes=pipes,
        argument_lines=argument_lines(plan, plan.arguments, written=_WRITTEN),
        work_fields=fields,
        visible_ranges=span.visible,
        full_ranges=span.full,
        uses_q_begin="q_begin" in begins,
        uses_k_begin="k_begin" in begins,
        uses_q_start=not in_spans.isdisjoint({"q_start"}),
        uses_q_hi="q_hi" in in_spans,
        uses_kv_tiles="kv_tiles" in in_spans,
        uses_whole_tiles="whole_tiles" in in_spans,
        span_lines=span.lines,
        span_values=span.ends,
        swizzle=SWIZZLES[decode.box_bytes],
        work_lines=work_lines,
        partial=code.partial,
        full=code.full,
        uses_kv="kv_first" in steps,
        drops_products=code.drops_products,
        multiplier=code.multiplier,
        sink=sink(plan, work_lines),
        widens=plan.descaled and not plan.v_of_key,
        key_scales=plan.scale_block in KEY_SCALES,
        token_scales=plan.token_scales,
        head_scales=plan.descaled and not plan.v_of_key and plan.scale_block not in KEY_SCALES,
        unit_scales=_unit_scales(plan),
    )


def _unit_scales(plan: Plan) -> tuple[str, ...]:
    """Tensors with the scales that all logits of a work item share."""
    names = [argument.of for argument in plan.arguments if argument.kind == "stride" and argument.axis == "b"]
    return tuple(name for name in ("q_descale", "k_descale") if name in names)


def _fields(plan: Plan, read: Collection[str]) -> tuple[str, ...]:
    """Fields of a work item that describe its sequence."""
    used = {"seqlen_k"}
    if plan.ragged_queries:
        used |= {"q_begin", "seqlen_q"}
    if plan.key_access == "ragged":
        used |= {"k_begin"}
    return tuple(name for name in _FIELDS if name in used)


def _work_lines(plan: Plan, read: Collection[str], own: Sequence[Statement]) -> tuple[Statement, ...]:
    """Statements that name the values of a work item that expressions read, before those of their ``own``."""
    kept = _fields(plan, read)
    lines = [int_constant(name, f"{{work.{name}}}") for name in kept if name in read or name == "seqlen_k"]
    if "b" in read:
        lines.append(int_constant("b", "{work.b}"))
    if plan.key_access == "contiguous":
        lines += [
            int_constant("q_begin", "{work.b} * {seqlen_q}") if name == "q_begin"
            else int_constant("k_begin", "{work.b} * {max_seqlen_k}")
            for name in ("q_begin", "k_begin") if name in read
        ]  # fmt: skip
    if "hk" in read:
        lines.append(int_constant("hk", "{work.hk}"))
    if "seqlen_q" in read and plan.ragged_queries and "seqlen_q" not in kept:
        lines.append(int_constant("seqlen_q", "{work.seqlen_q}"))
    return (*lines, *own)
