"""Plan → what the templates of kernels that score keys and select the best are filled with."""

from __future__ import annotations

from dataclasses import dataclass

from attngen.dtypes import SWIZZLE_BYTES
from attngen.families.index_scores.blocks import MAXIMA
from attngen.families.index_scores.schedule import SUMS, tiles_of
from attngen.lang.bands import classify
from attngen.lang.ir import names
from attngen.lang.simplify import FALSE
from attngen.lang.statements import Code, Statement, depending, reads, written
from attngen.operations import BLOCK_SCORES, INDEX_SCORES
from attngen.plan.model import Launch, Plan
from attngen.plan.symbols import divisor_name
from attngen.render.cuda_arguments import argument_lines
from attngen.render.cuda_math import element_bindings
from attngen.render.cuda_statements import int_constant, int_constants, number_queries
from attngen.render.cuda_tiles import tiles, with_corners
from attngen.render.expressions import CUDA, KEYS, corner_bindings, emit_for, facts_of
from attngen.render.header import command


@dataclass(frozen=True, slots=True)
class ScoreParts:
    """Files of the parts in which reductions differ, and the headers that they need."""

    about: str
    memory: str
    chunks: str
    hidden: str
    consumer: str
    headers: tuple[str, ...]


def _parts(folder: str, *headers: str) -> ScoreParts:
    files = {
        name: f"cuda/index_scores/{folder}/{name}.cu.j2" for name in ("about", "memory", "chunks", "hidden", "consumer")
    }
    return ScoreParts(**files, headers=("index.cuh", *headers))


#: By the direction of kernels.
_PARTS = {INDEX_SCORES: _parts("heads"), BLOCK_SCORES: _parts("blocks", "maxima.cuh")}

#: What a source says of itself.
_SUMMARIES = {
    INDEX_SCORES: "Index scores of keys, variant {variant}: {does}.",
    BLOCK_SCORES: "Scores of blocks of keys, variant {variant}: {does}.",
}

#: By the direction of kernels, too.
_REDUCTIONS = {each.direction: each for each in (SUMS, MAXIMA)}


@dataclass(frozen=True, slots=True)
class IndexScoresLaunch:
    """One launch of a kernel that scores keys: its tile, and what a block takes."""

    symbol: str
    text: str
    argument_lines: tuple[str, ...]
    heads: int
    queries: int
    groups: int
    stages: int
    threads: int
    blocks: int
    shared_bytes: int


@dataclass(frozen=True, slots=True)
class IndexScoresView:
    """Everything that the template of index scores names beside the plan itself."""

    template: str
    command: str
    summary: str
    parts: ScoreParts
    uses_expressions: bool
    searches: bool
    box_bytes: int
    swizzle: int  # as descriptors of wgmma number it
    parameter_lines: tuple[str, ...]  # of the function that all launches share
    passed_lines: tuple[str, ...]
    uses_q_begin: bool
    uses_k_begin: bool
    divisors: tuple[str, ...]
    uses_kv_tiles: bool
    uses_whole_tiles: bool
    span_lines: tuple[Statement, ...]
    hoisted: tuple[Statement, ...]  # of the mask, what neither query nor key changes
    mask_lines: tuple[Statement, ...]
    visible: Code
    whole_lines: tuple[Statement, ...]  # whether all queries of a block see all keys of a tile
    whole: Code
    launches: tuple[IndexScoresLaunch, ...]


def index_scores_view(plan: Plan, template: str) -> IndexScoresView:
    """View of a plan that scores keys for an index."""
    variant = plan.variant
    span = tiles(plan)
    masked = emit_for(plan, CUDA, [variant.mask], element_bindings(plan, ragged=True))
    (visible,) = masked.results
    of_query, hoisted = depending(masked.hoisted, ("q_row", "q_pos", "q_packed"))
    lines = [*of_query, *masked.body]
    numbered = number_queries(reads([*lines, visible]))
    if "kv_packed" in reads([*lines, visible]):
        numbered.append(int_constant("kv_packed", "{k_begin} + {kv}"))
    whole_lines, whole = _whole(plan) if plan.direction == BLOCK_SCORES else ((), Code("false"))
    of_span = reads([*span.lines, *span.values.values(), *whole_lines, whole])
    read = of_span | reads([*hoisted, *numbered, *lines, visible])
    parameters = argument_lines(plan, plan.arguments, written={"out"})
    box_bytes = min(plan.head_dim_qk * plan.operands.q.bytes, SWIZZLE_BYTES)
    return IndexScoresView(
        template=template,
        command=command(plan),
        summary=_SUMMARIES[plan.direction].format(variant=variant.name, does=_REDUCTIONS[plan.direction].does),
        parts=_PARTS[plan.direction],
        uses_expressions=variant.masked,
        searches=any("first_at_least(" in line.text for line in [*span.lines, *hoisted, *lines]),
        box_bytes=box_bytes,
        swizzle={128: 1, 64: 2}[box_bytes],
        parameter_lines=tuple(line.replace("__grid_constant__ TensorMap ", "TensorMap& ") for line in parameters),
        passed_lines=_passed(parameters),
        uses_q_begin="q_begin" in read,
        uses_k_begin="k_begin" in read,
        divisors=tuple(map(divisor_name, plan.divisors)),
        uses_kv_tiles="kv_tiles" in of_span,
        uses_whole_tiles="whole_tiles" in of_span,
        span_lines=span.lines,
        hoisted=tuple(hoisted),
        mask_lines=(*numbered, *lines),
        visible=visible,
        whole_lines=tuple(whole_lines),
        whole=whole,
        launches=tuple(_index_scores_launch(plan, launch) for launch in plan.launches),
    )


def _whole(plan: Plan) -> tuple[tuple[Statement, ...], Code]:
    """The lines and the condition under which the mask hides no pair of a block's queries and a tile's keys."""
    _, must = classify(plan.variant.mask, facts_of(plan), plan.box_heads)
    if must == FALSE:
        return (), Code("false")
    code = emit_for(plan, CUDA, [must], corner_bindings(plan, CUDA, KEYS), prefix="tiles_", inner="kv")
    lines = []
    if {"kv_lo", "kv_hi"} & names(must):
        lines.append(int_constants({"kv_lo": "{candidate} * kBlockN", "kv_hi": "{kv_lo} + (kBlockN - 1)"}))
    whole = written("({}) && ({candidate} + 1) * kBlockN <= {seqlen_k}", code.results[0])
    return with_corners([*lines, *code.hoisted], [whole]), whole


def _passed(parameters: tuple[str, ...]) -> tuple[str, ...]:
    """Names of parameters, in the same lines."""
    return tuple(
        ", ".join(part.split()[-1] for part in line.removesuffix(",").split(",")) + "," * line.endswith(",")
        for line in parameters
    )


def _index_scores_launch(plan: Plan, launch: Launch) -> IndexScoresLaunch:
    tile = tiles_of(_REDUCTIONS[plan.direction], plan.head_dim_qk, plan.operands.q.bytes, plan.arch.shared_memory)[
        launch.name
    ]
    many = "Few queries" if tile.groups == 1 else "Many queries"
    return IndexScoresLaunch(
        symbol=launch.symbol,
        text=f"{many}, at most {tile.heads} heads.",
        argument_lines=argument_lines(plan, launch.arguments, written={"out"}),
        heads=tile.heads,
        queries=tile.queries,
        groups=tile.groups,
        stages=tile.stages,
        threads=32 * tile.warps,
        blocks=tile.blocks,
        shared_bytes=launch.shared_bytes,
    )
