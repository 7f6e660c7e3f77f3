"""Plan → what the templates of the backward by mma.sync name: facts, and lines of the user's mathematics."""

from __future__ import annotations

from dataclasses import dataclass, replace

from attngen.families.mma_backward.structure import MmaBackward
from attngen.lang.statements import Code, Statement, declared, needed, reads
from attngen.parts.backward_launches import row_lanes
from attngen.parts.heads import by_head
from attngen.parts.regions import RegionView, classifier_lines
from attngen.plan.model import Launch, Plan
from attngen.plan.symbols import pointer_name
from attngen.render.biases import Bias
from attngen.render.classifier import ClassifierView, classifier_view
from attngen.render.cuda_arguments import argument_lines
from attngen.render.cuda_gradients import QueryValues, classified_query_word, factor, probabilities, query_word
from attngen.render.cuda_math import Steps
from attngen.render.cuda_tiles import Ends, by_warp, tiles
from attngen.render.expressions import QUERIES
from attngen.render.header import command, summary
from attngen.render.key_values import HELD, fields_of, taken
from attngen.render.pipes import constant
from attngen.render.tensor_gradients import SumsView, TilesView, register_sums, tile_sums

_REGION_TEXTS = {
    "k": "K", "v": "V", "q": "Q, a tile per stage", "dout": "dO, a tile per stage", "ds": "dS of a step",
    "p": "P of a step", "index": "which tile of keys the block has taken",
    "lse": "log-sum-exp of the rows of each stage", "delta": "D of the rows of each stage",
    "query_values": "what the mask reads of the queries of this step and of the next",
}  # fmt: skip
#: P among the products of dP; before them, where a pair needs more than its logit: derivatives, or what dropout keeps.
_AMONG, _BEFORE = (f"cuda/mma_backward/softmax/{name}_products.cu.j2" for name in ("among", "before"))
_WRITTEN = {
    "preprocess": frozenset({"lse_log2", "delta", "dq_sum"}),
    "dqkv": frozenset({"dk", "dv", "dq_sum", "partials", "tile_counter"}),
    "postprocess": frozenset({"dq"}),
}


@dataclass(frozen=True, slots=True)
class MmaBackwardView:
    """Everything that the templates name beside the plan itself."""

    template: str
    command: str
    summary: str
    headers: tuple[str, ...]
    regions: tuple[RegionView, ...]
    preprocess_lines: tuple[str, ...]
    first_stored: bool  # no: the dQ accumulator is cleared
    cleared: str
    cleared_chunks: str
    lanes_of_row: int
    chunks_of_row: int
    dqkv_lines: tuple[str, ...]
    by_head: bool
    uses_q_tiles: bool
    uses_whole_tiles: bool
    query_values: QueryValues | None
    key_fields: tuple[tuple[str, str], ...]  # values of a key that the mask loads: type and name of each,
    key_lines: tuple[Statement, ...]  # and the lines that find them, once before all steps
    spans_once: tuple[Statement, ...]  # what finds the queries that see the keys: once, if it reads tensors,
    span_lines: tuple[Statement, ...]  # or for each step, which takes fewer registers
    visible_ranges: tuple[Ends, ...]
    full_ranges: tuple[Ends, ...]
    word_lines: tuple[Statement, ...]
    block_lines: tuple[Statement, ...]
    uses_q_first: bool
    uses_kv_first: bool
    softmax: str  # the part that computes P
    partial: Steps
    full: Steps
    exponent: Code
    weighted: Code | None
    factor_lines: tuple[Statement, ...]
    factor: Code
    postprocess_lines: tuple[str, ...]
    postprocess_uses_hk: bool
    dq_factor_lines: tuple[Statement, ...]
    dq_factor: Code
    classifier: ClassifierView | None
    biases: tuple[Bias, ...] = ()
    kept: tuple[tuple[str, Code], ...] = ()  # other products of P, by the arrays that hold them until dP is there
    tensor_sums: SumsView | None = None  # gradients of the variant's tensors that warps add up in registers
    sums_use_kv_first: bool = False
    tensor_tiles: TilesView | None = None  # and those that a block adds up from tiles of dS
    waits_for_loads: bool = False
    positions: str | None = None  # no tensor says where rows lie


