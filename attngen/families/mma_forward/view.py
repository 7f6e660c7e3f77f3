"""Plan → what the templates of the forward by mma.sync name: facts, and lines of the user's mathematics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from attngen.families.mma_forward.structure import MmaForward
from attngen.lang.statements import Code, Statement, reads
from attngen.parts.regions import RegionView, classifier_lines
from attngen.plan.model import Plan
from attngen.render.biases import Bias
from attngen.render.classifier import ClassifierView, classifier_view
from attngen.render.cuda_arguments import argument_lines
from attngen.render.cuda_math import Sink, Steps, logits, queries, sink
from attngen.render.cuda_tiles import Ends, by_warp, classified_word, tiles, word
from attngen.render.expressions import KEYS
from attngen.render.header import command, summary
from attngen.render.key_values import KeyValues, with_key_values
from attngen.render.pipes import constant

_FOLDER = "cuda/mma_forward"
_REGION_TEXTS = {
    "q": "Q",
    "ring": "tiles of K and V in turn",
    "p": "P of a tile, warp after warp, as their lanes hold it",
    "factors": "two rows' factors of each lane",
    "key_values": "values of the keys of tiles under way, which {who}",
}


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
    queries: Callable[[str], str]
    uses_kv_tiles: bool
    uses_whole_tiles: bool
    uses_q_hi: bool
    words_use_q_hi: bool
    visible_ranges: tuple[Ends, ...]
    full_ranges: tuple[Ends, ...]
    span_lines: tuple[Statement, ...]
    span_values: tuple[Code, ...]
    word_lines: tuple[Statement, ...]
    work_lines: tuple[Statement, ...]
    partial: Steps
    full: Steps
    key_values: KeyValues | None
    uses_kv: bool
    uses_q_first: bool
    drops_products: bool  # elements are numbered, but their products not read
    multiplier: Code
    sink: Sink | None
    classifier: ClassifierView | None
    biases: tuple[Bias, ...] = ()  # whose tiles come with those of K: none here


def mma_view(plan: Plan, template: str) -> MmaView:
    """Return the view of a plan."""
    forward = plan.structure
    assert isinstance(forward, MmaForward)
    span, code = tiles(plan), logits(plan)
    listed = () if plan.iteration == "ranges" else word(plan).lines
    ranges = plan.iteration == "ranges"
    span_lines = by_warp(span.lines) if ranges else span.lines
    spans = reads([*span.lines, *span.values.values(), *listed])
    steps = reads([*code.partial.all, *code.full.all])
    partial_steps, full_steps, values = with_key_values(plan, code)
    return MmaView(
        template=template,
        visits=f"{_FOLDER}/visits/{'ranges' if plan.iteration == 'ranges' else 'words'}.cu.j2",
        softmax=f"{_FOLDER}/softmax/{plan.softmax}.cu.j2",
        command=command(plan),
        summary=summary(plan),
        headers=_headers(plan, searches="first_at_least" in spans and ranges),
        regions=tuple(
            RegionView(constant(region.name), region.offset, f"{region.bytes} B: {_region_text(region.name, values)}")
            for region in forward.shared
        ),
        stage_bytes=next(region.bytes for region in forward.shared if region.name == "ring") // plan.stages,
        argument_lines=argument_lines(plan, plan.arguments),
        queries=partial(queries, plan),
        uses_kv_tiles="kv_tiles" in spans,
        uses_whole_tiles="whole_tiles" in spans,
        uses_q_hi="q_hi" in spans,
        words_use_q_hi="q_hi" in reads(listed),
        visible_ranges=span.visible,
        full_ranges=span.full,
        span_lines=span_lines,
        span_values=span.ends,
        word_lines=listed,
        work_lines=code.work,
        partial=partial_steps,
        full=full_steps,
        key_values=values,
        uses_kv="kv_first" in steps,
        uses_q_first="q_first" in steps,
        drops_products=code.drops_products,
        multiplier=code.multiplier,
        sink=sink(plan, code.work),
        classifier=_classifier(plan) if plan.has_launch("classify") else None,
    )


def _region_text(name: str, values: KeyValues | None) -> str:
    """Description of a region of shared memory, by what lies in it."""
    return _REGION_TEXTS[name].format(who=values.who if values else None)


def _headers(plan: Plan, *, searches: bool) -> tuple[str, ...]:
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
        "search_by_warp": searches,
        "softmax": True,
        "tile_map": plan.has_launch("classify"),
    }
    return tuple(name for name, used in needed.items() if used)


def _classifier(plan: Plan) -> ClassifierView:
    own = plan.launch("classify")
    return classifier_view(plan, own, classifier_lines(plan, own), KEYS, classified_word)
