"""Plan → what the template of the CUDA split-KV forward is filled with: lines of code, no decision of its own."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from attngen.dtypes import PAGE_BLOCK
from attngen.lang.statements import Code, Statement, reads
from attngen.plan.model import Plan
from attngen.plan.schedules.decode_pipes import decode_pipes_of, multiplied
from attngen.plan.schedules.hopper_decode import HopperDecode
from attngen.render.biases import Bias
from attngen.render.cuda_arguments import argument_lines
from attngen.render.cuda_math import Sink, Steps, logits, sink
from attngen.render.cuda_statements import int_constant
from attngen.render.cuda_tiles import Tiles, tiles
from attngen.render.expressions import CUDA, in_product
from attngen.render.header import command, summary
from attngen.render.pipes import PipesView, constant, pipes_view
from attngen.render.views.hopper_forward import SWIZZLED_ROWS, SWIZZLES, RegionView, padding

_REGION_TEXTS = {
    "kv": "K and V, a tile of each per stage", "merge": "partial results of warps",
    "q": "Q, for all warps", "kv_full": "barriers", "kv_empty": "barriers", "begin": "where the range begins",
    "scales": "scales of the pages of a step", "last": "whether the block came last",
    "counts": "what each warp has counted",
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
    span_fields: tuple[str, ...]
    length_lines: tuple[str, ...]
    uses_q_start: bool
    uses_q_hi: bool
    uses_kv_tiles: bool
    uses_whole_tiles: bool
    span_lines: tuple[Statement, ...]
    span_values: str
    count: str
    tile_lines: tuple[str, ...]
    key_place: str
    max_seqlen_q: str
    seqlen_q: str
    work_seqlen_q: str
    swizzle: int
    swizzled_row: str
    q_row: str
    out_row: str
    lse_row: str
    work_lines: tuple[Statement, ...]
    partial: Steps
    full: Steps
    uses_kv: bool
    kv_first: str
    logit_partial: str
    multiplier: Code
    sink: Sink | None
    widens: bool  # K and V have 8 bits, and products take 16
    page_scales: bool
    head_scales: bool  # all values of a KV head share a scale
    descaled: tuple[str, ...]  # scales of Q and K that all rows of a work item share
    rows_end: str  # one after the last packed row of a work item's sequence (keys by index: of its query)
    biases: tuple[Bias, ...] = ()  # whose tiles come with those of K: none here
    items: str = "cuda/decode/_items.cu.j2"  # the template of how work items are numbered


def decode_view(plan: Plan, template: str) -> DecodeView:
    """Return the view of a plan."""
    pipes = pipes_view(decode_pipes_of(plan), base="here + ", threads="own, 32 * kLoaders")
    return split_view(plan, template, pipes, _REGION_TEXTS)


def split_view(plan: Plan, template: str, pipes: PipesView, texts: Mapping[str, str]) -> DecodeView:
    """View of a kernel whose blocks share the keys of sequences; ``texts`` say what regions of shared memory hold."""
    decode = plan.structure
    assert isinstance(decode, HopperDecode)
    span, code = tiles(plan), logits(plan)
    in_spans = reads([*span.lines, *span.values.values()])
    steps = reads([*code.partial.all, *code.full.all])
    fields = _fields(plan, reads(code.work) | steps)
    kv_first = f"tile * kBlockN + {'2 * (lane % 4)' if decode.lane_keys_apart == 1 else 'lane % 4'}"
    work_lines = _work_lines(plan, reads(code.work) | steps, code.work)
    ragged = plan.ragged_queries
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
        span_fields=tuple(f"{lo}, {hi}" for lo, hi in (*span.visible, *span.full)),
        length_lines=_length_lines(plan, {*in_spans, *fields}),
        uses_q_start=not in_spans.isdisjoint({"q_start"}),
        uses_q_hi="q_hi" in in_spans,
        uses_kv_tiles="kv_tiles" in in_spans,
        uses_whole_tiles="whole_tiles" in in_spans,
        span_lines=span.lines,
        span_values=", ".join(span.values[end].text for pair in (*span.visible, *span.full) for end in pair),
        count=" + ".join(f"max(spans.{hi} - spans.{lo}, 0)" for lo, hi in span.visible) or "0",
        tile_lines=_tile_lines(span),
        key_place="part.k_begin + key" if plan.key_access == "ragged" else "key, part.b",
        max_seqlen_q="max_seqlen_q" if ragged else "seqlen_q",
        seqlen_q="seqlen_q",
        work_seqlen_q="work.seqlen_q" if ragged else "seqlen_q",
        swizzle=SWIZZLES[decode.box_bytes],
        swizzled_row=SWIZZLED_ROWS[decode.box_bytes],
        q_row=_row(plan, "q"),
        out_row=_row(plan, "out"),
        lse_row=f"lse_ptr[{_lse(plan)}]",
        work_lines=work_lines,
        partial=code.partial,
        full=code.full,
        uses_kv="kv_first" in steps,
        kv_first=f"any_number({kv_first})" if code.drops_products else kv_first,
        logit_partial=_partial(span),
        multiplier=code.multiplier,
        sink=_sink(plan, work_lines),
        widens=plan.descaled,
        page_scales=plan.scale_block == PAGE_BLOCK,
        head_scales=plan.descaled and plan.scale_block != PAGE_BLOCK,
        descaled=_unit_scales(plan),
        rows_end=f"{'work.seqlen_q' if ragged else 'seqlen_q'} * group",
    )


def _unit_scales(plan: Plan) -> tuple[str, ...]:
    """Scales that all logits of a work item share."""
    names = [argument.of for argument in plan.arguments if argument.kind == "stride" and argument.axis == "b"]
    return tuple(
        f"{name}_ptr[work.b * stride_{name}_b + work.hk * stride_{name}_h]"
        for name in ("q_descale", "k_descale") if name in names
    )  # fmt: skip


def _fields(plan: Plan, read: Collection[str]) -> tuple[str, ...]:
    """Fields of a work item that describe its sequence."""
    used = {"seqlen_k"}
    if plan.ragged_queries:
        used |= {"q_begin", "seqlen_q"}
    if plan.key_access == "ragged":
        used |= {"k_begin"}
    return tuple(name for name in _FIELDS if name in used)


def _length_lines(plan: Plan, read: Collection[str]) -> tuple[str, ...]:
    """Return the lines that find where a sequence begins and how long it is."""
    used = "seqused_k_ptr[b]"
    match plan.key_access:
        case "contiguous":
            lines = [f"const int seqlen_k = has_seqused_k ? {used} : max_seqlen_k;"]
            lines += [f"const int {name} = {value};" for name, value in _DENSE_BEGINS.items() if name in read]
            return tuple(lines)
        case "ragged":
            return (
                "const int q_begin = cu_seqlens_q_ptr[b], k_begin = cu_seqlens_k_ptr[b];",
                "const int seqlen_q = cu_seqlens_q_ptr[b + 1] - q_begin;",
                f"const int seqlen_k = has_seqused_k ? {used} : cu_seqlens_k_ptr[b + 1] - k_begin;",
            )
        case _:
            return (
                "const int q_begin = has_cu_seqlens_q ? cu_seqlens_q_ptr[b] : b * max_seqlen_q;",
                "const int seqlen_q = has_cu_seqlens_q ? cu_seqlens_q_ptr[b + 1] - q_begin : max_seqlen_q;",
                f"const int seqlen_k = {used};",
            )


_DENSE_BEGINS = {"q_begin": "b * seqlen_q", "k_begin": "b * max_seqlen_k"}


def _tile_lines(span: Tiles) -> tuple[str, ...]:
    """Return the lines that find a visible tile by its number."""
    (lo, hi), *others = span.visible
    if not others:
        return (f"return work.spans.{lo} + number;",)
    lines = [f"int tile = work.spans.{lo} + number, before = max(work.spans.{hi} - work.spans.{lo}, 0);"]
    for place, (low, high) in enumerate(others):
        lines.append(f"if (number >= before) tile = work.spans.{low} + number - before;")
        if place < len(others) - 1:
            lines.append(f"before += max(work.spans.{high} - work.spans.{low}, 0);")
    return (*lines, "return tile;")


def _partial(span: Tiles) -> str:
    """Condition under which some row of a work item does not see all of a tile."""
    inside = [f"tile >= work.spans.{lo} && tile < work.spans.{hi}" for lo, hi in span.full]
    return f"!({' || '.join(f'({one})' if len(inside) > 1 else one for one in inside)})" if inside else "true"


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
            for name in _DENSE_BEGINS if name in read
        ]  # fmt: skip
    if "hk" in read:
        lines.append(int_constant("hk", "{work.hk}"))
    if "seqlen_q" in read and plan.ragged_queries and "seqlen_q" not in kept:
        lines.append(int_constant("seqlen_q", "{work.seqlen_q}"))
    return (*lines, *own)


def _row(plan: Plan, name: str) -> str:
    """Offset of a row of ``q`` or ``out``."""
    place = (
        f"(work.q_begin + q) * stride_{name}_s"
        if plan.ragged_queries
        else f"work.b * stride_{name}_b + q * stride_{name}_s"
    )
    return f"({name}_ptr + {place} + h * stride_{name}_h)"


def _lse(plan: Plan) -> str:
    if plan.ragged_queries:
        return "h * static_cast<long long>(total_q) + work.q_begin + q"
    return "(work.b * static_cast<long long>(heads) + h) * seqlen_q + q"


def _sink(plan: Plan, before: Sequence[Statement]) -> Sink | None:
    logit = sink(plan, before)
    return None if logit is None else Sink(logit.lines, in_product(logit.value, CUDA))