def mma_backward_view(plan: Plan, template: str) -> MmaBackwardView:
    """Return the view of a plan."""
    backward = plan.structure
    assert isinstance(backward, MmaBackward)
    parts = {part.name: part for part in plan.launches}
    dqkv, postprocess = plan.of_launch(parts["dqkv"]), parts["postprocess"]
    span, code = tiles(dqkv, QUERIES), probabilities(dqkv)
    tensor_sums, tensor_tiles = register_sums(dqkv, first_key="{kv_first} + 8 * {row}"), tile_sums(dqkv, dqkv.tile_n)
    partial_steps, key_fields, key_lines = _with_keys_once(dqkv, code.partial, kept=backward.keys_once)
    listed = query_word(dqkv) if plan.iteration != "ranges" else ()
    factor_lines, factor_text = factor(dqkv, code.factor)
    dq_factor_lines, dq_factor = factor(plan.of_launch(postprocess), code.factor)
    steps = reads([*code.partial.all, *code.full.all, code.exponent])
    of_sums = reads(tensor_sums.element) if tensor_sums else frozenset[str]()
    spans = reads([*span.lines, *span.values.values(), *listed])
    span_lines = by_warp(span.lines) if plan.iteration == "ranges" else span.lines
    heads = by_head(plan.variant) or plan.iteration == "tile_map"
    once = not heads and not spans.isdisjoint(pointer_name(tensor.name) for tensor in plan.variant.tensors)
    beside = declared(line for line in (*code.block, *factor_lines) if line not in span.lines)
    once = once and set(beside).isdisjoint(declared(span.lines))  # they would stand in one scope
    out = plan.operands.shared("out", "dout")
    return MmaBackwardView(
        template=template,
        command=command(plan),
        summary=summary(plan),
        headers=_headers(plan, tensor_sums, tensor_tiles, searches=span_lines != span.lines, cuts=backward.cuts_first),
        regions=tuple(
            RegionView(constant(region.name), region.offset, f"{region.bytes} B: {_REGION_TEXTS[region.name]}")
            for region in backward.shared
        ),
        preprocess_lines=_lines(plan, parts["preprocess"]),
        first_stored=False,
        cleared="dq_sum",
        cleared_chunks="sum_chunks",
        lanes_of_row=row_lanes(plan.head_dim_v, out),
        chunks_of_row=plan.head_dim_v // out.chunk_elements,
        dqkv_lines=_lines(plan, parts["dqkv"]),
        by_head=heads,
        uses_q_tiles=plan.varlen and "q_tiles" in spans,
        uses_whole_tiles="whole_tiles" in spans,
        query_values=code.query_values,
        key_fields=key_fields,
        key_lines=key_lines,
        spans_once=span_lines if once else (),
        span_lines=() if once else span_lines,
        visible_ranges=span.with_values(span.visible),
        full_ranges=span.with_values(span.full),
        word_lines=listed,
        block_lines=tuple(line for line in code.block if not (once and line in span.lines)),
        uses_q_first="q_first" in steps | of_sums,
        uses_kv_first="kv_first" in steps,
        softmax=_BEFORE if code.weighted is not None or code.kept or plan.variant.dropout else _AMONG,
        partial=partial_steps,
        full=code.full,
        exponent=code.exponent,
        weighted=code.weighted,
        factor_lines=factor_lines,
        factor=factor_text,
        postprocess_lines=_lines(plan, postprocess),
        postprocess_uses_hk="hk" in reads([*dq_factor_lines, dq_factor]),
        dq_factor_lines=dq_factor_lines,
        dq_factor=dq_factor,
        classifier=_classifier(plan.of_launch(parts["classify_dqkv"])) if "classify_dqkv" in parts else None,
        kept=code.kept,
        tensor_sums=tensor_sums,
        sums_use_kv_first="kv_first" in of_sums,
        tensor_tiles=tensor_tiles,
    )


def _with_keys_once(
    plan: Plan, steps: Steps, *, kept: bool
) -> tuple[Steps, tuple[tuple[str, str], ...], tuple[Statement, ...]]:
    """Steps of a partial tile that take the values of keys from registers, these values, and the lines that load them
    before all steps; the same steps and no values unless they are ``kept``."""
    pointers = {pointer_name(tensor.name) for tensor in plan.variant.tensors}
    pointers |= {name for each in steps.tile if each.type == "const auto*" for name in each.names}
    loads = [each for each in steps.row if each.type in HELD and each.reads & pointers]
    before = needed(steps.row, loads)
    lines = (*needed(steps.tile, [*before, *loads]), *before, *loads)
    if not (kept and loads) or "h" in reads(lines):
        return steps, (), ()
    row = (*taken("of_rows[row]", declared(loads)), *(each for each in steps.row if each not in loads))
    row = needed(row, [Statement("", frozenset(name for _, name in steps.row_values))])
    tile = needed(steps.tile, [*row, *steps.key, *steps.element])
    return replace(steps, tile=tile, row=row), fields_of(loads), lines


def _headers(
    plan: Plan, sums: SumsView | None, tiles: TilesView | None, *, searches: bool, cuts: bool
) -> tuple[str, ...]:
    """The headers that a kernel needs."""
    variant = plan.variant
    needed = {
        "copy": True,
        "division": bool(plan.divisors),
        "dropout": variant.dropout,
        "ds_by_keys": tiles is not None,
        "expression": variant.masked or variant.score is not None,
        "gradient": True,
        "mma": True,
        "order": plan.ordered,
        "parts": cuts,
        "quad": True,
        "schedule": True,
        "search_by_warp": searches,
        "softmax": True,
        "tensor_gradient": sums is not None,
        "tile_map": plan.has_launch("classify_dqkv"),
    }
    return tuple(name for name, used in needed.items() if used)


def _lines(plan: Plan, part: Launch) -> tuple[str, ...]:
    own = {argument.of for argument in part.arguments if argument.of and argument.of.startswith("gradient:")}
    return argument_lines(plan, part.arguments, written=_WRITTEN[part.name] | own)


def _classifier(plan: Plan) -> ClassifierView:
    own = plan.launch("classify_dqkv")
    return classifier_view(plan, own, classifier_lines(plan, own), QUERIES, classified_query_word)
