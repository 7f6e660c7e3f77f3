"""The user's mathematics in a CUDA backward: probabilities with the derivatives of their logits, and what sees a tile.

A block keeps keys and goes along the queries. A lane holds elements of two keys, its rows, whose columns are queries.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from attngen.lang.emit import Binding
from attngen.lang.folding import (
    KV_FIRST,
    POSITION_FIRST,
    PRODUCT,
    Q_FIRST,
    Q_POS_FIRST,
    QUERY,
    fold_variant,
    is_finite,
    split_queries,
)
from attngen.lang.ir import POSITION, Expr, names
from attngen.lang.simplify import FALSE, TRUE
from attngen.lang.statements import Code, Statement, declared, depending, leaf, needed, reads, statement, written
from attngen.plan.model import Plan
from attngen.plan.own_gradients import derivative
from attngen.plan.symbols import pointer_name
from attngen.render.biases import bias_bindings, go_beyond_queries, lookup_bindings, with_biases, with_lookups
from attngen.render.cuda_masking import bit_of, corners_of_block, hide, masking, row_values
from attngen.render.cuda_math import (
    ScoreValue,
    Steps,
    distance_score_values,
    held_entries,
    score_lines,
    score_values,
    with_score_values,
)
from attngen.render.cuda_statements import (
    SCALE,
    constant,
    int_constant,
    int_constants,
    number_queries,
    position_of,
    row_shift,
    words_of_map,
    words_of_votes,
)
from attngen.render.cuda_tiles import TileBounds, with_corners
from attngen.render.distance_values import DistanceValues, distance_values_of, taking_distance_values
from attngen.render.expressions import CUDA, QUERIES, emit_for, scalar_bindings, start_bindings
from attngen.render.key_values import HELD, fields_of, taken
from attngen.render.tables import SharedTable, placed, with_tables
from attngen.render.tensor_gradients import weighted, weighted_slope, weights
from attngen.render.tile_values import BINDINGS, RANGES, once_for_tile

_Q, _KV = frozenset({"q"}), frozenset({"kv"})
_ROW_NAMES = ("kv", "kv_packed", "row")
_COLUMN_NAMES = ("q_row", "q_pos", "q_packed", "position")
#: Number of an element of a lane in its word of bits, by the loops over these.
_ELEMENT = "4 * ({i} % 8) + 2 * {row} + {j}"
_HIDE_BY_BITS = statement(f"if (!({{visible}}[{{i}} / 8] >> ({_ELEMENT}) & 1)) {{x}} = kMasked;")
#: The queries of a sequence from the first one of a lane on, and what hides elements of others.
_QUERIES_LEFT = int_constant("queries_left", "{seqlen_q} - {q_first}")
_HIDE_BEYOND = statement("if (8 * {i} + {j} >= {queries_left}) {x} = kMasked;")
#: Names that differ from step to step; all else comes from arguments of the kernel.
_VARYING = (
    *_ROW_NAMES, "kv_first", "q_first", "q_pos_first", "position_first", "b", "h", "hk", "q_begin", "k_begin",
    "seqlen_q", "seqlen_k",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class QueryValues:
    """The values of a query that ``who``, mask or score, reads or computes, each with the type that it is held in, and
    the lines that find them for the query ``q_row``: these come with a tile of Q. ``loads``: the lines load."""

    who: str
    fields: tuple[tuple[str, str], ...]
    lines: tuple[Statement, ...]
    loads: bool


@dataclass(frozen=True, slots=True)
class ProbabilitySteps:
    """Conversion of products to probabilities: the steps of partial and of full tiles, and the argument of ``exp2``.

    dK and dQ are multiplied by ``factor`` at the end: what all pairs share of the derivative of the logit by the
    product. ``weighted`` is the probability times the rest of it, which elements call ``derivative``; None without.
    ``kept`` are other products of the probability, by the arrays that hold them until dP is there.
    ``visible``: the steps that evaluate the mask of a partial tile into bits, where it is applied by these; else None.
    """

    block: tuple[Statement, ...]
    partial: Steps
    full: Steps
    exponent: Code
    factor: Expr
    weighted: Code | None
    kept: tuple[tuple[str, Code], ...]
    query_values: QueryValues | None
    distance_values: DistanceValues | None
    visible: Steps | None
    tables: tuple[SharedTable, ...]  # of which consumers hold copies


def probabilities(plan: Plan) -> ProbabilitySteps:
    """Return the lines of a step."""
    variant = plan.variant
    logit = fold_variant(variant, fast_math=plan.fast_math, by_position=True)
    slope = weighted_slope(plan, derivative(variant, fast_math=plan.fast_math))
    kept = weights(plan)
    of_query, of_distance = score_values(plan), distance_score_values(plan)
    derivatives = [*([] if slope.varying is None else [slope.varying]), *(varying for _, varying in kept)]
    (value, *derivatives), shared_tables = with_tables(
        plan, [logit.value, *derivatives], (each.expr for each in of_distance)
    )
    value = once_for_tile(plan, with_score_values(value, [*of_query, *of_distance]))
    derivatives = [once_for_tile(plan, each) for each in derivatives]
    shared_tables = tuple(each.with_values(lambda place: once_for_tile(plan, place)) for each in shared_tables)
    value = split_queries(value) if plan.fast_math else value
    if plan.fast_math and slope.varying is not None:  # as the score, so that both share what they compute
        derivatives[0] = split_queries(derivatives[0])
    roots = [with_biases(plan, value), logit.multiplier, *(with_biases(plan, each) for each in derivatives)]
    block: dict[Statement, None] = {}  # statements that are the same for all steps
    both: list[Steps] = []
    distances = distance_values_of(plan, ())
    multiplier = leaf("scale_log2e")
    for partial in (True, False):
        bound = _elements(plan) | BINDINGS | {each.symbol.name: Binding(each.name, _Q) for each in of_query}
        bound |= {each.symbol.name: Binding(each.name, _Q | _KV) for each in of_distance}
        biased, asked = with_lookups(plan, roots)
        entries = held_entries(plan, asked, bound, lane="lane_of_warp()", inner="q")
        bound |= lookup_bindings(plan, asked, "2 * {i} + {j}")
        # a place in a table is inside of it, whatever the query
        before, places = placed(plan, shared_tables, bound | {"q": Binding("q_any", _Q)}, inner="q")
        bound |= {each.symbol.name: each.binding for each in shared_tables}
        scored = emit_for(plan, CUDA, biased, bound, inner="q", taken=declared([*before, *places]), ranges=RANGES)
        entries = [*entries, *before]
        hoisted, body = [*entries, *(each for each in scored.hoisted if each not in entries)], [*places, *scored.body]
        if slope.varying is not None:
            body.append(constant("float", "derivative", scored.results[2]))
        for (number, _), result in zip(kept, scored.results[len(scored.results) - len(kept) :], strict=True):
            body.append(constant("float", f"weight_{number}", result))
        if variant.score is not None:
            body.append(statement("{x} = {};", scored.results[0]))
        if partial and plan.mask_words:
            body.append(_HIDE_BY_BITS)
        elif partial:
            mask = masking(plan, bound, declared([*hoisted, *body]), key="8 * {row}", along=QUERIES)
            hoisted += [each for each in mask.hoisted if each not in hoisted]
            body = [*mask.body, *mask.ends, *body, hide(mask.hidden)]
        if partial and (of_distance or go_beyond_queries(plan)):  # there a value of a distance may be anything
            hoisted.append(_QUERIES_LEFT)
            body.append(_HIDE_BEYOND)
        moving, once = depending(hoisted, _VARYING)
        block |= dict.fromkeys(once)
        steps = _steps(plan, moving, body, {each.name for each in of_distance})
        steps = replace(steps, costly=mask.costly if partial and not plan.mask_words else ())
        steps = replace(steps, key=(*_taken(of_query), *steps.key))
        both.append(taking_distance_values(steps, distances, "of_distance({row}, 8 * {i} + {j})"))
        if variant.score is not None:
            multiplier = scored.results[1]
    if variant.score is None:
        block = {SCALE: None, **block}
    partial_steps, query_values = _with_query_values(plan, both[0], tuple(block))
    return ProbabilitySteps(
        block=tuple(block),
        partial=partial_steps,
        full=both[1],
        exponent=_exponent(multiplier),
        factor=slope.factor,
        weighted=_weighted(slope.varying),
        kept=tuple((f"p_weighted_{number}", weighted(number, varying)) for number, varying in kept),
        query_values=query_values,
        distance_values=distances,
        visible=_visible(plan) if plan.mask_words else None,
        tables=shared_tables,
    )


def _visible(plan: Plan) -> Steps:
    """Return the steps that evaluate the mask of a partial tile into ``bits``."""
    mask = masking(plan, _elements(plan) | corners_of_block(plan), (), key="8 * {row}", along=QUERIES)
    return _steps(plan, mask.hoisted, [*mask.body, *mask.ends, bit_of(mask.hidden, _ELEMENT)])


def _with_query_values(plan: Plan, steps: Steps, block: Sequence[Statement]) -> tuple[Steps, QueryValues | None]:
    """Return the steps of a partial tile that take the values of queries from where their loader put them, and how they
    come there; the same steps, and None, if the plan has no room for them. ``block``: lines before all steps."""
    if not plan.structure.query_values:
        return steps, None
    if of_score := score_values(plan):
        return steps, _query_values_of_score(plan, of_score)
    before = {name for each in steps.tile if each.type == "const auto*" for name in each.names}
    loaded = before | {pointer_name(tensor.name) for tensor in plan.variant.tensors}
    divided = {*steps.costly[: plan.structure.query_values]}
    by_query = [
        each
        for each in steps.key
        if each.type in HELD and ({*each.names} & divided if divided else each.reads & loaded)
    ]
    assert len(by_query) == plan.structure.query_values, f"{plan.name}: other loads than planned"
    others = [each for each in steps.key if not {*each.names} & {*_COLUMN_NAMES} and each not in by_query]
    lines = (*needed(others, by_query), *by_query)
    tile = needed(steps.tile, lines)
    shared = needed(block, [*tile, *lines]) if divided else ()
    values = QueryValues("mask", fields_of(by_query), (*shared, *tile, *_numbers(plan, lines), *lines), not divided)
    key = [each for each in steps.key if each not in by_query]
    used = needed([*taken("of_query(8 * {i} + {j})", declared(by_query)), *key], steps.element)
    tile = needed(steps.tile, [*steps.row, *used, *steps.element])
    return replace(steps, tile=tile, key=used), values


def _query_values_of_score(plan: Plan, values: Sequence[ScoreValue]) -> QueryValues:
    """Return the values of a query that the score reads."""
    shared, lines, of_score = score_lines(plan, values, _elements(plan), (), inner="q")
    return QueryValues("score", fields_of(of_score), (*shared, *_numbers(plan, lines), *lines), True)


def _numbers(plan: Plan, lines: Iterable[Statement]) -> list[Statement]:
    """Return the statements that number a query in other ways than by its row, where a loader has one for each lane."""
    read = reads(lines)
    return number_queries(read, position_of(plan, "q_row") if "position" in read else "")


def _taken(values: Iterable[ScoreValue]) -> list[Statement]:
    """Return the line that takes values of the score from where they were put for a query."""
    return taken("of_query(8 * {i} + {j})", [each.name for each in values])


def _weighted(slope: Expr | None) -> Code | None:
    """Return the probability times the derivative of its logit; zero times infinity is not zero, so it is selected."""
    if slope is None:
        return None
    return written("{x} * {derivative}" if is_finite(slope) else "{x} != 0.0f ? {x} * {derivative} : 0.0f")


def _exponent(multiplier: Code) -> Code:
    """Return the logarithm of a probability."""
    lse = written("({j} == 0 ? {lse.x} : {lse.y})")
    return written("{x} - {}", lse) if multiplier.text == "1.0f" else written("fmaf({x}, {}, -{})", multiplier, lse)


def factor(plan: Plan, expr: Expr) -> tuple[tuple[Statement, ...], Code]:
    """Return the factor of dK and dQ, and the statements that it needs."""
    code = emit_for(plan, CUDA, [expr], scalar_bindings(plan, CUDA))
    return (*code.hoisted, *code.body), code.results[0]


def _steps(plan: Plan, hoisted: Sequence[Statement], body: Sequence[Statement], per_pair: Iterable[str] = ()) -> Steps:
    """Return the statements of a tile, each where it runs least often: for the tile, a key, a query, or each pair;
    ``per_pair`` names values that come with the distance of a pair."""
    row, tile = depending(hoisted, _ROW_NAMES)
    own = [name for name in declared(body) if name.startswith("weight_")]
    element, column = depending(body, {"x", "derivative", *own, *per_pair, *_ROW_NAMES, *declared(row)})
    column, row = needed(column, element), needed(row, element)
    row = (*_key_lines(reads([*row, *element])), *row)
    tile = needed(tile, [*row, *column, *element])
    if "q_pos_first" in reads([*tile, *row, *element]):
        tile = (int_constant("q_pos_first", "{q_first} + ({seqlen_k} - {seqlen_q})"), *tile)
    if "position_first" in reads([*tile, *row, *element]):
        tile = (int_constant("position_first", "{q_first} + {row_shift}"), *tile)
    key = (*_query_lines(reads([*column, *element])), *column)
    if "row_shift" in reads([*tile, *key]):
        tile = (*row_shift(plan), *tile)
    return Steps(tile=tile, row=row, row_values=row_values(row, element), key=key, element=element)


def _elements(plan: Plan) -> dict[str, Binding]:
    """Return the bindings of a pair. Queries and keys beyond the end repeat the last one, so that loads stay inside."""
    rows = {
        "q": Binding("q_row", _Q, below=frozenset({"seqlen_q"})),
        "q_pos": Binding("q_pos", _Q, below=frozenset({"seqlen_k"})),
        "q_global": Binding("q_packed", _Q, below=frozenset({"total_q"})),
        POSITION.name: Binding("position", _Q),
        "kv": Binding("kv", _KV, below=frozenset({"seqlen_k", "total_k"})),
        "kv_global": Binding("kv_packed", _KV, below=frozenset({"seqlen_k", "total_k"})),
        PRODUCT.name: Binding("x", _Q | _KV),
        KV_FIRST.name: Binding("kv_first"),
        Q_FIRST.name: Binding("q_first"),
        Q_POS_FIRST.name: Binding("q_pos_first"),
        POSITION_FIRST.name: Binding("position_first"),
        QUERY.name: Binding("8 * {i} + {j}", _Q),
        **bias_bindings(plan, "2 * {i} + {j}"),
        **start_bindings(),
    }
    return scalar_bindings(plan, CUDA) | rows


def _key_lines(read: frozenset[str]) -> list[Statement]:
    lines = []
    if read & {"kv", "kv_packed"}:
        nearest = "min({kv_first} + 8 * {row}, {seqlen_k} - 1)"
        lines.append(int_constant("kv", nearest, comment="keys after the end repeat the last one"))
    if "kv_packed" in read:
        lines.append(int_constant("kv_packed", "{k_begin} + {kv}"))
    return lines


def _query_lines(read: frozenset[str]) -> list[Statement]:
    lines = []
    if not read.isdisjoint(_COLUMN_NAMES):
        nearest = "min({q_first} + 8 * {i} + {j}, {seqlen_q} - 1)"
        lines.append(int_constant("q_row", nearest, comment="rows after the end repeat the last one"))
    if "q_any" in read:
        lines.append(int_constant("q_any", "{q_first} | 8 * {i} + {j}"))
    return lines + number_queries(read, "{q_row} + {row_shift}")


# --- which queries see a tile of keys -----------------------------------------------------------------------


def query_word(plan: Plan) -> tuple[Statement, ...]:
    """Return the statements that make the bits of 32 tiles: from the tile map, or by classifying them in the kernel."""
    if plan.iteration == "tile_map":
        return words_of_map("{kv_tile} * {stride_tile_map_kv}")
    return classified_query_word(plan)


def classified_query_word(plan: Plan, by: TileBounds | None = None) -> tuple[Statement, ...]:
    """Return the statements that make the bits of 32 tiles by their bounds."""
    along = replace(QUERIES, keys="kMapRows") if plan.structure.map_rows else QUERIES
    code, may, must = (by or TileBounds(plan.variant.mask)).emitted(plan, along)
    asked = names(may) | names(must)
    lines = [int_constant("candidate", "32 * {word} + {lane}")]
    if asked & {"q_lo", "q_hi", "q_pos_lo", "q_pos_hi"}:
        lines.append(int_constants({"q_lo": "{candidate} * kBlockM", "q_hi": "{q_lo} + (kBlockM - 1)"}))
    if asked & {"q_pos_lo", "q_pos_hi"}:
        shift = " + ({seqlen_k} - {seqlen_q})"
        lines.append(int_constants({"q_pos_lo": "{q_lo}" + shift, "q_pos_hi": "{q_hi}" + shift}))
    inside = written("{candidate} >= {visible_lo} && {candidate} < {visible_hi}")
    # the tile in which queries end is partial, if it is visible at all
    behind = written("({candidate} + 1) * kBlockM > {seqlen_q}")
    seen = inside if may == TRUE else written("{} && (({}) || {})", inside, code.results[0], behind)
    whole = Code("false") if must == FALSE else written("({}) && !({})", code.results[1], behind)
    if by is not None and must != FALSE:  # a map says so only of whole tiles of keys
        whole = written(f"{{}} && {{kv_start}} + {along.keys or 'kBlockN'} <= {{seqlen_k}}", whole)
    return with_corners([*lines, *code.hoisted, *code.body, *words_of_votes(seen, whole)], along=along)
