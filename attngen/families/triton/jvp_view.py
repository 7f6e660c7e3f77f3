"""Plan → what the template of the forward-mode derivative is filled with: lines of code under names."""

from __future__ import annotations

from dataclasses import dataclass, replace

from attngen.families.triton.forward_view import (
    ColumnBlock,
    TritonClassifier,
    begins,
    classifier_view,
    column_block,
    column_offsets,
    head_address,
    load_kv,
    parameter_list,
    precision_of,
    triton_type,
)
from attngen.families.triton.jvp import TANGENTS
from attngen.lang.folding import ONE, fold_slope, fold_variant
from attngen.lang.statements import Code, Statement, declared, lines, reads, written
from attngen.operations import JVP
from attngen.plan.arguments import block_suffix
from attngen.plan.model import Launch, Plan
from attngen.render.expressions import TRITON, emit_for, in_product, scalar_bindings
from attngen.render.header import command, summary
from attngen.render.triton_math import Body, Math, Ranges, assign, math, ranges, sink, words


@dataclass(frozen=True, slots=True)
class TangentStep:
    """Code of one KV tile: loads, products, the lines of score and mask, the logit that results, and the tangent of the
    probabilities.

    ``condition`` tells whether a tile needs the mask; None where each does.
    """

    kv_index: bool
    load_k: tuple[str, ...]
    products: tuple[str, ...]
    score_lines: tuple[str, ...]
    condition: str | None
    mask_lines: tuple[str, ...]
    logit: str
    multiplier: Code
    tangent: Code
    load_v: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TangentLoop:
    """A loop over whole tiles: what it is about, which tiles, and what it does with each."""

    title: str
    tiles: Ranges
    step: TangentStep


@dataclass(frozen=True, slots=True)
class TangentKernel:
    """One of the two launches: that of all tangents, or of those of q alone."""

    part: Launch
    title: str
    argument_lines: tuple[str, ...]
    begin_lines: tuple[str, ...]
    uses_q_row: bool
    uses_q_pos: bool
    range_lines: tuple[str, ...]
    ragged: str
    load_lines: tuple[str, ...]
    hoisted_lines: tuple[str, ...]
    loops: tuple[TangentLoop, ...]
    word_lines: tuple[str, ...]
    step: TangentStep
    ragged_step: TangentStep
    of_values: bool
    statements: tuple[Statement, ...]  # of the mask, the score and the tiles to visit


@dataclass(frozen=True, slots=True)
class TangentView:
    """Everything that ``jvp.py.j2`` names beside the plan itself."""

    template: str
    command: str
    summary: str
    searches: bool
    kernels: tuple[TangentKernel, ...]
    v_blocks: tuple[ColumnBlock, ...]
    sink_lines: tuple[str, ...]
    sink: Code | None
    p_type: str
    out_type: str
    precision: str
    classifier: TritonClassifier | None


_TITLES = {
    "visible": "The whole tiles.",
    "full": "Whole tiles that every row sees: no mask code.",
    "partial": "Whole tiles that the mask cuts.",
}


def jvp_view(plan: Plan, template: str) -> TangentView:
    """Return the view of a plan."""
    kernels = tuple(_kernel(plan, plan.launch(name)) for name in TANGENTS)
    own = [statement for kernel in kernels for statement in kernel.statements]
    sink_lines, sink_value = sink(plan, own) if plan.variant.sink is not None else ((), None)
    uses_q_pos = any(kernel.uses_q_pos for kernel in kernels)
    return TangentView(
        template=template,
        command=command(plan),
        summary=summary(plan),
        searches="first_at_least" in reads(own),
        kernels=kernels,
        v_blocks=tuple(column_block(plan, i) for i in range(len(plan.columns_v))),
        sink_lines=lines(sink_lines),
        sink=None if sink_value is None else in_product(sink_value, TRITON),
        p_type=triton_type(plan, "p"),
        out_type=triton_type(plan, "out"),
        precision=precision_of(plan),
        classifier=classifier_view(plan, uses_q_pos=uses_q_pos) if plan.has_launch("classify") else None,
    )  # fmt: skip


