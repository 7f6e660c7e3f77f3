"""Tiles that a box of rows sees, as CUDA lines: ranges of tiles, and the words of a tile map."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from attngen.lang.bands import Bands, bands, classify
from attngen.lang.emit import Binding, EmittedMany
from attngen.lang.ir import Expr, names, tensors
from attngen.lang.segments import segments
from attngen.lang.simplify import FALSE, TRUE, integer, maximum, minimum
from attngen.lang.statements import (
    Code,
    Statement,
    leaf,
    reads,
    written,
)
from attngen.lang.statistics import Separated, Statistic
from attngen.lang.symbols import NODES
from attngen.plan.model import Plan
from attngen.render.cuda_statements import (
    int_constant,
    int_constants,
    words_of_map,
    words_of_votes,
)
from attngen.render.expressions import (
    CUDA,
    KEYS,
    SEQLEN_K,
    Along,
    corner_bindings,
    emit_for,
    emit_named,
    facts_of,
    hull_ends,
    inward,
    multiplies_int64,
    narrowed,
    numbered,
    settled,
)

#: The ends of a range as text: its first tile, and the first after it.
Ends = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles that a box of rows sees: the lines that find them, and the ends of ranges by the names of their fields."""

    lines: tuple[Statement, ...]
    visible: tuple[Ends, ...]
    full: tuple[Ends, ...]
    values: Mapping[str, Code]

    @property
    def ends(self) -> tuple[Code, ...]:
        """The ends of all ranges, in the order of their fields."""
        return tuple(self.values[end] for pair in (*self.visible, *self.full) for end in pair)

    def with_values(self, ranges: Iterable[Ends]) -> tuple[Ends, ...]:
        """Ranges with the values of their ends in place of names."""
        return tuple((self.values[lo].text, self.values[hi].text) for lo, hi in ranges)


def by_warp(lines: Iterable[Statement]) -> tuple[Statement, ...]:
    """Lines with the same values in all lanes of a warp, which then search together."""
    return tuple(replace(line, text=line.text.replace("first_at_least(", "first_at_least_by_warp(")) for line in lines)


@dataclass(frozen=True, slots=True)
class Word:
    """The lines that list 32 tiles as bits: ``visible_word``, and ``partial_word`` of those that need the mask."""

    lines: tuple[Statement, ...]


def tiles(plan: Plan, along: Along = KEYS) -> Tiles:
    """Return the ranges of visible and of full tiles along an axis, or the hull that a listing goes through."""
    seen = bands(plan.variant.mask, facts_of(plan), over=along.axis, heads=plan.box_heads)
    if along is KEYS and plan.structure.end_aligned:
        return _end_aligned_tiles(plan, seen)
    if plan.iteration != "ranges":
        values, lines = emit_named(plan, CUDA, hull_ends(plan, seen, along), along)
        lines += [int_constant(name, value) for name, value in values.items() if value.text != name]
        return Tiles(
            with_corners(lines, along=along, any_group=plan.split_kv), (("visible_lo", "visible_hi"),), (), values
        )
    bounded = Bands(seen.visible, (), exact=True)
    nothing = (integer(0), integer(0))  # where the mask is false whatever is called: one range, without a tile
    visible = list(segments(bounded, along.tile, along.length, facts_of(plan)).partial) or [nothing]
    full = [inward(plan, interval, along) for interval in seen.full]
    ends = numbered("visible", visible) | numbered("full", full)
    ends = {name: settled(plan, end, along) for name, end in ends.items()}
    if len(visible) > 1 or any(map(multiplies_int64, ends.values())):  # a sum alone is an int32 again at once
        ends = {name: narrowed(plan, end, along) for name, end in ends.items()}
    values, lines = emit_named(plan, CUDA, ends, along)
    fields = list(ends)
    pairs = [(fields[i], fields[i + 1]) for i in range(0, len(fields), 2)]
    corners = with_corners(lines, values.values(), along=along, any_group=plan.split_kv)
    return Tiles(corners, tuple(pairs[: len(visible)]), tuple(pairs[len(visible) :]), values)


def _end_aligned_tiles(plan: Plan, seen: Bands) -> Tiles:
    """Return the ranges of tiles of which the last one ends with the last key that any row of a work tile sees.

    All ends are keys first. From those of all rows follows where tiles begin, which is the same for each consumer.
    """
    pairs = {"visible": seen.visible[0]} | ({"full": seen.full[0]} if seen.full else {})
    ends: dict[str, Expr] = {}
    for name, each in pairs.items():
        ends[f"{name}_from"] = integer(0) if each.lo is None else minimum(maximum(each.lo, integer(0)), SEQLEN_K)
        ends[f"{name}_to"] = SEQLEN_K if each.hi is None else minimum(maximum(each.hi, integer(0)), SEQLEN_K)
    keys, lines = emit_named(plan, CUDA, ends)
    named = {name: f"{{{value.text}}}" if value.text.isidentifier() else value.text for name, value in keys.items()}
    of_all = f"{plan.structure.lanes_of_part} * kConsumers"
    last = f"({named['visible_to']} + kEndAlign - 1) / kEndAlign * kEndAlign"
    begins = f"{named['visible_from']} >= kBlockN ? {last} % kBlockN : 0"
    lines += [
        int_constant("offset", f"__shfl_sync(~0u, {begins}, {of_all})", comment="of the first key of each tile"),
        int_constant("visible_lo", f"({named['visible_from']} - {{offset}}) / kBlockN"),
        int_constant("visible_hi", f"({named['visible_to']} - {{offset}} + kBlockN - 1) / kBlockN"),
    ]
    if "full" in pairs:
        lines += [
            int_constant("full_lo", f"({named['full_from']} - {{offset}} + kBlockN - 1) / kBlockN"),
            int_constant("full_hi", f"({named['full_to']} - {{offset}}) / kBlockN"),
        ]
    ranges = tuple((f"{name}_lo", f"{name}_hi") for name in pairs)
    values = {end: leaf(end) for pair in ranges for end in pair}
    return Tiles(with_corners(lines), ranges[:1], ranges[1:], values)


