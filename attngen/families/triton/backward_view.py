"""Plan → what the template of the Triton backward is filled with: lines of code under names, no decision of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace

from attngen.families.triton.backward import has_window, results_of, through_descriptor
from attngen.families.triton.backward_math import BY_KEYS, BY_QUERIES, GradientLines, TileOrientation, gradients
from attngen.families.triton.forward_view import (
    BlockTests,
    begins,
    block_tests,
    column_offsets,
    head_address,
    parameter_list,
    precision_of,
    triton_type,
)
from attngen.lang.statements import Code, Statement, leaf, lines, needed, reads
from attngen.plan.arguments import block_suffix
from attngen.plan.model import Columns, Launch, Plan
from attngen.render.expressions import TRITON, in_product
from attngen.render.header import command, summary
from attngen.render.triton_math import Ranges, map_lines, ranges, words


@dataclass(frozen=True, slots=True)
class OutputBlock:
    """One column block of dQ, dK or dV, or of O and dO: its name, dtype, width, columns and test of padding."""

    name: str
    type: str
    width: int
    columns: str
    inside: str
    factor: Code | None = None


@dataclass(frozen=True, slots=True)
class BackwardStep:
    """Code of one tile: loads, products, and between them the lines of score and mask.

    ``condition`` tells whether a tile needs the mask; None where each does.
    """

    load_first: tuple[str, ...]
    first_products: tuple[str, ...]
    logit: tuple[str, ...]
    condition: str | None
    mask: tuple[str, ...]
    load_second: tuple[str, ...]
    second_products: tuple[str, ...]
    load_rows: tuple[str, ...]
    derivative: tuple[str, ...]
    last_products: tuple[str, ...]
    last: str  # the same as formulas


@dataclass(frozen=True, slots=True)
class GradientKernel:
    """One of the two kernels that compute gradients. ``tiles`` is its loop, or None where words list the tiles.

    ``flat``: one loop goes through the tiles of all heads of a group, since these are the same.
    """

    part: Launch
    searches: bool
    argument_lines: tuple[str, ...]
    begin_lines: tuple[str, ...]
    range_lines: tuple[str, ...]
    mask_by_head: bool
    flat: bool
    keep_lines: tuple[str, ...]
    head_lines: tuple[str, ...]
    hoisted_lines: tuple[str, ...]
    of_head_lines: tuple[str, ...]
    uses_row: bool
    uses_q_pos: bool
    factor_lines: tuple[str, ...]
    results: tuple[OutputBlock, ...]
    written: tuple[str, ...]  # the gradients that it computes
    title: str  # the same, as formulas have them
    before: tuple[str, ...]
    after: tuple[str, ...]
    word_lines: tuple[str, ...]
    tiles: Ranges | None
    step: BackwardStep


@dataclass(frozen=True, slots=True)
class GradientClassifier:
    """The kernel that computes the tile map of either."""

    part: Launch
    searches: bool
    by_keys: bool
    argument_lines: tuple[str, ...]
    begin_lines: tuple[str, ...]
    range_lines: tuple[str, ...]
    blocks: BlockTests | None
    hoisted_lines: tuple[str, ...]
    lines: tuple[str, ...]
    uses_q_pos: bool


@dataclass(frozen=True, slots=True)
class BackwardView:
    """Everything that ``backward.py.j2`` names beside the plan itself."""

    template: str
    command: str
    summary: str
    searches: bool
    lists: bool
    preprocess: Launch | None  # of the log-sum-exp and D, which weights without a sum of a row do without
    preprocess_lines: tuple[str, ...]
    out_blocks: tuple[OutputBlock, ...]
    by_keys: tuple[GradientKernel, ...]
    dq: GradientKernel
    classifiers: tuple[GradientClassifier, ...]


def backward_view(plan: Plan, template: str) -> BackwardView:
    """Return the view of a plan."""
    by_keys = tuple(_kernel(plan, part, BY_KEYS) for part in plan.launches if part.grid == "keys")
    dq = _kernel(plan, plan.launch("dq"), BY_QUERIES)
    classifiers = tuple(_classifier(plan, part) for part in plan.launches if part.name.startswith("classify_"))
    preprocess = plan.launch("preprocess") if plan.has_launch("preprocess") else None
    return BackwardView(
        template=template,
        command=command(plan),
        summary=summary(plan),
        searches=any(each.searches for each in (*by_keys, dq)) or any(each.searches for each in classifiers),
        lists=any(kernel.part.iteration != "ranges" for kernel in (*by_keys, dq)),
        preprocess=preprocess,
        preprocess_lines=parameter_list(preprocess.arguments) if preprocess else (),
        out_blocks=_results(plan, "out", plan.columns_v, plan.head_dim_v),
        by_keys=by_keys,
        dq=dq,
        classifiers=classifiers,
    )


def _kernel(plan: Plan, part: Launch, form: TileOrientation) -> GradientKernel:
    own = plan.of_launch(part)
    spans, listed = ranges(own, form.along), words(own, form.along)
    code = gradients(own, form, [*spans.lines, *listed.lines])
    written = results_of(part)
    if written == ("dv",):  # P alone: nothing reads dS
        code = replace(code, derivative=needed(code.derivative, [Statement("", frozenset({"p"}))]), factor_lines=())
    condition = spans.condition if part.iteration == "ranges" else listed.condition
    before = [*spans.lines, *listed.lines, *code.hoisted, *code.of_head, *code.factor_lines]
    read = reads([*before, *code.logit, *code.mask, *code.derivative, *code.after])
    if form is BY_KEYS:
        scale = leaf("dropout_scale") if plan.variant.dropout else None
        results = tuple(
            block
            for name, columns, head_dim, factor in (
                ("dk", plan.columns_qk, plan.head_dim_qk, code.factor),
                ("dv", plan.columns_v, plan.head_dim_v, scale),
            )
            if name in written
            for block in _results(plan, name, columns, head_dim, factor)
        )
    else:
        results = _results(plan, "dq", plan.columns_qk, plan.head_dim_qk, code.factor)
    return GradientKernel(
        part=part,
        searches="first_at_least" in read,
        argument_lines=parameter_list(part.arguments),
        begin_lines=begins(own, read),
        range_lines=lines(spans.lines),
        mask_by_head=code.mask_by_head,
        flat=part.iteration == "ranges" and not code.mask_by_head,
        keep_lines=_keep(own, form, written),
        head_lines=_heads(own, part, form),
        hoisted_lines=lines(code.hoisted),
        of_head_lines=lines(code.of_head),
        uses_row=not read.isdisjoint(("kv_row", "kv_packed") if form is BY_KEYS else _ROWS),
        uses_q_pos="q_pos" in read,
        factor_lines=lines(code.factor_lines),
        results=results,
        written=written,
        title=" and ".join(f"d{name[1:].upper()}" for name in written),
        before=lines(code.before),
        after=lines(code.after),
        word_lines=lines(listed.lines),
        tiles=spans.loops[0][1] if spans.loops else None,
        step=_step(own, part, form, code, condition),
    )


#: Terms that a step adds to each gradient.
_FORMULAS = {"dq": "dQ += dS K", "dk": "dK += dS^T Q", "dv": "dV += P^T dO"}

_ROWS = ("q_row", "q_pos", "q_packed")


def _results(
    plan: Plan, name: str, blocks: tuple[Columns, ...], head_dim: int, factor: Code | None = None
) -> tuple[OutputBlock, ...]:
    results = []
    for index, block in enumerate(blocks):
        columns = f"{block.start} + " * (block.start > 0) + f"tl.arange(0, {block.width})"
        inside = f" & (column[None, :] < {head_dim})" if block.used < block.width else ""
        scaled = None if factor is None or factor.text == "1.0" else in_product(factor, TRITON)
        label = f"{name}{block_suffix(blocks, index)}"
        results.append(OutputBlock(label, triton_type(plan, name), block.width, columns, inside, scaled))
    return tuple(results)


# --- loads --------------------------------------------------------------------------------------------------


def _blocks(plan: Plan, name: str) -> tuple[tuple[Columns, ...], int]:
    """Return the column blocks and the head dim of q, k, v or dout."""
    return (plan.columns_qk, plan.head_dim_qk) if name in ("q", "k") else (plan.columns_v, plan.head_dim_v)


def _keep(plan: Plan, form: TileOrientation, written: tuple[str, ...]) -> tuple[str, ...]:
    """Return the lines that load what a block keeps; through pointers, so that it lies in shared memory."""
    lines = []
    names, head, index, length, begin = (
        (("k",) if written == ("dv",) else ("k", "v"), "hk", "kv_index", "seqlen_k", "k_begin")
        if form is BY_KEYS
        else (("q", "dout"), "h", "q_index", "seqlen_q", "q_begin")
    )
    for name in names:
        blocks, head_dim = _blocks(plan, name)
        row = f"({begin} + {index})" if plan.varlen else index
        lines.append(f"{name}_rows = {head_address(plan, name, head)} + {row}[:, None] * stride_{name}_s")
        for number, block in enumerate(blocks):
            column, inside = column_offsets(block, head_dim)
            mask = " & ".join([f"({index}[:, None] < {length})", *inside])
            lines.append(
                f"{name}{block_suffix(blocks, number)} = tl.load({name}_rows + {column}, mask={mask}, other=0.0)"
            )
    return tuple(lines)


def _heads(plan: Plan, part: Launch, form: TileOrientation) -> tuple[str, ...]:
    """Return the lines that find the rows of a head of what the loops load, where these have pointers."""
    lines = []
    names, head, begin = (("q", "dout"), "h", "q_begin") if form is BY_KEYS else (("k", "v"), "hk", "k_begin")
    for name in names:
        if not through_descriptor(plan, name, part.grid):
            start = f" + {begin} * stride_{name}_s" if plan.varlen else ""
            lines.append(f"{name}_head = {head_address(plan, name, head)}{start}")
    return tuple(lines)


def _load(plan: Plan, part: Launch, form: TileOrientation, names: tuple[str, str], which: int) -> tuple[str, ...]:
    """Return the lines that load one tile of what the loops go along; rows after the end of a sequence are 0."""
    name = names[which]
    head, index, start, length, begin, rows = (
        ("h", "q_index", "q_start", "seqlen_q", "q_begin", "BLOCK_M")
        if form is BY_KEYS
        else ("hk", "kv_index", "kv_start", "seqlen_k", "k_begin", "BLOCK_N")
    )
    blocks, head_dim = _blocks(plan, name)
    lines = []
    described = through_descriptor(plan, name, part.grid)
    windowed = described and has_window(plan, part.grid)
    first = f"{begin} + {start}" if plan.varlen else start
    place = f"{first} + inside, {rows} - inside" if windowed else first
    if windowed and which == 0:
        lines.append(f"inside = tl.minimum({length} - {start}, {rows})  # rows before the end of the sequence")
    for number, block in enumerate(blocks):
        suffix = block_suffix(blocks, number)
        if described:
            corner = f"{place}, {head}, {block.start}" if plan.varlen else f"b, {place}, {head}, {block.start}"
            lines.append(f"{name}{suffix} = tl.reshape({name}_desc{suffix}.load([{corner}]), [{rows}, {block.width}])")
            continue
        column, inside = column_offsets(block, head_dim)
        mask = " & ".join([f"({index}[:, None] < {length})", *inside])
        address = f"{name}_head + {index}[:, None] * stride_{name}_s + {column}"
        lines.append(f"{name}{suffix} = tl.load({address}, mask={mask}, other=0.0)")
    return tuple(lines)


# --- one step -----------------------------------------------------------------------------------------------


def _step(plan: Plan, part: Launch, form: TileOrientation, code: GradientLines, condition: str | None) -> BackwardStep:
    precision = precision_of(plan)

    def product(result: str, left: str, right: str, blocks: tuple[Columns, ...]) -> tuple[str, ...]:
        """Multiply two tiles over their common columns, block by block."""
        lines = []
        for number in range(len(blocks)):
            suffix = block_suffix(blocks, number)
            more = f", {result}" if number else ""
            lines.append(f"{result} = tl.dot({left}{suffix}, tl.trans({right}{suffix}){more}{precision})")
        return tuple(lines)

    def add(result: str, left: str, right: str, blocks: tuple[Columns, ...]) -> tuple[str, ...]:
        """Add a product to each column block of a result."""
        element = triton_type(plan, left)
        return tuple(
            f"{result}{s} = tl.dot({left}.to({element}), {right}{s}, {result}{s}{precision})"
            for s in (block_suffix(blocks, number) for number in range(len(blocks)))
        )

    written = results_of(part)

    def step(first: str, second: str, **products: tuple[str, ...]) -> BackwardStep:
        return BackwardStep(
            last=", ".join(_FORMULAS[name] for name in reversed(written)),
            load_first=_load(plan, part, form, (first, second), 0),
            load_second=_load(plan, part, form, (first, second), 1),
            logit=lines(code.logit),
            condition=condition,
            mask=lines(code.mask),
            derivative=lines(code.derivative),
            **products,
        )

    if form is BY_QUERIES:
        return step(
            "k",
            "v",
            first_products=product("s", "q", "k", plan.columns_qk),
            second_products=product("dp", "dout", "v", plan.columns_v),
            load_rows=(),
            last_products=add("dq", "ds", "k", plan.columns_qk),
        )
    # Numbered apart from q_index, which would else be kept in registers from the load to the mask.
    rows = "q_start + tl.arange(0, BLOCK_M)"
    inside = "mask=tl.arange(0, BLOCK_M) < seqlen_q - q_start, other=0.0"
    return step(
        "q",
        "dout",
        first_products=product("s", "k", "q", plan.columns_qk),
        second_products=product("dp", "v", "dout", plan.columns_v) if "dk" in written else (),
        load_rows=()
        if not plan.variant.has_lse
        else (
            f"lse_log2 = tl.load(lse_rows + {rows}, {inside})",
            *([f"delta = tl.load(delta_rows + {rows}, {inside})"] if "dk" in written else []),
        ),
        last_products=(
            *(add("dv", "p", "dout", plan.columns_v) if "dv" in written else ()),
            *(add("dk", "ds", "q", plan.columns_qk) if "dk" in written else ()),
        ),
    )


def _classifier(plan: Plan, part: Launch) -> GradientClassifier:
    own = plan.of_launch(part)
    by_keys = part.grid == "key_words"
    code = map_lines(own, (BY_KEYS if by_keys else BY_QUERIES).along)
    read = code.reads
    return GradientClassifier(
        part=part,
        searches="first_at_least" in read,
        by_keys=by_keys,
        argument_lines=parameter_list(part.arguments),
        begin_lines=begins(own, read),
        range_lines=lines(code.range_lines),
        blocks=block_tests(code.blocks),
        hoisted_lines=lines(code.hoisted),
        lines=lines(code.lines),
        uses_q_pos="q_pos" in read,
    )
