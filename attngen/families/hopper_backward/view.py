"""Plan → what the template of the CUDA backward names: facts, and lines of the user's mathematics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from attngen.dtypes import DType
from attngen.families.hopper_backward.cluster_pipes import cluster_pipes_of
from attngen.families.hopper_backward.launches import first_stored
from attngen.families.hopper_backward.pipes import DQ_BLOCK_BYTES, backward_pipes_of
from attngen.families.hopper_backward.structure import KEYS_OF_CONSUMER, HopperBackward
from attngen.lang.ir import MAX_SEQLEN
from attngen.lang.statements import Code, Statement, reads
from attngen.parts.backward_launches import row_lanes
from attngen.parts.heads import by_head
from attngen.parts.regions import SWIZZLES, RegionView, classifier_lines
from attngen.plan.model import Launch, Plan
from attngen.plan.traits import reads_positions
from attngen.render.biases import Bias, biases_of
from attngen.render.classifier import ClassifierView, classifier_view
from attngen.render.cuda_arguments import argument_lines
from attngen.render.cuda_gradients import QueryValues, classified_query_word, factor, probabilities, query_word
from attngen.render.cuda_math import Steps
from attngen.render.cuda_statements import positions_name
from attngen.render.cuda_tiles import Ends, tiles
from attngen.render.distance_values import DistanceValues
from attngen.render.expressions import OWN_QUERIES, QUERIES
from attngen.render.header import command, summary
from attngen.render.pipes import PipesView, constant, pipes_view
from attngen.render.tables import Fill, fills
from attngen.render.tensor_gradients import SumsView, TilesView, register_sums, tile_sums, warp_sums

_REGION_TEXTS = {
    "k": "K", "v": "V", "q": "Q, a tile per stage", "dout": "dO, a tile per stage",
    "ds": "dS of two steps, then dK for its store", "dq": "dQ on its way to the dQ accumulator, then dV for its store",
    "biases": "tiles of biases that belong to a step, of each consumer's keys",
    "tables": "tables that the score reads, a copy for each consumer",
    "distance_values": "values of the distances of each stage's queries from the keys, which the score reads",
    "query_values": "what the {who} reads of the queries of each stage", "lse": "log-sum-exp of the rows of each stage",
    "delta": "D of the rows of each stage",
    "work": "two work tiles: the one that is computed and the next",
    "other_k": "half of the columns of the other block's K",
    "ds_step": "the steps of both tiles of dS",
    "step": "the step of each stage of Q: its queries and its head", "sum_tile": "where dQ of the last steps goes",
    "dq_block": "two blocks of the dQ accumulator: the one that is rounded and the next",
    "dq_block_taken": "which these are",
}  # fmt: skip
#: And where each consumer stores its gradients through its own part of dS.
_APART_TEXTS = {
    "k": "K, a tile per stage", "v": "V, a tile per stage", "ds": "dS of two steps, then dK and dV for their stores",
    "dq": "dQ on its way to the dQ accumulator",
}  # fmt: skip
#: And in a cluster, where these differ.
_CLUSTER_TEXTS = {
    "q": "Q, a tile per stage, then dK for its store", "ds": "P, then dS, of two steps",
    "other_ds": "dS of the other block, of two steps", "index": "which work tile the cluster has taken",
    "part": "S, then dP, over the other half of the columns: what the twin sends to each warp",
}  # fmt: skip
_WRITTEN = {
    "preprocess": frozenset({"lse_log2", "delta", "dq_sum", "dq_state"}),
    "dqkv": frozenset({"dq", "dk", "dv", "dq_sum", "dq_state", "partials", "tile_counter"}),
    "postprocess": frozenset({"dq"}),
}


@dataclass(frozen=True, slots=True)
class StoredColumns:
    """Columns of dK or dV that a consumer stores at once, and where they lie in its part of dS meanwhile."""

    name: str
    first: int
    columns: int
    kept: int  # columns, of these, that the gradient has
    offset: int  # bytes


@dataclass(frozen=True, slots=True)
class CudaBackwardView:
    """Everything that ``backward.cu.j2`` names beside the plan itself."""

    template: str
    command: str
    summary: str
    element: DType  # of q, k, v, dout, p and ds
    gradient: DType  # of dq, dk and dv
    outside: bool  # some copies would bring padding alone
    end_qk: int  # columns that copies bring
    end_v: int
    regions: tuple[RegionView, ...]
    region_bytes: Mapping[str, int]
    pipes: PipesView
    last_tile: int
    dq_block_bytes: int
    swizzle: int
    preprocess_lines: tuple[str, ...]
    first_stored: bool  # the first dQ of a tile of queries is stored, so that only the states of tiles are cleared
    cleared: str  # what preprocess clears: names of its pointer and its size begin with these
    cleared_chunks: str
    lanes_of_row: int
    chunks_of_row: int
    dqkv_lines: tuple[str, ...]
    uses_q_tiles: bool
    uses_whole_tiles: bool
    by_head: bool
    span_lines: tuple[Statement, ...]
    visible_ranges: tuple[Ends, ...]  # of tiles of queries; of one consumer's keys, where it has spans of its own
    full_ranges: tuple[Ends, ...]
    word_lines: tuple[Statement, ...]
    work_reads: tuple[str, ...]  # fields of a work tile
    uses_kv_first: bool
    uses_h: bool
    positions: str | None  # the tensor that says where rows lie, by which random numbers are drawn
    uses_q_first: bool
    uses_packed: bool
    block_lines: tuple[Statement, ...]
    partial: Steps
    full: Steps
    visible: Steps | None
    exponent: Code
    weighted: Code | None
    kept: tuple[tuple[str, Code], ...]  # other products of P, by the arrays that hold them until dP is there
    tensor_sums: SumsView | None  # gradients of the variant's tensors that consumers add up
    warp_sums: TilesView | None  # those that their warps add up among their lanes
    tensor_tiles: TilesView | None  # and those that a warp of the producer adds up from tiles of dS
    query_values: QueryValues | None
    distance_values: DistanceValues | None
    biases: tuple[Bias, ...]
    tables: tuple[Fill, ...]
    waits_for_loads: bool  # of one query, before those of the next: all at once would take too many registers
    factor_lines: tuple[Statement, ...]
    factor: Code
    store_rounds: tuple[tuple[StoredColumns, ...], ...]
    uses_b: bool
    postprocess_lines: tuple[str, ...]
    postprocess_uses_hk: bool
    dq_factor_lines: tuple[Statement, ...]
    dq_factor: Code
    classifier: ClassifierView | None


def cuda_backward_view(plan: Plan, template: str) -> CudaBackwardView:
    """Return the view of a plan."""
    roles = plan.structure
    assert isinstance(roles, HopperBackward)
    parts = {part.name: part for part in plan.launches}
    dqkv, postprocess = plan.of_launch(parts["dqkv"]), parts.get("postprocess")
    span = tiles(dqkv, OWN_QUERIES if roles.own_spans else QUERIES)
    code = probabilities(dqkv)
    listed = query_word(dqkv) if plan.iteration != "ranges" else ()
    factor_lines, factor_text = factor(dqkv, code.factor)
    dq_factor_lines, dq_factor = factor(plan.of_launch(postprocess) if postprocess else dqkv, code.factor)
    steps = reads([*code.partial.all, *code.full.all, *(code.visible.all if code.visible else ()), code.exponent])
    if code.distance_values:
        steps |= {"kv_first", "seqlen_k"}
    spans = reads([*span.lines, *span.values.values(), *listed])
    tensor_tiles = tile_sums(dqkv, roles.keys, by_warps=roles.cluster == 1)
    of_tiles = tensor_tiles.reads if tensor_tiles and roles.cluster > 1 else frozenset[str]()
    box = roles.box_bytes // plan.operands.shared("q", "k", "v", "dout").bytes
    end_qk, end_v = (-(-each // box) * box for each in (plan.head_dim_qk, plan.head_dim_v))
    out = plan.operands.shared("out", "dout")
    return CudaBackwardView(
        template=template,
        command=command(plan),
        summary=summary(plan),
        element=plan.operands.shared("q", "k", "v", "dout", "p", "ds"),
        gradient=plan.operands.shared("dq", "dk", "dv"),
        outside=(end_qk, end_v) != (plan.columns_qk[0].width, plan.columns_v[0].width),
        end_qk=end_qk,
        end_v=end_v,
        regions=tuple(
            RegionView(
                constant(r.name), r.offset, f"{r.bytes} B: {_region_text(roles, plan, r.name, code.query_values)}"
            )
            for r in roles.shared
        ),
        region_bytes={region.name: region.bytes for region in roles.shared},
        pipes=pipes_view(cluster_pipes_of(plan) if roles.cluster > 1 else backward_pipes_of(plan)),
        last_tile=(MAX_SEQLEN - 1) // plan.tile_m,
        dq_block_bytes=DQ_BLOCK_BYTES,
        swizzle=SWIZZLES[roles.box_bytes],
        preprocess_lines=_lines(plan, parts["preprocess"]),
        first_stored=first_stored(plan),
        cleared="dq_state" if first_stored(plan) else "dq_sum",
        cleared_chunks="state_chunks" if first_stored(plan) else "sum_chunks",
        lanes_of_row=row_lanes(plan.head_dim_v, out),
        chunks_of_row=plan.head_dim_v // out.chunk_elements,
        dqkv_lines=_lines(plan, parts["dqkv"]),
        uses_q_tiles=plan.varlen and "q_tiles" in spans,
        uses_whole_tiles="whole_tiles" in spans,
        by_head=_by_head(plan),
        span_lines=span.lines,
        visible_ranges=span.with_values(span.visible),
        full_ranges=span.with_values(span.full),
        word_lines=listed,
        work_reads=_work_reads(plan, steps) if roles.cluster == 1 else (),
        uses_kv_first="kv_first" in steps,
        uses_h="h" in steps,
        uses_q_first="q_first" in steps,
        positions=positions_name(plan),
        uses_packed=not (steps | spans | of_tiles).isdisjoint(("q_begin", "k_begin")),
        block_lines=code.block,
        partial=code.partial,
        full=code.full,
        visible=code.visible,
        exponent=code.exponent,
        weighted=code.weighted,
        kept=code.kept,
        tensor_sums=register_sums(dqkv),
        warp_sums=warp_sums(dqkv) if roles.cluster == 1 else None,
        tensor_tiles=tensor_tiles,
        query_values=code.query_values,
        distance_values=code.distance_values,
        biases=biases_of(plan),
        tables=fills(plan, code.tables),
        waits_for_loads=roles.cluster > 1 and plan.variant.dropout and reads_positions(plan.variant),
        factor_lines=factor_lines,
        factor=factor_text,
        store_rounds=_store_rounds(plan, roles) if roles.cluster == 1 and roles.stores_apart else (),
        uses_b=not plan.varlen or "b" in reads([*factor_lines, factor_text]),
        postprocess_lines=_lines(plan, postprocess) if postprocess else (),
        postprocess_uses_hk="hk" in reads([*dq_factor_lines, dq_factor]),
        dq_factor_lines=dq_factor_lines,
        dq_factor=dq_factor,
        classifier=_classifier(plan.of_launch(parts["classify_dqkv"])) if "classify_dqkv" in parts else None,
    )


def _store_rounds(plan: Plan, roles: HopperBackward) -> tuple[tuple[StoredColumns, ...], ...]:
    """Columns of dK and dV that leave together: as many as a consumer's part of dS of a step has room for, at
    most 64 of either, since rows of more are swizzled over several copies."""
    widths = (
        ("dk", roles.columns_of(plan.columns_qk), plan.head_dim_qk),
        ("dv", roles.columns_of(plan.columns_v), plan.head_dim_v),
    )  # fmt: skip
    rounds: list[list[StoredColumns]] = []
    left = 0
    for name, width, kept in widths:
        for first in range(0, width, KEYS_OF_CONSUMER):
            columns = min(KEYS_OF_CONSUMER, width - first)
            if columns > left:
                rounds.append([])
                left = plan.tile_m
            offset = (plan.tile_m - left) * KEYS_OF_CONSUMER * plan.operands.shared("dk", "dv").bytes
            rounds[-1].append(StoredColumns(name, first, columns, max(min(kept - first, columns), 0), offset))
            left -= columns
    return tuple(map(tuple, rounds))


def _region_text(roles: HopperBackward, plan: Plan, name: str, values: QueryValues | None) -> str:
    if roles.cluster > 1 and name == "dout":
        part = "a tile" if roles.parts_of(roles.columns_of(plan.columns_v)) == 1 else "half a tile"
        return f"dO, {part} per stage, then dV for its store"
    texts = _REGION_TEXTS | (_CLUSTER_TEXTS if roles.cluster > 1 else _APART_TEXTS if roles.stores_apart else {})
    return texts.get(name, "barriers").format(who=values.who if values else "")


def _lines(plan: Plan, part: Launch) -> tuple[str, ...]:
    own = {argument.of for argument in part.arguments if argument.of and argument.of.startswith("gradient:")}
    return argument_lines(plan, part.arguments, written=_WRITTEN[part.name] | own)


def _work_reads(plan: Plan, steps: frozenset[str]) -> tuple[str, ...]:
    """Fields of a work tile that expressions read."""
    given = () if plan.varlen else ("seqlen_q",)  # an argument of the kernel
    of_work = ("b", "hk", "q_begin", "k_begin", "seqlen_q", "seqlen_k")
    return tuple(name for name in of_work if name in steps and name not in given)


def _by_head(plan: Plan) -> bool:
    """Whether the queries that see a tile of keys are found for each head by itself."""
    return by_head(plan.variant) or plan.iteration == "tile_map"


def _classifier(plan: Plan) -> ClassifierView:
    own = plan.launch("classify_dqkv")
    return classifier_view(plan, own, classifier_lines(plan, own), QUERIES, classified_query_word)
