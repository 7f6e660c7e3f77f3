"""Plan → what the Triton templates are filled with: lines of code under names, no decision of its own."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from attngen.families.triton.forward import has_descriptor
from attngen.lang.blocks import Block
from attngen.lang.statements import Code, Statement, lines, reads
from attngen.plan.arguments import block_suffix
from attngen.plan.model import Argument, Columns, Plan
from attngen.render.blocks import BlocksView
from attngen.render.expressions import TRITON, in_product
from attngen.render.header import argument_groups, command, summary
from attngen.render.triton_math import Body, Math, Ranges, assign, classifier, math, ranges, sink, words


@dataclass(frozen=True, slots=True)
class ColumnBlock:
    """One column block of V and of the accumulator."""

    suffix: str
    width: int
    columns: str
    store_mask: str


@dataclass(frozen=True, slots=True)
class ForwardStep:
    """Code of one KV tile: loads, products, the lines of score and mask, and the logit that results.

    ``condition`` tells whether a tile needs the mask; None where each does.
    """

    kv_index: bool
    load_k: tuple[str, ...]
    dot_qk: tuple[str, ...]
    score_lines: tuple[str, ...]
    condition: str | None
    mask_lines: tuple[str, ...]
    logit: str
    multiplier: Code
    load_v: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop over whole tiles: what it is about, which tiles, and what it does with each."""

    title: str
    tiles: Ranges
    step: ForwardStep


_TITLES = {
    "visible": "The whole tiles.",
    "full": "Whole tiles that every row sees: no mask code.",
    "partial": "Whole tiles that the mask cuts.",
}


@dataclass(frozen=True, slots=True)
class BlockTests:
    """Lines and conditions on a block of ``size`` (queries, keys), on which the mask reads tensors at one element."""

    size: Block
    lines: tuple[str, ...]
    may: Code
    must: Code


def block_tests(blocks: BlocksView | None) -> BlockTests | None:
    """Return the conditions on a block as text."""
    return None if blocks is None else BlockTests(blocks.size, lines(blocks.lines), blocks.may, blocks.must)


@dataclass(frozen=True, slots=True)
class TritonClassifier:
    """The kernel that computes the tile map."""

    argument_lines: tuple[str, ...]
    begin_lines: tuple[str, ...]
    range_lines: tuple[str, ...]
    blocks: BlockTests | None
    hoisted_lines: tuple[str, ...]
    lines: tuple[str, ...]
    uses_q_pos: bool


@dataclass(frozen=True, slots=True)
class TritonView:
    """Everything that ``forward.py.j2`` names beside the plan itself."""

    template: str
    command: str
    summary: str
    searches: bool
    argument_lines: tuple[str, ...]
    begin_lines: tuple[str, ...]
    uses_q_row: bool
    uses_q_pos: bool
    range_lines: tuple[str, ...]
    q_load_lines: tuple[str, ...]
    hoisted_lines: tuple[str, ...]
    v_blocks: tuple[ColumnBlock, ...]
    loops: tuple[Loop, ...]
    word_lines: tuple[str, ...]
    step: ForwardStep
    ragged: str
    ragged_step: ForwardStep
    sink_lines: tuple[str, ...]
    sink: Code | None
    p_type: str
    out_type: str
    precision: str
    classifier: TritonClassifier | None


