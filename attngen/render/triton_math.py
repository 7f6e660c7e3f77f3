"""The user's mathematics as Triton lines: scores and masks of a tile, and which tiles a block visits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from attngen.lang.bands import Bands, bands, classify
from attngen.lang.blocks import Block, at_corner
from attngen.lang.emit import Binding, EmittedMany
from attngen.lang.folding import PRODUCT, fold_variant
from attngen.lang.ir import Expr, names, spelled
from attngen.lang.segments import segments
from attngen.lang.simplify import FALSE, TRUE
from attngen.lang.statements import Code, Statement, declared, joined, leaf, reads, statement, written
from attngen.plan.model import Plan
from attngen.plan.traits import mask_block
from attngen.render.blocks import BlocksView
from attngen.render.expressions import (
    KEYS,
    QUERIES,
    TRITON,
    WHOLE_TILES,
    Along,
    corner_bindings,
    emit_for,
    emit_named,
    facts_of,
    hull_ends,
    inward,
    numbered,
    scalar_bindings,
    settled,
)

_WHOLE = spelled(WHOLE_TILES.name)
_Q, _KV = frozenset({"q"}), frozenset({"kv"})
_ELEMENT = _Q | _KV

#: Corners of a tile that a listing of tiles along an axis computes for each of them.
_CORNERS = {"kv": ("kv_lo", "kv_hi"), "q": ("q_lo", "q_hi", "q_pos_lo", "q_pos_hi")}

#: The test whether the tile at a bit of the words is cut by the mask.
_NEEDS_MASK = "((partial_word >> index) & 1) != 0"


@dataclass(frozen=True, slots=True)
class Body:
    """Lines of the score and of the mask in one step; no mask lines where every key is visible."""

    score_lines: tuple[Statement, ...]
    mask_lines: tuple[Statement, ...]
    slope: Code | None = None  # the part of the logit's derivative that varies from pair to pair, where it is asked for

    @property
    def all(self) -> tuple[Statement, ...]:
        """All statements."""
        return (*self.score_lines, *self.mask_lines)


@dataclass(frozen=True, slots=True)
class Math:
    """Score and mask of a whole tile and of the ragged last one, the texts of the logit and of its multiplier, and
    the lines that come before the loop, because they do not depend on the key."""

    hoisted: tuple[Statement, ...]
    whole: Body
    ragged: Body
    logit: str
    multiplier: Code
    uses_q_row: bool
    uses_q_pos: bool


@dataclass(frozen=True, slots=True)
class Ranges:
    """A loop over tiles: one range [lo, hi); or ``hi`` tiles in several ranges, of which ``first`` is the first
    tile and ``jumps`` lead from one range to the next."""

    lo: str
    hi: str
    first: str = ""
    jumps: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TileLoops:
    """The lines that find the tiles of a block, the loops over them by kind (``visible``, or ``full`` and
    ``partial``; none where tiles are listed as bits of words), and the test whether a visible tile needs the mask.

    ``condition`` is None where every tile needs it; ``ragged`` is the test whether the ragged last tile is visible.
    """

    lines: tuple[Statement, ...]
    loops: tuple[tuple[str, Ranges], ...]
    condition: str | None
    ragged: str


@dataclass(frozen=True, slots=True)
class Words:
    """The lines that list 32 tiles as bits, and the test whether a tile needs the mask (None: each does)."""

    lines: tuple[Statement, ...]
    condition: str | None


@dataclass(frozen=True, slots=True)
class MapLines:
    """Lines of the classifier kernel: the keys that it looks at, what is constant, and the mask of one tile; before
    them the conditions on a block of pairs, where the mask is constant on blocks."""

    range_lines: tuple[Statement, ...]
    blocks: BlocksView | None
    hoisted: tuple[Statement, ...]
    lines: tuple[Statement, ...]

    @property
    def reads(self) -> frozenset[str]:
        """Names that the lines read."""
        read = reads([*self.range_lines, *self.hoisted, *self.lines])
        return read if self.blocks is None else read | self.blocks.reads


# --- names --------------------------------------------------------------------------------------------------


def _elements(plan: Plan, *, ragged: bool = False) -> dict[str, Binding]:
    """Return the bindings inside a step: rows along the first axis, keys along the second.

    Rows beyond the end repeat the last one and so stay inside their sequence; keys do, save in the ragged last tile.
    """
    keys = frozenset() if ragged else frozenset({"seqlen_k", "total_k"})
    return scalar_bindings(plan, TRITON) | {
        "q": Binding("{q_row}[:, None]", _Q, below=frozenset({"seqlen_q"})),
        "q_pos": Binding("{q_pos}[:, None]", _Q, below=frozenset({"seqlen_k"})),
        "q_global": Binding("{q_packed}[:, None]", _Q, below=frozenset({"total_q"})),
        "kv": Binding("{kv_index}[None, :]", _KV, below=keys),
        "kv_global": Binding("{kv_packed}[None, :]", _KV, below=keys),
        PRODUCT.name: Binding("s", _ELEMENT),
    }


# --- score and mask of a tile -------------------------------------------------------------------------------


def math(plan: Plan, before: Iterable[Statement] = (), slope: Expr | None = None) -> Math:
    """Return the statements of one step; what does not depend on the key is computed once, before the loop.

    ``before`` are statements of the kernel that stand earlier: their names are not used again. ``slope``: the part of
    the logit's derivative that varies from pair to pair.
    """
    variant = plan.variant
    logit = fold_variant(variant, fast_math=plan.fast_math)
    plain = variant.score is None
    name = "s" if plain else "logit"
    hoisted: dict[Statement, None] = {}
    bodies = []
    multiplier = leaf("scale_log2e")
    earlier = declared(before)
    for ragged in (False, True):
        bound = _elements(plan, ragged=ragged)
        roots = [logit.value, logit.multiplier, *([slope] if slope is not None else [])]
        scored = emit_for(plan, TRITON, roots, bound, taken=earlier)
        taken = [*earlier, *declared([*scored.hoisted, *scored.body])]
        masked = emit_for(plan, TRITON, [variant.mask], bound, taken=taken)
        hoisted |= dict.fromkeys((*scored.hoisted, *masked.hoisted))
        score_lines = [*scored.body] if plain else [*scored.body, assign("logit", _of_tile(scored))]
        tests = [written("{kv_index}[None, :] < {seqlen_k}")] * ragged + [masked.results[0]] * variant.masked
        mask_lines = [*masked.body, *(hide(name, tests) if tests else ())]
        for block in (score_lines, mask_lines):
            if "kv_packed" in reads(block):
                block.insert(0, assign("kv_packed", "{k_begin} + {kv_index}"))
        bodies.append(Body(tuple(score_lines), tuple(mask_lines), scored.results[2] if slope is not None else None))
        multiplier = multiplier if plain else scored.results[1]
    read = reads([*hoisted, *(each for body in bodies for each in body.all)])
    rows = [assign("q_packed", "{q_begin} + {q_row}")] if "q_packed" in read else []
    return Math(
        hoisted=(*rows, *hoisted),
        whole=bodies[0],
        ragged=bodies[1],
        logit=name,
        multiplier=multiplier,
        uses_q_row=not read.isdisjoint(("q_row", "q_pos", "q_packed")),
        uses_q_pos="q_pos" in read,
    )


def hide(logit: str, tests: Sequence[Code]) -> tuple[Statement, ...]:
    """Return the statements that make a logit -inf where a test fails."""
    visible = tests[0] if len(tests) == 1 else joined(" & ", (written("({})", test) for test in tests))
    hidden = written('tl.where({visible}, {logit}, float("-inf"))', logit=leaf(logit))
    return assign("visible", visible), assign(logit, hidden)


def assign(name: str, value: Code | str) -> Statement:
    """Return the statement that gives a name to a value; one that is text is a pattern (see ``statements.written``)."""
    return statement(f"{name} = {{}}", written(value) if isinstance(value, str) else value, declares=name)


def sink(plan: Plan, before: Iterable[Statement]) -> tuple[tuple[Statement, ...], Code]:
    """Return the statements after the loops that compute the sink of the head, and its value; for a plan with one."""
    assert plan.variant.sink is not None
    code = emit_for(plan, TRITON, [plan.variant.sink], scalar_bindings(plan, TRITON), taken=declared(before))
    return (*code.hoisted, *code.body), code.results[0]


def _of_tile(scored: EmittedMany) -> Code:
    """Return the logit of every pair, also where the score depends on row or key alone, or on none."""
    return of_pairs(scored, "[BLOCK_M, BLOCK_N]")


def of_pairs(scored: EmittedMany, tile: str) -> Code:
    """Return the first result for every pair of a tile, also where it depends on row or key alone, or on none."""
    value = scored.results[0]
    return value if scored.axes[0] == _ELEMENT else written("tl.zeros({}, tl.float32) + ({})", tile, value)


# --- which tiles a block visits -----------------------------------------------------------------------------


def ranges(plan: Plan, along: Along = KEYS) -> TileLoops:
    """Return the tiles of a block: by ranges of visible and of full tiles, or the hull that a listing goes through."""
    visible = bands(plan.variant.mask, facts_of(plan), over=along.axis)
    if plan.iteration != "ranges":
        values, lines = _hull(plan, visible, along)
        if plan.iteration == "tile_map":
            own = "{q_tile} * {stride_tile_map_q}" if along is KEYS else "{kv_tile} * {stride_tile_map_kv}"
            rows = "{b} * {stride_tile_map_b} + {h} * {stride_tile_map_h} + "
            lines.append(assign("tile_map", f"{{tile_map_ptr}} + {rows}{own}"))
        ragged = _ragged([(values["visible_lo"], values["visible_hi"])])
        return TileLoops(_with_corners(lines, words(plan, along).lines, along=along), (), None, ragged)
    if plan.mask_code == "loop":
        pieces = segments(visible, along.tile, along.length, facts_of(plan))
        groups = {"full": list(pieces.full), "partial": list(pieces.partial)}
        whole: list[tuple[Expr, Expr]] = []
    else:
        bounded = Bands(visible.visible, (), exact=True)
        groups = {"visible": list(segments(bounded, along.tile, along.length, facts_of(plan)).partial)}
        whole = [inward(plan, interval, along) for interval in visible.full]
    ends = {name: end for kind, spans in groups.items() for name, end in numbered(kind, spans).items()}
    ends |= numbered("full", whole)
    values, lines = emit_named(plan, TRITON, {name: settled(plan, end, along) for name, end in ends.items()}, along)
    pairs = {kind: _pairs(values, kind, len(spans)) for kind, spans in groups.items()}
    reach = (lambda hi: hi) if plan.direction == "backward" else (lambda hi: _at_most_whole(hi, along))
    loops = tuple((kind, _loop(kind, spans, lines, reach)) for kind, spans in pairs.items() if spans)
    outside = [_outside(lo, hi) for lo, hi in _pairs(values, "full", len(whole))]
    condition = " & ".join(f"({test})" for test in outside) if len(outside) > 1 else "".join(outside)
    ragged = _ragged([pair for spans in pairs.values() for pair in spans])
    return TileLoops(_with_corners(lines, values.values(), along=along), loops, condition or None, ragged)


def _pairs(values: Mapping[str, Code], kind: str, count: int) -> list[tuple[Code, Code]]:
    """Return the ends of ``count`` ranges."""
    suffixes = [""] if count == 1 else [f"_{number}" for number in range(count)]
    return [(values[f"{kind}_lo{suffix}"], values[f"{kind}_hi{suffix}"]) for suffix in suffixes]


def _loop(
    kind: str, ranges: Sequence[tuple[Code, Code]], lines: list[Statement], reach: Callable[[Code], Code]
) -> Ranges:
    """Return the loop over the tiles of ranges, one after the other; add the statements that count them.

    ``reach`` gives how far a range goes: a forward leaves the ragged last tile to another loop.
    """
    whole = [(lo, reach(hi)) for lo, hi in ranges]
    if len(whole) == 1:
        lo, hi = whole[0]
        return Ranges(lo.text, hi.text)
    jumps: list[str] = []
    before = ""
    for number, (lo, hi) in enumerate(whole):
        length = hi if lo.text == "0" else written("tl.maximum({} - {}, 0)", hi, lo)
        until = f"{kind}_until_{number}"
        lines.append(assign(until, written("{} + {}", leaf(before), length) if before else length))
        if before:
            jumps.append(f"tile = tl.where(i < {before}, tile, {lo} + i - {before})")
        before = until
    first = whole[0][0]
    return Ranges("0", before, first="i" if first.text == "0" else f"{first} + i", jumps=tuple(jumps))


def _at_most_whole(end: Code, along: Along) -> Code:
    if end.text == along.tiles_text:
        return leaf(_WHOLE)
    return written("tl.minimum({}, {whole})", end, whole=leaf(_WHOLE))


def _ragged(ranges: Sequence[tuple[Code, Code]]) -> str:
    """Return the test whether a range holds the tile after the whole ones; no range reaches beyond the last key.

    The text is empty where there is no range at all.
    """
    tests = []
    for lo, hi in ranges:
        reached = f"{hi} > {_WHOLE}"
        tests.append(reached if lo.text == "0" else f"({lo} <= {_WHOLE}) & ({reached})")
    return tests[0] if len(tests) == 1 else " | ".join(f"({test})" for test in tests) or ""


def _outside(lo: Code, hi: Code) -> str:
    """Return the test that a tile lies outside a range of full tiles."""
    after = f"tile >= {hi}"
    return after if lo.text == "0" else f"(tile < {lo}) | ({after})"


def _hull(plan: Plan, visible: Bands, along: Along = KEYS) -> tuple[dict[str, Code], list[Statement]]:
    """Return the tiles between the first and the last visible position, and the statements that name them."""
    values, lines = emit_named(plan, TRITON, hull_ends(plan, visible, along), along)
    return values, [*lines, *(assign(name, value) for name, value in values.items() if value.text != name)]


def _with_corners(
    statements: Sequence[Statement], others: Iterable[Code | Statement] = (), *, along: Along = KEYS
) -> tuple[Statement, ...]:
    """Return the statements after definitions of the corners that they, or the ``others``, read."""
    read = reads([*statements, *others])
    corners = []
    if along is QUERIES:
        if "kv_hi" in read:
            # A tile after the used keys has a key of its own all the same, which a mask may ask about.
            corners.append(assign("kv_hi", "tl.maximum(tl.minimum({kv_start} + BLOCK_N, {seqlen_k}) - 1, {kv_start})"))
        return (*corners, *statements)
    if not read.isdisjoint(("q_hi", "q_pos_hi")):
        corners.append(assign("q_hi", "tl.minimum({q_start} + BLOCK_M, {seqlen_q}) - 1"))
    if "q_pos_lo" in read:
        corners.append(assign("q_pos_lo", "{q_start} + ({seqlen_k} - {seqlen_q})"))
    if "q_pos_hi" in read:
        corners.append(assign("q_pos_hi", "{q_hi} + ({seqlen_k} - {seqlen_q})"))
    return (*corners, *statements)


def words(plan: Plan, along: Along = KEYS) -> Words:
    """Return the lines that make the bits of 32 tiles: from the tile map, or by classifying them in the kernel."""
    if plan.iteration == "ranges":
        return Words((), None)
    if plan.iteration == "tile_map":
        lines = (
            assign("partial_word", "tl.load({tile_map} + {words} + {word})"),
            assign("visible_word", "tl.load({tile_map} + {word}) | {partial_word}"),
            assign("visible_count", "count_bits({visible_word})"),
        )
        return Words(lines, _NEEDS_MASK)
    return _classified_words(plan, along)


def _classified_words(plan: Plan, along: Along) -> Words:
    may, must = classify(plan.variant.mask, facts_of(plan))
    corners = _corners_of_tiles(along, names(may) | names(must))
    bound = corner_bindings(plan, TRITON, along)
    bound |= {name: Binding(name, frozenset({along.axis})) for name in _CORNERS[along.axis]}
    code = emit_for(plan, TRITON, [may, must], bound, prefix="tiles_", inner=along.axis)
    seen, seen_whole = code.results
    last = written("tl.minimum({visible_hi}, {whole_tiles})")
    if plan.direction == "backward":  # the ragged tile is one that the mask cuts, if it is not out of sight
        last = leaf("visible_hi")
        seen = written("({}) | ({tiles} >= {whole_tiles})", seen)
        seen_whole = written("({}) & ({tiles} < {whole_tiles})", seen_whole)
    lines = [
        assign("tiles", "{word} * 32 + tl.arange(0, 32)"),
        *corners,
        *code.hoisted,
        *code.body,
        assign("seen", written("({tiles} >= {visible_lo}) & ({tiles} < {})", last)),
        *([statement("{seen} &= {}", seen)] if may != TRUE else []),
        assign("bit", "1 << tl.arange(0, 32)"),
        assign("visible_word", "tl.sum(tl.where({seen}, {bit}, 0))"),
        assign("visible_count", "tl.sum({seen}.to(tl.int32))"),
    ]
    if must == FALSE:
        return Words(tuple(lines), None)
    lines += [
        assign("seen_whole", seen_whole),
        assign("partial_word", "tl.sum(tl.where({seen} & ~{seen_whole}, {bit}, 0))"),
    ]
    return Words(tuple(lines), _NEEDS_MASK)


def _corners_of_tiles(along: Along, used: frozenset[str]) -> list[Statement]:
    """Return the statements that give the corners of 32 tiles, as far as they are used."""
    if along is KEYS:
        wanted = bool({"kv_lo", "kv_hi"} & used)
        return [assign("kv_lo", "{tiles} * BLOCK_N"), assign("kv_hi", "{kv_lo} + (BLOCK_N - 1)")] if wanted else []
    lines = []
    if used & set(_CORNERS["q"]):
        lines += [assign("q_lo", "{tiles} * BLOCK_M"), assign("q_hi", "{q_lo} + (BLOCK_M - 1)")]
    if used & {"q_pos_lo", "q_pos_hi"}:
        lines.append(assign("q_pos_lo", "{q_lo} + ({seqlen_k} - {seqlen_q})"))
        lines.append(assign("q_pos_hi", "{q_hi} + ({seqlen_k} - {seqlen_q})"))
    return lines


def classifier(plan: Plan) -> MapLines:
    """Return the lines of the kernel that computes the tile map: the mask of every element, tile by tile."""
    return map_lines(plan, KEYS)


def map_lines(plan: Plan, along: Along) -> MapLines:
    """Return the lines of a kernel that computes the map of the tiles along an axis."""
    visible = bands(plan.variant.mask, facts_of(plan), over=along.axis)
    _, lines = _hull(plan, visible, along)
    ragged = plan.direction == "backward"  # whose map has the ragged last tile, too
    bound = _elements(plan, ragged=ragged) if along is KEYS else _elements_of_key_tile(plan)
    mask = emit_for(plan, TRITON, [plan.variant.mask], bound, taken=declared(lines), inner=along.axis)
    body, hoisted = list(mask.body), list(mask.hoisted)
    read = reads([*hoisted, *body, *mask.results])
    moving, kept = (body, hoisted) if along is KEYS else (hoisted, body)
    if "kv_packed" in read:
        moving.insert(0, assign("kv_packed", "{k_begin} + {kv_index}" if along is KEYS else "{k_begin} + {kv_row}"))
    if "q_packed" in read:
        kept.insert(0, assign("q_packed", "{q_begin} + {q_row}" if along is KEYS else "{q_begin} + {q_index}"))
    if along is QUERIES and "q_pos" in read:
        body.insert(0, assign("q_pos", "{q_index} + ({seqlen_k} - {seqlen_q})"))
    body.append(assign("visible", mask.results[0]))
    block = mask_block(plan.variant, (plan.tile_m, plan.tile_n))
    blocks = _blocks(plan, along, block, declared(lines)) if block else None
    return MapLines(_with_corners(lines, along=along), blocks, tuple(hoisted), tuple(body))


def _blocks(plan: Plan, along: Along, size: Block, taken: Iterable[str]) -> BlocksView:
    """Return the conditions on a block of pairs, one in each of 32 tiles along an axis."""
    may, must = classify(at_corner(plan.variant.mask, size), facts_of(plan))
    bound = corner_bindings(plan, TRITON, along)
    for axis, corners in _CORNERS.items():
        bound |= {name: Binding(name, frozenset({axis} & {along.axis})) for name in corners}
    code = emit_for(plan, TRITON, [may, must], bound, prefix="tiles_", taken=taken, inner=along.axis)
    asked = reads([*code.hoisted, *code.body, *code.results])
    ends = {
        "q_hi": f"tl.minimum({{q_lo}} + {size[0]}, {{seqlen_q}}) - 1",
        "kv_hi": f"tl.minimum({{kv_lo}} + {size[1]}, {{seqlen_k}}) - 1",
        "q_pos_lo": "{q_lo} + ({seqlen_k} - {seqlen_q})", "q_pos_hi": "{q_hi} + ({seqlen_k} - {seqlen_q})",
    }  # fmt: skip
    asked |= {"q_hi"} if "q_pos_hi" in asked else set()
    lines = [assign(name, end) for name, end in ends.items() if name in asked]
    return BlocksView(size, (*lines, *code.hoisted, *code.body), *code.results)


def _elements_of_key_tile(plan: Plan) -> dict[str, Binding]:
    """Return the bindings where a tile of keys is kept: the keys beyond the end repeat the last one."""
    queries = {"q": "q_index", "q_pos": "q_pos", "q_global": "q_packed"}
    return scalar_bindings(plan, TRITON) | {
        **{name: Binding(f"{{{text}}}[:, None]", _Q) for name, text in queries.items()},
        "kv": Binding("{kv_row}[None, :]", _KV, below=frozenset({"seqlen_k", "total_k"})),
        "kv_global": Binding("{kv_packed}[None, :]", _KV, below=frozenset({"seqlen_k", "total_k"})),
    }
