"""Plan → what the templates of the Hopper backward by blocks name: facts, and lines of the user's mathematics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from attngen.dtypes import DType
from attngen.families.hopper_backward.blocks import queries_plan
from attngen.families.hopper_backward.blocks_pipes import ROWS, keys_pipes_of, queries_pipes_of
from attngen.families.hopper_backward.blocks_structure import BlocksBackward
from attngen.lang.ir import MAX_SEQLEN, Expr
from attngen.lang.statements import Code, Statement, reads
from attngen.parts.backward_launches import row_lanes
from attngen.parts.regions import SWIZZLES, RegionView, classifier_lines
from attngen.plan.model import Launch, Plan, Region
from attngen.render.biases import Bias
from attngen.render.classifier import ClassifierView, classifier_view
from attngen.render.cuda_arguments import argument_lines
from attngen.render.cuda_gradients import classified_query_word, factor, probabilities
from attngen.render.cuda_math import Steps, logits
from attngen.render.cuda_statements import int_constant
from attngen.render.cuda_tiles import classified_word
from attngen.render.expressions import KEYS, QUERIES
from attngen.render.header import command, summary
from attngen.render.pipes import PipesView, constant, pipes_view

_REGION_TEXTS = {
    "lse": "log-sum-exp of the rows of each step", "delta": "D of the rows of each step",
    "work": "the work tile that is computed", "step": "which rows each step has, and who sees them",
    "p": "P of two steps in turn",
}  # fmt: skip
#: Matrices in the kernel of dK and dV, and in that of dQ.
_MATRICES = {
    "dkdv": {"q": "Q, a block per stage", "dout": "dO, a block per stage", "k": "K, then dK", "v": "V, then dV"},
    "dq": {"q": "Q, then dQ", "dout": "dO", "k": "K, a block per stage", "v": "V, a block per stage"},
}
_WRITTEN = {
    "preprocess": frozenset({"lse_log2", "delta"}),
    "dkdv": frozenset({"dk", "dv", "tile_counter"}),
    "dq": frozenset({"dq", "tile_counter"}),
}


@dataclass(frozen=True, slots=True)
class QueriesView:
    """Everything that the kernel of dQ names beside that: it goes along keys."""

    plan: Plan
    apart: bool  # S and dP of the same rows have a consumer each
    tile_rows: int  # of a work tile, where each kernel has its own number; else 0
    argument_lines: tuple[str, ...]
    regions: tuple[RegionView, ...]
    region_bytes: Mapping[str, int]
    pipes: PipesView
    columns_qk: tuple[int, ...]  # of dQ, where boxes begin
    work_lines: tuple[Statement, ...]
    partial: Steps
    full: Steps
    visible: Steps | None
    visible_uses_kv: bool
    uses_kv: bool
    multiplier: Code
    factor_lines: tuple[Statement, ...]
    factor: Code
    classifier: ClassifierView
    biases: tuple[Bias, ...] = ()
    drops_products: bool = False


@dataclass(frozen=True, slots=True)
class BlocksBackwardView:
    """Everything that ``blocks/kernel.cu.j2`` names beside the plan: of all kernels, and of that of dK and dV."""

    template: str
    command: str
    summary: str
    apart: bool  # S and dP of the same keys have a consumer each
    tile_rows: int  # of a work tile, where each kernel has its own number; else 0
    element: DType  # of q, k, v, dout, p and ds
    gradient: DType  # of dq, dk and dv
    swizzle: int
    last_tile: int
    preprocess_lines: tuple[str, ...]
    lanes_of_row: int
    chunks_of_row: int
    dkdv_lines: tuple[str, ...]
    regions: tuple[RegionView, ...]
    region_bytes: Mapping[str, int]
    pipes: PipesView
    columns_qk: tuple[int, ...]  # of dK, and of dV, where boxes begin
    columns_v: tuple[int, ...]
    work_reads: tuple[str, ...]  # fields of a work tile
    uses_kv_first: bool
    uses_h: bool
    uses_q_first: bool
    block_lines: tuple[Statement, ...]
    partial: Steps
    full: Steps
    visible: Steps | None
    exponent: Code
    factor_lines: tuple[Statement, ...]
    factor: Code
    uses_b: bool
    classifier: ClassifierView
    by_queries: QueriesView
    # what kernels by tiles of keys have beside that, and these do not
    cleared: None = None
    first_stored: bool = False
    weighted: None = None
    kept: tuple[()] = ()
    tensor_sums: None = None
    warp_sums: None = None
    query_values: None = None
    distance_values: None = None
    biases: tuple[()] = ()
    tables: tuple[()] = ()
    waits_for_loads: bool = False


def blocks_view(plan: Plan, template: str) -> BlocksBackwardView:
    """Return the view of a plan."""
    roles = plan.structure
    assert isinstance(roles, BlocksBackward)
    parts = {part.name: part for part in plan.launches}
    dkdv = plan.of_launch(parts["dkdv"])
    code = probabilities(dkdv)
    factor_lines, factor_text = factor(dkdv, code.factor)
    steps = reads([*code.partial.all, *code.full.all, *(code.visible.all if code.visible else ()), code.exponent])
    out = plan.operands.shared("out", "dout")
    own = parts["classify_dkdv"]
    return BlocksBackwardView(
        template=template,
        command=command(plan),
        summary=summary(plan),
        apart=_is_apart(roles, plan.tile_n),
        tile_rows=plan.tile_n if _is_apart(roles, plan.tile_n) else 0,
        element=plan.operands.shared("q", "k", "v", "dout", "p", "ds"),
        gradient=plan.operands.shared("dq", "dk", "dv"),
        swizzle=SWIZZLES[roles.box_bytes],
        last_tile=(MAX_SEQLEN - 1) // plan.tile_m,
        preprocess_lines=_lines(plan, parts["preprocess"]),
        lanes_of_row=row_lanes(plan.head_dim_v, out),
        chunks_of_row=plan.head_dim_v // out.chunk_elements,
        dkdv_lines=_lines(plan, parts["dkdv"]),
        regions=_regions(roles.shared, "dkdv"),
        region_bytes={region.name: region.bytes for region in roles.shared},
        pipes=pipes_view(keys_pipes_of(plan)),
        columns_qk=_boxes(plan, plan.head_dim_qk),
        columns_v=_boxes(plan, plan.head_dim_v),
        work_reads=_work_reads(plan, steps),
        uses_kv_first="kv_first" in steps,
        uses_h="h" in steps,
        uses_q_first="q_first" in steps,
        block_lines=code.block,
        partial=code.partial,
        full=code.full,
        visible=code.visible,
        exponent=code.exponent,
        factor_lines=factor_lines,
        factor=factor_text,
        uses_b=not plan.varlen or "b" in reads([*factor_lines, factor_text]),
        classifier=classifier_view(dkdv, own, classifier_lines(plan, own), QUERIES, classified_query_word),
        by_queries=_queries_view(plan, roles, code.factor),
    )


def _queries_view(plan: Plan, roles: BlocksBackward, derivative: Expr) -> QueriesView:
    own, classify = queries_plan(plan), plan.launch("classify_dq")
    code = logits(own)
    factor_lines, factor_text = factor(own, derivative)
    seen = reads(code.visible.all if code.visible else ())
    steps = reads([*code.partial.all, *code.full.all])
    return QueriesView(
        plan=own,
        apart=_is_apart(roles, own.tile_m),
        tile_rows=own.tile_m if _is_apart(roles, plan.tile_n) else 0,
        argument_lines=_lines(plan, plan.launch("dq")),
        regions=_regions(roles.of_queries, "dq"),
        region_bytes={region.name: region.bytes for region in roles.of_queries},
        pipes=pipes_view(queries_pipes_of(plan)),
        columns_qk=_boxes(plan, plan.head_dim_qk),
        work_lines=_work_lines(plan, reads([*code.work, *factor_lines, factor_text]) | steps | seen, code.work),
        partial=code.partial,
        full=code.full,
        visible=code.visible,
        visible_uses_kv="kv_first" in seen,
        uses_kv="kv_first" in steps,
        multiplier=code.multiplier,
        factor_lines=factor_lines,
        factor=factor_text,
        classifier=classifier_view(own, classify, classifier_lines(plan, classify), KEYS, classified_word),
    )


def _is_apart(roles: BlocksBackward, tile: int) -> bool:
    return tile < ROWS * roles.consumers


def _lines(plan: Plan, part: Launch) -> tuple[str, ...]:
    return argument_lines(plan, part.arguments, written=_WRITTEN[part.name])


def _regions(regions: tuple[Region, ...], launch: str) -> tuple[RegionView, ...]:
    texts = _REGION_TEXTS | _MATRICES[launch]
    return tuple(
        RegionView(constant(each.name), each.offset, f"{each.bytes} B: {texts.get(each.name, 'barriers')}")
        for each in regions
    )


def _boxes(plan: Plan, columns: int) -> tuple[int, ...]:
    """First columns of the boxes that hold any of a gradient's."""
    assert isinstance(plan.structure, BlocksBackward)
    return tuple(range(0, columns, plan.structure.box_bytes // plan.operands.shared("q", "k", "v", "dout").bytes))


def _work_reads(plan: Plan, steps: frozenset[str]) -> tuple[str, ...]:
    """Fields of a work tile that expressions of the kernel of dK and dV read."""
    given = () if plan.varlen else ("seqlen_q",)  # an argument of the kernel
    of_work = ("b", "hk", "q_begin", "k_begin", "seqlen_q", "seqlen_k")
    return tuple(name for name in of_work if name in steps and name not in given)


def _work_lines(plan: Plan, read: frozenset[str], own: tuple[Statement, ...]) -> tuple[Statement, ...]:
    """Statements that name what expressions of the kernel of dQ read of a work tile, before those of their ``own``."""
    given, stored = ((), {"h"}) if plan.varlen else (("seqlen_q",), {"b", "h"})  # by which rows of dQ are found
    lines = [
        int_constant(name, f"{{work.{name}}}")
        for name in ("b", "h", "q_begin", "k_begin", "seqlen_q", "seqlen_k")
        if name not in given and (name in read or name in stored)
    ]
    if "hk" in read:
        lines.append(int_constant("hk", "{h} / {group}"))
    if "q_first" in read or "q_lo" in read:
        lines.append(int_constant("q_first", "{work.q_start} + 64 * {warpgroup} + {row_in_group}"))
    return (*lines, *own)