def triton_view(plan: Plan, template: str) -> TritonView:
    """Return the view of a plan."""
    spans = ranges(plan)
    listed = words(plan)
    code = math(plan, before=[*spans.lines, *listed.lines])
    condition = spans.condition if plan.iteration == "ranges" else listed.condition
    step = _step(plan, code, code.whole, condition)
    unmasked = _step(plan, code, replace(code.whole, mask_lines=()), None)
    steps = {"visible": step, "partial": step, "full": unmasked}
    ragged_step = _step(plan, code, code.ragged, None, ragged=True)
    own = [*spans.lines, *listed.lines, *code.hoisted, *code.whole.all, *code.ragged.all]
    sink_lines, sink_value = sink(plan, own) if plan.variant.sink is not None else ((), None)
    return TritonView(
        template=template,
        command=command(plan),
        summary=summary(plan),
        searches="first_at_least" in reads(own),
        argument_lines=parameter_list(plan.arguments),
        begin_lines=begins(plan, reads(own)),
        uses_q_row=code.uses_q_row,
        uses_q_pos=code.uses_q_pos,
        range_lines=lines(spans.lines),
        q_load_lines=_load_q(plan),
        hoisted_lines=lines(code.hoisted),
        v_blocks=tuple(column_block(plan, i) for i in range(len(plan.columns_v))),
        loops=tuple(Loop(_TITLES[kind], loop, steps[kind]) for kind, loop in spans.loops),
        word_lines=lines(listed.lines),
        step=step,
        ragged=spans.ragged,
        ragged_step=ragged_step,
        sink_lines=lines(sink_lines),
        sink=None if sink_value is None else in_product(sink_value, TRITON),
        p_type=triton_type(plan, "p"),
        out_type=triton_type(plan, "out"),
        precision=precision_of(plan),
        classifier=classifier_view(plan, uses_q_pos=code.uses_q_pos) if plan.has_launch("classify") else None,
    )


def parameter_list(arguments: tuple[Argument, ...]) -> tuple[str, ...]:
    """Return the lines of a signature."""
    return argument_groups(arguments, lambda argument: f"{argument.name},", width=100)


def begins(plan: Plan, read: Collection[str]) -> tuple[str, ...]:
    """First row of a dense sequence in the packed numbering, for expressions that read it."""
    begins = {"q_begin": "b * seqlen_q", "k_begin": "b * seqlen_k"}
    return () if plan.varlen else tuple(f"{name} = {value}" for name, value in begins.items() if name in read)


def triton_type(plan: Plan, operand: str) -> str:
    """Return the dtype of an operand as Triton code names it."""
    return f"tl.{plan.operands.of(operand).triton_language}"


def precision_of(plan: Plan) -> str:
    """The argument by which ``tl.dot`` multiplies float32 without rounding it to TF32."""
    return f', input_precision="{plan.dot_precision}"' if plan.dot_precision else ""


def column_block(plan: Plan, index: int) -> ColumnBlock:
    block = plan.columns_v[index]
    inside = f" & (column[None, :] < {plan.head_dim_v})" if block.used < block.width else ""
    columns = f"{block.start} + " * (block.start > 0) + f"tl.arange(0, {block.width})"
    return ColumnBlock(block_suffix(plan.columns_v, index), block.width, columns, f"stored{inside}")


# --- loads --------------------------------------------------------------------------------------------------


def _load_q(plan: Plan) -> tuple[str, ...]:
    """Return the lines that load the query tile, and that find the head of K and V where these have pointers.

    Triton keeps a reshaped descriptor load in registers, where products with it are faster by a fifth; a tile loaded
    through pointers it puts into shared memory.
    """
    lines = []
    if not has_descriptor(plan, "q"):
        row = "(q_begin + q_index)" if plan.varlen else "q_index"
        lines.append(f"q_rows = {head_address(plan, 'q', 'h')} + {row}[:, None] * stride_q_s")
    if plan.loads == "pointer":
        for name in ("k", "v"):
            start = f" + k_begin * stride_{name}_s" if plan.varlen else ""
            lines.append(f"{name}_head = {head_address(plan, name, 'hk')}{start}")
    for index, block in enumerate(plan.columns_qk):
        suffix = block_suffix(plan.columns_qk, index)
        if has_descriptor(plan, "q"):
            place = f"[q_begin + q_start, h, {block.start}]" if plan.varlen else f"[b, q_start, h, {block.start}]"
            load = f"tl.reshape(q_desc{suffix}.load({place}), [BLOCK_M, {block.width}])"
        else:
            column, inside = column_offsets(block, plan.head_dim_qk)
            mask = " & ".join(["(q_index[:, None] < seqlen_q)", *inside])
            load = f"tl.load(q_rows + {column}, mask={mask}, other=0.0)"
        lines.append(f"q{suffix} = {load}")
    return tuple(lines)