def with_corners(
    statements: Sequence[Statement], others: Iterable[Code] = (), *, along: Along = KEYS, any_group: bool = False
) -> tuple[Statement, ...]:
    """Return the statements after definitions of the corners that they, or the ``others``, read. ``any_group``: heads
    that share rows need not be a power of two."""
    read = reads([*statements, *others])
    corners = []
    if along.axis == "q":
        start, keys = f"{{{along.start}}}", along.keys or CUDA.tile_n
        if "kv_hi" in read:
            # a tile after the used keys has a key of its own all the same, which a mask may ask about
            corners.append(int_constant("kv_hi", f"max(min({start} + {keys}, {{seqlen_k}}) - 1, {start})"))
        return (*corners, *statements)
    if "q_pos_lo" in read:
        corners.append(int_constant("q_pos_lo", "{q_start} + ({seqlen_k} - {seqlen_q})"))
    if "q_pos_hi" in read:
        corners.append(int_constant("q_pos_hi", "{q_hi} + ({seqlen_k} - {seqlen_q})"))
    if read & {"h_lo", "h_hi"}:
        first = "{hk} * {group}" if any_group else "{hk} << {group_bits}"
        corners.append(int_constants({"h_lo": first, "h_hi": "{h_lo} + ({group} - 1)"}))
    return (*corners, *statements)


def word(plan: Plan) -> Word:
    """Return the statements that make the bits of 32 tiles: from the tile map, or by classifying them in the kernel."""
    if plan.iteration == "tile_map":
        rows = plan.structure.map_rows
        row = f"({{q_start}} / {rows} + {{consumer}})" if rows else "{q_start} / kBlockM"
        return Word(words_of_map(f"{row} * {{stride_tile_map_q}}"))
    return Word(classified_word(plan))


def classified_word(plan: Plan, by: TileBounds | None = None) -> tuple[Statement, ...]:
    """Return the statements that make the bits of 32 tiles by their bounds."""
    along = replace(KEYS, keys="kBlockKeys") if plan.structure.block_keys else KEYS
    keys = along.keys or "kBlockN"
    code, may, must = (by or TileBounds(plan.variant.mask)).emitted(plan, along)
    lines = [int_constant("candidate", "32 * {word} + {lane}")]
    if {"kv_lo", "kv_hi"} & (names(may) | names(must)):
        last = f"{{kv_lo}} + ({keys} - 1)"
        if tensors(may) | tensors(must):  # what they hold after the last key says nothing about it
            last = f"min({{kv_lo}} + {keys}, {{seqlen_k}}) - 1"
        lines.append(int_constants({"kv_lo": f"{{candidate}} * {keys}", "kv_hi": last}))
    listed = written("{candidate} >= {visible_lo} && {candidate} < {visible_hi}")
    seen = listed if may == TRUE else written("{} && ({})", listed, code.results[0])
    # the mask's code runs in the ragged last tile too, since keys end in it
    inside = f"({{}}) && ({{candidate}} + 1) * {keys} <= {{seqlen_k}}"
    whole = Code("false") if must == FALSE else written(inside, code.results[1])
    return with_corners([*lines, *code.hoisted, *words_of_votes(seen, whole)])


@dataclass(frozen=True, slots=True)
class TileBounds:
    """A mask as bounds of tiles follow from it: they have at most so many ``nodes``, and ``statistics`` are those that
    the mask names, each with what its ends and the condition on it are bound to."""

    mask: Expr
    nodes: int = NODES
    statistics: tuple[Statistic, ...] = ()
    bindings: Mapping[str, Binding] = field(default_factory=dict)

    def emitted(self, plan: Plan, along: Along) -> tuple[EmittedMany, Expr, Expr]:
        """The conditions under which a tile may be visible and must be full, as code and as expressions."""
        may, must = classify(self.mask, facts_of(plan), plan.box_heads, self.nodes, self.statistics)
        bound = {**corner_bindings(plan, CUDA, along), **self.bindings}
        ranges = Separated(self.mask, self.statistics).ranges
        code = emit_for(plan, CUDA, [may, must], bound, prefix="tiles_", inner=along.axis, ranges=ranges)
        return code, may, must
