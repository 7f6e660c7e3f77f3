"""Plan → what the template of the forward by mma.sync is filled with: lines of code, no decision of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from attngen.lang.statements import Code, Statement, reads
from attngen.plan.model import Plan
from attngen.plan.schedules.structures import MmaForward
from attngen.render.biases import Bias
from attngen.render.classifier import ClassifierView, classifier_view
from attngen.render.cuda_arguments import argument_lines
from attngen.render.cuda_math import Sink, Steps, logits, queries
from attngen.render.cuda_tiles import classified_word, tiles, word
from attngen.render.expressions import KEYS
from attngen.render.header import command, summary
from attngen.render.pipes import constant
from attngen.render.views.hopper_forward import RegionView, classifier_lines
from attngen.render.views.mma_lines import count_of, fields, head_lines, inside, row_lines, sink_of, tile_lines

_FOLDER = "cuda/mma"
_REGION_TEXTS = {"q": "Q", "ring": "tiles of K and V in turn"}


@dataclass(frozen=True, slots=True)
class MmaView:
    """Everything that the template names beside the plan itself."""

    template: str
    visits: str  # parts: how the tiles of keys that rows see are span,
    softmax: str  # and what probabilities are measured from
    command: str
    summary: str
    headers: tuple[str, ...]
    regions: tuple[RegionView, ...]
    stage_bytes: int
    argument_lines: tuple[str, ...]
    rows_text: str
    head: str
    heads: str
    queries: Callable[[str], str]
    rows_left: str
    row_lines: Callable[[str], tuple[str, ...]]
    head_lines: Callable[[str], tuple[str, ...]]
    seqlen_q: str
    k_offset: str
    v_offset: str
    q_offset: str
    out_row: str
    lse_row: str
    uses_kv_tiles: bool
    uses_whole_tiles: bool
    uses_q_hi: bool
    words_use_q_hi: bool
    span_fields: tuple[str, ...]
    span_lines: tuple[Statement, ...]
    span_values: str
    spans_differ: bool  # from warp to warp
    count: str
    tile_lines: tuple[str, ...]
    whole: str
    seen: str
    word_lines: tuple[Statement, ...]
    work_lines: tuple[Statement, ...]
    partial: Steps
    full: Steps
    uses_kv: bool
    uses_q_first: bool
    kv_first: str
    logit_partial: str
    logit_comment: str
    multiplier: Code
    first_row_max: str
    sink: Sink | None
    classifier: ClassifierView | None
    biases: tuple[Bias, ...] = ()  # whose tiles come with those of K: none here


def mma_view(plan: Plan, template: str) -> MmaView:
    """Return the view of a plan."""
    forward = plan.structure
    assert isinstance(forward, MmaForward)
    span, code = tiles(plan), logits(plan)
    listed = word(plan).lines if plan.iteration != "ranges" else ()
    spans = reads([*span.lines, *span.values.values(), *listed])
    steps = reads([*code.partial.all, *code.full.all])
    kv_first = "tile * kBlockN + 2 * (lane % 4)"
    h = "h" if plan.pack_gqa else "work.h"
    left = "work.seqlen_q - work.q_start"
    own = "mine" if forward.skips else "all"
    return MmaView(
        template=template,
        visits=f"{_FOLDER}/visits/{'ranges' if plan.iteration == 'ranges' else 'words'}.cu.j2",
        softmax=f"{_FOLDER}/softmax/{plan.softmax}.cu.j2",
        command=command(plan),
        summary=summary(plan),
        headers=_headers(plan),
        regions=tuple(
            RegionView(constant(region.name), region.offset, f"{region.bytes} B: {_REGION_TEXTS[region.name]}")
            for region in forward.shared
        ),
        stage_bytes=forward.shared[-1].bytes // plan.stages,
        argument_lines=argument_lines(plan, plan.arguments),
        rows_text="rows of a tile of work: the heads of a group, then the next query"
        if plan.pack_gqa
        else "query rows of a tile of work",
        head="hk" if plan.pack_gqa else "h",
        heads="kv_heads" if plan.pack_gqa else "heads",
        queries=partial(queries, plan),
        rows_left=f"({left}) * group" if plan.pack_gqa else left,
        row_lines=partial(row_lines, plan),
        head_lines=partial(head_lines, plan),
        seqlen_q="work.seqlen_q" if plan.ragged_queries else "seqlen_q",
        k_offset=_keys_at(plan, "k"),
        v_offset=_keys_at(plan, "v"),
        q_offset=_row_at(plan, "q", h),
        out_row=f"(out_ptr + {_row_at(plan, 'out', h)})",
        lse_row=f"lse_ptr[{_lse_at(plan, h)}]",
        uses_kv_tiles="kv_tiles" in spans,
        uses_whole_tiles="whole_tiles" in spans,
        uses_q_hi="q_hi" in spans,
        words_use_q_hi="q_hi" in reads(listed),
        span_fields=tuple(f"{lo}, {hi}" for lo, hi in (*span.visible, *span.full)),
        span_lines=span.lines,
        span_values=", ".join(span.values[end].text for pair in (*span.visible, *span.full) for end in pair),
        spans_differ=forward.skips,
        count=count_of(fields(span.visible, "all")),
        tile_lines=tile_lines(fields(span.visible, "all"), "remaining - 1") if plan.iteration == "ranges" else (),
        whole=inside(fields(span.full, own)),
        seen=inside(fields(span.visible, own)),
        word_lines=listed,
        work_lines=code.work,
        partial=code.partial,
        full=code.full,
        uses_kv="kv_first" in steps,
        uses_q_first="q_first" in steps,
        kv_first=f"any_number({kv_first})" if code.drops_products else kv_first,
        logit_partial="partial",
        logit_comment="; pairs that are not visible get -inf" if plan.variant.masked else "",
        multiplier=code.multiplier,
        first_row_max="kFixedMax" if plan.softmax == "bounded" else "kUnseen",
        sink=sink_of(plan, code.work),
        classifier=_classifier(plan) if plan.has_launch("classify") else None,
    )


def _headers(plan: Plan) -> tuple[str, ...]:
    """The headers that a kernel needs."""
    variant = plan.variant
    needed = {
        "copy": True,
        "division": bool(plan.divisors),
        "dropout": variant.dropout,
        "expression": any((variant.masked, variant.score, variant.sink)),
        "mma": True,
        "pages": plan.key_access == "paged",
        "quad": True,
        "schedule": True,
        "softmax": True,
        "tile_map": plan.has_launch("classify"),
    }
    return tuple(name for name, used in needed.items() if used)


def _classifier(plan: Plan) -> ClassifierView:
    own = plan.launch("classify")
    return classifier_view(plan, own, classifier_lines(plan, own), KEYS, classified_word)


def _keys_at(plan: Plan, name: str) -> str:
    """Place of the first key of a sequence in k or v."""
    first = f"k_begin * stride_{name}_s" if plan.key_access == "ragged" else f"b * stride_{name}_b"
    return f"{first} + hk * stride_{name}_h"


def _row_at(plan: Plan, name: str, h: str) -> str:
    """Place of the row of the query ``q`` in q or out."""
    row = (
        f"(work.q_begin + q) * stride_{name}_s"
        if plan.ragged_queries
        else f"work.b * stride_{name}_b + q * stride_{name}_s"
    )
    return f"{row} + {h} * stride_{name}_h"


def _lse_at(plan: Plan, h: str) -> str:
    if plan.ragged_queries:
        return f"{h} * static_cast<long long>(total_q) + work.q_begin + q"
    return f"(work.b * static_cast<long long>(heads) + {h}) * seqlen_q + q"