def load_kv(plan: Plan, name: str, blocks: tuple[Columns, ...], *, ragged: bool) -> tuple[Statement, ...]:
    """Return the statements that load one K or V tile, or one of their tangents; in the ragged tile, rows of V and of
    its tangent beyond the end become 0."""
    loads: list[Statement] = []
    of_values = name.endswith("v")
    head_dim = plan.head_dim_v if of_values else plan.head_dim_qk
    for index, block in enumerate(blocks):
        suffix = block_suffix(blocks, index)
        if plan.loads == "descriptor":
            loads.append(assign(f"{name}{suffix}", _descriptor_load(name, suffix, block, varlen=plan.varlen)))
            if ragged and of_values:  # a probability of 0 times NaN would be NaN
                kept = f"tl.where({{kv_index}}[:, None] < {{seqlen_k}}, {{{name}{suffix}}}, 0.0)"
                loads.append(assign(f"{name}{suffix}", kept))
            continue
        column, inside = column_offsets(block, head_dim)
        tests = ["({kv_index}[:, None] < {seqlen_k})"] * ragged + inside
        mask = f", mask={' & '.join(tests)}, other=0.0" if tests else ""
        address = f"{{{name}_head}} + {{kv_index}}[:, None] * {{stride_{name}_s}} + {column}"
        loads.append(assign(f"{name}{suffix}", f"tl.load({address}{mask})"))
    return tuple(loads)


def _descriptor_load(name: str, suffix: str, block: Columns, *, varlen: bool) -> str:
    """Return the pattern of a load of K or V through a descriptor."""
    place = "{k_begin} + {kv_start}, {hk}" if varlen else "{b}, {kv_start}, {hk}"
    return f"tl.reshape({{{name}_desc{suffix}}}.load([{place}, {block.start}]), [BLOCK_N, {block.width}])"


def head_address(plan: Plan, name: str, head: str) -> str:
    """Pointer to the first row of a head."""
    batch = "" if plan.varlen else f" + b * stride_{name}_b"
    return f"{name}_ptr{batch} + {head} * stride_{name}_h"


def column_offsets(block: Columns, head_dim: int) -> tuple[str, list[str]]:
    """Return the column offsets of a block, and the test that keeps its padding out."""
    vector = f"tl.arange(0, {block.width})[None, :]"
    column = f"{block.start} + {vector}" if block.start else vector
    return column, [f"({column} < {head_dim})"] if block.used < block.width else []


# --- one step over a KV tile --------------------------------------------------------------------------------


def _step(plan: Plan, code: Math, body: Body, condition: str | None, *, ragged: bool = False) -> ForwardStep:
    dots = []
    for index in range(len(plan.columns_qk)):
        suffix = block_suffix(plan.columns_qk, index)
        accumulate = ", s" if index else ""
        dots.append(f"s = tl.dot(q{suffix}, tl.trans(k{suffix}){accumulate}{precision_of(plan)})")
    load_k = load_kv(plan, "k", plan.columns_qk, ragged=ragged)
    load_v = load_kv(plan, "v", plan.columns_v, ragged=ragged)
    read = reads([*load_k, *load_v, *body.all])
    return ForwardStep(
        kv_index=not read.isdisjoint(("kv_index", "kv_packed")),
        load_k=lines(load_k),
        dot_qk=tuple(dots),
        score_lines=lines(body.score_lines),
        condition=condition if body.mask_lines else None,
        mask_lines=lines(body.mask_lines),
        logit=code.logit,
        multiplier=code.multiplier,
        load_v=lines(load_v),
    )


def classifier_view(plan: Plan, *, uses_q_pos: bool) -> TritonClassifier:
    code = classifier(plan)
    return TritonClassifier(
        argument_lines=parameter_list(plan.launch("classify").arguments),
        begin_lines=begins(plan, code.reads),
        range_lines=lines(code.range_lines),
        blocks=block_tests(code.blocks),
        hoisted_lines=lines(code.hoisted),
        lines=lines(code.lines),
        uses_q_pos=uses_q_pos,
    )