def _kernel(plan: Plan, part: Launch) -> TangentKernel:
    own, tangents = plan.of_launch(part), TANGENTS[part.name]
    spans, listed = ranges(own), words(own)
    slope = fold_slope(fold_variant(plan.variant, fast_math=plan.fast_math), fast_math=plan.fast_math)
    before = [*spans.lines, *listed.lines]
    code = math(own, before=before, slope=slope.varying or ONE)
    statements = [*before, *code.hoisted, *code.whole.all, *code.ragged.all]
    factor = emit_for(own, TRITON, [slope.factor], scalar_bindings(own, TRITON), taken=declared(statements))
    hoisted = [*code.hoisted, *factor.hoisted, *factor.body, assign("slope", factor.results[0])]
    statements += hoisted
    condition = spans.condition if part.iteration == "ranges" else listed.condition

    def step(body: Body, condition: str | None, *, ragged: bool = False) -> TangentStep:
        return _step(own, tangents, code, body, condition, ragged=ragged)

    whole = step(code.whole, condition)
    unmasked = step(replace(code.whole, mask_lines=()), None)
    steps = {"visible": whole, "partial": whole, "full": unmasked}
    return TangentKernel(
        part=part,
        title="tangents of q, k and v" if part.name == JVP else "a tangent of q alone",
        argument_lines=parameter_list(part.arguments),
        begin_lines=begins(own, reads(statements)),
        uses_q_row=code.uses_q_row,
        uses_q_pos=code.uses_q_pos,
        range_lines=lines(spans.lines),
        ragged=spans.ragged,
        load_lines=_load_rows(own, tangents),
        hoisted_lines=lines(hoisted),
        loops=tuple(TangentLoop(_TITLES[kind], loop, steps[kind]) for kind, loop in spans.loops),
        word_lines=lines(listed.lines),
        step=whole,
        ragged_step=step(code.ragged, None, ragged=True),
        of_values="v" in tangents,
        statements=tuple(statements),
    )


def _load_rows(plan: Plan, tangents: tuple[str, ...]) -> tuple[str, ...]:
    """Return the lines that load the query tile and its tangent, through pointers, so that Triton keeps both in shared
    memory; and those that find the head of K, V and their tangents where these have pointers."""
    loaded = []
    for name in ("q", "dq"):
        row = "(q_begin + q_index)" if plan.varlen else "q_index"
        loaded.append(f"{name}_rows = {head_address(plan, name, 'h')} + {row}[:, None] * stride_{name}_s")
        for index, block in enumerate(plan.columns_qk):
            suffix = block_suffix(plan.columns_qk, index)
            column, inside = column_offsets(block, plan.head_dim_qk)
            mask = " & ".join(["(q_index[:, None] < seqlen_q)", *inside])
            loaded.append(f"{name}{suffix} = tl.load({name}_rows + {column}, mask={mask}, other=0.0)")
    if plan.loads == "pointer":
        for name in _of_keys(tangents):
            start = f" + k_begin * stride_{name}_s" if plan.varlen else ""
            loaded.append(f"{name}_head = {head_address(plan, name, 'hk')}{start}")
    return tuple(loaded)


def _of_keys(tangents: tuple[str, ...]) -> list[str]:
    return [name for of in ("k", "v") for name in (of, *([f"d{of}"] if of in tangents else []))]


def _step(
    plan: Plan, tangents: tuple[str, ...], code: Math, body: Body, condition: str | None, *, ragged: bool
) -> TangentStep:
    pairs = [("s", "q", "k"), ("ds", "dq", "k"), *([("ds", "q", "dk")] if "k" in tangents else [])]
    products, begun = [], set()
    for result, rows, keys in pairs:
        for index in range(len(plan.columns_qk)):
            suffix = block_suffix(plan.columns_qk, index)
            accumulate = f", {result}" if result in begun else ""
            begun.add(result)
            dot = f"tl.dot({rows}{suffix}, tl.trans({keys}{suffix}){accumulate}{precision_of(plan)})"
            products.append(f"{result} = {dot}")
    of = {name: plan.columns_v if name.endswith("v") else plan.columns_qk for name in _of_keys(tangents)}
    loads = {name: load_kv(plan, name, blocks, ragged=ragged) for name, blocks in of.items()}
    load_k, load_v = (
        [line for name, load in loads.items() if name.endswith(axis) for line in load] for axis in ("k", "v")
    )
    mask_lines: list[Statement] = [*body.mask_lines]
    if mask_lines:  # what is hidden may be anything, and zero times it is not zero
        mask_lines.append(assign("ds", "tl.where({visible}, {ds}, 0.0)"))
    read = reads([*load_k, *load_v, *body.all])
    return TangentStep(
        kv_index=not read.isdisjoint(("kv_index", "kv_packed")),
        load_k=lines(load_k),
        products=tuple(products),
        score_lines=lines(body.score_lines),
        condition=condition if body.mask_lines else None,
        mask_lines=lines(mask_lines),
        logit=code.logit,
        multiplier=code.multiplier,
        tangent=_tangent(body),
        load_v=lines(load_v),
    )


def _tangent(body: Body) -> Code:
    """Return the tangent of the probabilities before they are normalized. Where the derivative of the score depends on
    the pair, that of a hidden one may be anything, and pairs without a probability are selected away."""
    assert body.slope is not None
    if body.slope.text == "1.0":
        return written("p * (ds * slope)")
    return written("tl.where(p != 0.0, p * (ds * (slope * {})), 0.0)", in_product(body.slope, TRITON))
