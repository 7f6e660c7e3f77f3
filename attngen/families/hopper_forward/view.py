"""Plan → what the templates of the CUDA forward name: facts, and lines of the user's mathematics."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from attngen.dtypes import V_GROUP, DType
from attngen.families.hopper_forward.entries import sharing_scalar
from attngen.families.hopper_forward.files import Parts, parts_of
from attngen.families.hopper_forward.kinds import kind_of_plan
from attngen.families.hopper_forward.pipes import forward_pipes_of
from attngen.families.hopper_forward.structure import HopperForward
from attngen.families.hopper_forward.tiles import place_bits
from attngen.lang.folding import LEAST_LOGIT
from attngen.lang.statements import Code, Statement, leaf, reads
from attngen.parts.boxes import BOX_BYTES, TRANSPOSED_BYTES, widest_box
from attngen.parts.regions import SWIZZLES, RegionView, classifier_lines
from attngen.plan.model import Plan
from attngen.plan.symbols import argument_name
from attngen.render.biases import Bias, biases_of
from attngen.render.classifier import ClassifierView, classifier_view
from attngen.render.cuda_arguments import argument_lines
from attngen.render.cuda_math import Sink, Steps, logits, queries, sink
from attngen.render.cuda_statements import int_constant, positions_name
from attngen.render.cuda_tiles import Ends, classified_word, tiles, word
from attngen.render.distance_values import DistanceValues, distance_values_of, taking_distance_values
from attngen.render.expressions import KEYS
from attngen.render.header import command, summary
from attngen.render.key_values import KeyValues, with_key_values
from attngen.render.pipes import PipesView, constant, pipes_view
from attngen.render.tables import Fill, fills

_REGION_TEXTS = {
    "q": "Q", "k": "K, a tile per stage", "v": "V, a tile per stage", "kv": "K or V, a tile per stage",
    "out": "O, for its store",
    "v_rows": "V as it lies in memory, a box per stage",
    "work": "two work tiles: the one that is loaded and the next", "tile_info": "which tile is in each stage of K",
    "key_values": "values of the keys of two tiles in each stage of K, which {who}",
    "distance_values": "values of the distances of two tiles in each stage of K, which the score reads",
    "biases": "tiles of biases that belong to a tile of K",
    "tables": "tables that the score reads, a copy for each consumer",
    "tile_scales": "scales of the tile in each stage of K, of its keys and of its values",
    "more_partials": "what partial results take beyond Q, K and V",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class CudaView:
    """Everything that the templates of kernels name beside the plan itself."""

    template: str
    parts: Parts
    command: str
    summary: str
    headers: tuple[str, ...]
    element: DType  # of p, and mostly of q, k and v
    regions: tuple[RegionView, ...]
    swizzle: int
    v_box_bytes: int
    v_swizzle: int
    region_bytes: Mapping[str, int]
    pipes: PipesView
    partials_room: int
    place_bits: int
    argument_lines: tuple[str, ...]
    uses_hk_in_spans: bool
    uses_kv_tiles: bool
    uses_whole_tiles: bool
    uses_q_hi: bool
    words_use_q_hi: bool
    visible_ranges: tuple[Ends, ...]
    full_ranges: tuple[Ends, ...]
    span_lines: tuple[Statement, ...]
    span_values: tuple[Code, ...]
    loader_reads: tuple[str, ...]  # of the record of a work tile
    word_lines: tuple[Statement, ...]
    queries: Callable[[str], str]
    head_dim_v_chunks: int
    later_columns: tuple[int, ...]
    work_lines: tuple[Statement, ...]
    key_values: KeyValues | None
    distance_values: DistanceValues | None
    biases: tuple[Bias, ...]
    sharing: str  # how many batch entries in a row share them, where a work tile has several
    tables: tuple[Fill, ...]
    tables_by_kv_head: bool
    partial: Steps
    full: Steps
    visible: Steps | None
    visible_uses_kv: bool
    uses_kv: bool
    drops_products: bool  # elements are numbered, but their products not read
    multiplier: Code
    cap_scale: Code | None
    least_logit: float | None  # to which a tile is bounded below
    positions: str | None  # the tensor that says where rows lie, by which random numbers are drawn
    sink: Sink | None
    classifier: ClassifierView | None


#: The values of the distance of an element.
_BY_DISTANCE = "of_distance({key} - 8 * {row})"


def cuda_view(plan: Plan, template: str) -> CudaView:
    """Return the view of a plan."""
    structure = plan.structure
    assert isinstance(structure, HopperForward)
    span, code = tiles(plan), logits(plan)
    listed = word(plan).lines if plan.iteration != "ranges" else ()
    partial_steps, full_steps, key_values = with_key_values(plan, code)
    by_key: list[Statement | Code] = [*key_values.work, *key_values.lines] if key_values else []
    distance_values = distance_values_of(plan, key_values.work if key_values else ())
    if distance_values:
        by_key += [*distance_values.work, *distance_values.lines, leaf("q_start"), leaf("seqlen_q")]
    found_biases = biases_of(plan)
    at_biases: list[Statement | Code] = [line for each in found_biases for line in each.lines]
    if found_biases:
        at_biases.append(leaf("q_start"))
    spans = reads([*span.lines, *span.values.values(), *listed])
    steps, seen = reads([*code.partial.all, *code.full.all]), reads(code.visible.all if code.visible else ())
    v_box = structure.box_bytes
    if structure.v_by_columns:
        among = TRANSPOSED_BYTES if structure.transposes else BOX_BYTES
        v_box = V_GROUP if plan.grouped_v else widest_box(plan.tile_n * plan.operands.v.bytes, among=among)
    work_lines = _work_lines(plan, reads(code.work) | steps | seen, code.work)
    return CudaView(
        template=template,
        parts=parts_of(plan, structure),
        command=command(plan),
        summary=summary(plan),
        headers=_headers(plan, structure, bounds=code.falls),
        element=plan.operands.p,
        regions=tuple(
            RegionView(constant(region.name), region.offset, _region_text(region.name, region.bytes, key_values))
            for region in structure.shared
        ),
        swizzle=SWIZZLES[structure.box_bytes],
        v_box_bytes=v_box,
        v_swizzle=SWIZZLES[v_box],
        region_bytes={region.name: region.bytes for region in structure.shared},
        pipes=pipes_view(forward_pipes_of(plan)),
        partials_room=_room(structure),
        place_bits=place_bits(structure.end_alignment or structure.block_keys or plan.tile_n),
        argument_lines=argument_lines(plan, plan.arguments),
        uses_hk_in_spans="hk" in spans and not plan.pack_gqa,
        uses_kv_tiles="kv_tiles" in spans,
        uses_whole_tiles="whole_tiles" in spans,
        uses_q_hi="q_hi" in spans,
        words_use_q_hi="q_hi" in reads(listed),
        visible_ranges=span.visible,
        full_ranges=span.full,
        span_lines=span.lines,
        span_values=span.ends,
        loader_reads=_loader_reads(plan, [*listed, *by_key, *at_biases]),
        word_lines=listed,
        queries=partial(queries, plan),
        head_dim_v_chunks=plan.head_dim_v // plan.operands.out.chunk_elements,
        later_columns=tuple(range(structure.out_columns, plan.columns_v[0].width, structure.out_columns)),
        work_lines=work_lines,
        key_values=key_values,
        distance_values=distance_values,
        biases=found_biases,
        sharing=_sharing(plan, structure),
        tables=(filled := fills(plan, code.tables)),
        tables_by_kv_head="hk" in reads(line for each in filled for line in each.lines),
        partial=taking_distance_values(partial_steps, distance_values, _BY_DISTANCE),
        full=taking_distance_values(full_steps, distance_values, _BY_DISTANCE),
        visible=code.visible,
        visible_uses_kv="kv_first" in seen,
        uses_kv="kv_first" in steps,
        drops_products=code.drops_products,
        multiplier=leaf("multiplier") if plan.scale_block > 0 and plan.variant.score is None else code.multiplier,
        cap_scale=code.cap_scale,
        least_logit=float(LEAST_LOGIT.value) if code.falls else None,
        sink=sink(plan, work_lines),
        positions=positions_name(plan),
        classifier=_classifier(plan) if plan.has_launch("classify") else None,
    )


def _sharing(plan: Plan, forward: HopperForward) -> str:
    """The argument that says how many batch entries share biases."""
    scalar = sharing_scalar(plan.variant, forward.bias_bytes) if forward.entries > 1 else None
    return argument_name(scalar) if scalar else ""


def _headers(plan: Plan, forward: HopperForward, *, bounds: bool) -> tuple[str, ...]:
    """The headers that a kernel needs."""
    variant, kind = plan.variant, kind_of_plan(plan)
    needed = {
        "biases": forward.biases > 0,
        "cluster": forward.shares,
        "division": bool(plan.divisors),
        "dropout": variant.dropout,
        "entries": forward.entries > 1,
        "expression": any((variant.masked, variant.score, variant.sink)),
        "least_logit": bounds,
        "own_rings": forward.map_rows > 0,
        "pages": plan.key_access == "paged",
        "pdl": True,
        "powers": forward.takes_powers,
        "quad": not (forward.staged or forward.transposes or forward.shares),
        "ring": True,
        "row_parts": forward.cuts,
        "schedule": True,
        **({kind.header: True} if kind.header else {}),
        "soft_cap": forward.capped,
        "tables": forward.table_bytes > 0,
        "softmax": True,
        "split": forward.shares,
        "tile_map": plan.has_launch("classify"),
        "tma": True,
        "transpose": forward.transposes,
        "keys": plan.transposed_v and not plan.grouped_v,
        "value_scale": plan.block_scales,
        "wgmma": True,
    }
    return tuple(name for name, used in needed.items() if used)


def _classifier(plan: Plan) -> ClassifierView:
    own = plan.launch("classify")
    return classifier_view(plan, own, classifier_lines(plan, own), KEYS, classified_word)


def _room(structure: HopperForward) -> int:
    """Return the bytes of shared memory that partial results may take: those of Q, K and V, and of a region beside."""
    return sum(region.bytes for region in structure.shared if region.name in ("q", "k", "v", "more_partials"))


def _region_text(name: str, size: int, key_values: KeyValues | None) -> str:
    text = _REGION_TEXTS.get(name, "barriers").format(who=key_values.who if key_values else "")
    return f"{size} B: {text}"


def _work_lines(plan: Plan, read: Collection[str], own: Sequence[Statement]) -> tuple[Statement, ...]:
    """Return the statements that name what expressions read of a work tile, before those of their ``own``."""
    assert isinstance(plan.structure, HopperForward)
    lines = [int_constant("seqlen_k", "{work.seqlen_k}")] if plan.structure.entries == 1 else []
    if plan.ragged_queries and "seqlen_q" in read:
        lines.append(int_constant("seqlen_q", "{work.seqlen_q}"))
    own_head, other_head = ("hk", "h") if plan.pack_gqa else ("h", "hk")
    for name in ("b", own_head, "q_begin", "k_begin"):
        if name in read or (name == own_head and other_head in read):
            lines.append(int_constant(name, f"{{work.{name}}}"))
    if "hk" in read and not plan.pack_gqa:
        lines.append(int_constant("hk", "{h} / {group}"))
    if "q_first" in read:
        own_row = "" if plan.pack_gqa else " + {row_in_group}"
        rows = queries(plan, "64 * {warpgroup}")
        lines.append(int_constant("q_first", f"{{work.q_start}} + {rows}{own_row}"))
    return (*lines, *own)


def _loader_reads(plan: Plan, listed: Sequence[Statement | Code]) -> tuple[str, ...]:
    """Fields of a work tile that the loader of K and V reads."""
    read = (
        reads(listed)
        | ({"b"} if plan.scale_block else set())
        | {"tiles", "seqlen_k", "k_begin" if plan.key_access == "ragged" else "b"}
    )
    if "q_hi" in read:
        read |= {"q_start", "seqlen_q"}
    if plan.iteration != "ranges":
        read |= {"visible_hi"}
    if plan.structure.map_rows:
        read = read - {"tiles"} | {"q_start", "seqlen_q"}
    if plan.pack_gqa:
        read |= {"hk"}
    assert isinstance(plan.structure, HopperForward)
    if plan.structure.splits_keys:
        read |= {"behind"} | ({"every"} if plan.structure.whole_first or plan.iteration != "ranges" else set())
    head = "hk" if plan.pack_gqa else "h"
    names = ("b", head, "q_start", "tiles", "q_begin", "k_begin", "seqlen_q", "seqlen_k", "visible_lo", "visible_hi",
             "every", "behind")  # fmt: skip
    passed = () if plan.ragged_queries else ("seqlen_q",)  # an argument of the kernel
    return tuple(name for name in names if name not in passed and name in read)
