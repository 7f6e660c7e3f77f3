"""The user's mathematics as Triton lines: scores and masks of a tile, and which tiles a block visits."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from attngen.lang.bands import Bands, bands, classify
from attngen.lang.emit import Binding, EmittedMany
from attngen.lang.folding import PRODUCT, fold_logit
from attngen.lang.ir import Expr, names
from attngen.lang.segments import segments
from attngen.lang.simplify import FALSE, TRUE
from attngen.plan.model import Plan
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

_Q, _KV = frozenset({"q"}), frozenset({"kv"})
_ELEMENT = _Q | _KV

#: Corners of a tile that a listing of tiles along an axis computes for each of them.
_CORNERS = {"kv": ("kv_lo", "kv_hi"), "q": ("q_lo", "q_hi", "q_pos_lo", "q_pos_hi")}

#: The test whether the tile at a bit of the words is cut by the mask.
_NEEDS_MASK = "((partial_word >> index) & 1) != 0"


@dataclass(frozen=True, slots=True)
class Body:
    """Lines of the score and of the mask in one step; no mask lines where every key is visible."""

    score_lines: tuple[str, ...]
    mask_lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Math:
    """Score and mask of a whole tile and of the ragged last one, the texts of the logit and of its multiplier, and
    the lines that come before the loop, because they do not depend on the key."""

    hoisted: tuple[str, ...]
    whole: Body
    ragged: Body
    logit: str
    multiplier: str
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
class Visits:
    """The lines that find the tiles of a block, the loops over them by kind (``visible``, or ``full`` and
    ``partial``; none where tiles are listed as bits of words), and the test whether a visible tile needs the mask.

    ``condition`` is None where every tile needs it; ``ragged`` is the test whether the ragged last tile is visible.
    """

    lines: tuple[str, ...]
    loops: tuple[tuple[str, Ranges], ...]
    condition: str | None
    ragged: str


@dataclass(frozen=True, slots=True)
class Words:
    """The lines that list 32 tiles as bits, and the test whether a tile needs the mask (None: each does)."""

    lines: tuple[str, ...]
    condition: str | None


@dataclass(frozen=True, slots=True)
class Classifier:
    """Lines of the classifier kernel: the keys that it looks at, what is constant, and the mask of one tile."""

    range_lines: tuple[str, ...]
    hoisted: tuple[str, ...]
    lines: tuple[str, ...]


# --- names --------------------------------------------------------------------------------------------------


def _elements(plan: Plan, *, ragged: bool = False) -> dict[str, Binding]:
    """Return the bindings inside a step: rows along the first axis, keys along the second.

    Rows beyond the end repeat the last one and so stay inside their sequence; keys do, save in the ragged last tile.
    """
    keys = frozenset() if ragged else frozenset({"seqlen_k", "total_k"})
    return scalar_bindings(plan, TRITON) | {
        "q": Binding("q_row[:, None]", _Q, below=frozenset({"seqlen_q"})),
        "q_pos": Binding("q_pos[:, None]", _Q, below=frozenset({"seqlen_k"})),
        "q_global": Binding("q_packed[:, None]", _Q, below=frozenset({"total_q"})),
        "kv": Binding("kv_index[None, :]", _KV, below=keys),
        "kv_global": Binding("kv_packed[None, :]", _KV, below=keys),
        PRODUCT.name: Binding("s", _ELEMENT),
    }


# --- score and mask of a tile -------------------------------------------------------------------------------


def math(plan: Plan, before: Iterable[str] = ()) -> Math:
    """Return the lines of one step; what does not depend on the key is computed once, before the loop.

    ``before`` are lines of the kernel that stand earlier: their names are not used again.
    """
    variant = plan.variant
    logit = fold_logit(variant.score, variant.ranges, fast_math=plan.fast_math)
    plain = variant.score is None
    name = "s" if plain else "logit"
    hoisted: dict[str, None] = {}
    bodies = []
    multiplier = "scale_log2e"
    for ragged in (False, True):
        bound = _elements(plan, ragged=ragged)
        taken = defined(before)
        scored = emit_for(plan, TRITON, [logit.value, logit.multiplier], bound, taken=taken)
        taken += defined([*scored.hoisted, *scored.body])
        masked = emit_for(plan, TRITON, [variant.mask], bound, taken=taken)
        hoisted |= dict.fromkeys(statements([*scored.hoisted, *masked.hoisted]))
        score_lines = [*scored.body] if plain else [*scored.body, f"logit = {_of_tile(scored)}"]
        tests = ["kv_index[None, :] < seqlen_k"] * ragged + [masked.results[0]] * variant.masked
        mask_lines = list(masked.body)
        if tests:
            visible = tests[0] if len(tests) == 1 else " & ".join(f"({test})" for test in tests)
            mask_lines += [f"visible = {visible}", f'{name} = tl.where(visible, {name}, float("-inf"))']
        for lines in (score_lines, mask_lines):
            if any("kv_packed" in line for line in lines):
                lines.insert(0, "kv_packed = k_begin + kv_index")
        bodies.append(Body(tuple(score_lines), tuple(mask_lines)))
        multiplier = multiplier if plain else scored.results[1]
    texts = "\n".join([*hoisted, *(line for body in bodies for line in (*body.score_lines, *body.mask_lines))])
    return Math(
        hoisted=(*_packed_rows(texts), *(line for statement in hoisted for line in statement.splitlines())),
        whole=bodies[0],
        ragged=bodies[1],
        logit=name,
        multiplier=multiplier,
        uses_q_row=any(word in texts for word in ("q_row", "q_pos", "q_packed")),
        uses_q_pos="q_pos[" in texts,
    )


def sink(plan: Plan, before: Iterable[str]) -> tuple[tuple[str, ...], str]:
    """Return the lines behind the loops that compute the sink of the head, and its text; none where there is none."""
    if plan.variant.sink is None:
        return (), ""
    code = emit_for(plan, TRITON, [plan.variant.sink], scalar_bindings(plan, TRITON), taken=defined(before))
    return (*code.hoisted, *code.body), code.results[0]


def _of_tile(scored: EmittedMany) -> str:
    """Return the logit of every pair, also where the score depends on row or key alone, or on none."""
    text = scored.results[0]
    return text if scored.axes[0] == _ELEMENT else f"tl.zeros([BLOCK_M, BLOCK_N], tl.float32) + ({text})"


def statements(lines: Iterable[str]) -> Iterator[str]:
    """Yield each statement with the lines that continue it, which many statements have in common."""
    statement = ""
    for line in lines:
        if statement and not line.startswith((" ", ")")):
            yield statement
            statement = line
        else:
            statement = f"{statement}\n{line}" if statement else line
    if statement:
        yield statement


def defined(lines: Iterable[str]) -> list[str]:
    """Return the names that statements assign, one entry for each assignment."""
    return [match[1] for line in lines if (match := re.match(r"(\w+) = ", line))]


def _packed_rows(texts: str) -> list[str]:
    return ["q_packed = q_begin + q_row"] if "q_packed" in texts else []


# --- which tiles a block visits -----------------------------------------------------------------------------


def ranges(plan: Plan, along: Along = KEYS) -> Visits:
    """Return the tiles of a block: by ranges of visible and of full tiles, or the hull that a listing goes through."""
    found = bands(plan.variant.mask, facts_of(plan), over=along.axis)
    if plan.driver != "ranges":
        texts, lines = _hull(plan, found, along)
        if plan.driver == "tile_map":
            own = "q_tile * stride_tile_map_q" if along is KEYS else "kv_tile * stride_tile_map_kv"
            rows = f"b * stride_tile_map_b + h * stride_tile_map_h + {own}"
            lines.append(f"tile_map = tile_map_ptr + {rows}")
        ragged = _ragged([(texts["visible_lo"], texts["visible_hi"])])
        return Visits(_with_corners(lines, words(plan, along).lines, along=along), (), None, ragged)
    if plan.mask_code == "loop":
        pieces = segments(found, along.tile, along.length, facts_of(plan))
        groups = {"full": list(pieces.full), "partial": list(pieces.partial)}
        whole: list[tuple[Expr, Expr]] = []
    else:
        bounded = Bands(found.visible, (), exact=True)
        groups = {"visible": list(segments(bounded, along.tile, along.length, facts_of(plan)).partial)}
        whole = [inward(plan, interval, along) for interval in found.full]
    ends = {name: end for kind, spans in groups.items() for name, end in numbered(kind, spans).items()}
    ends |= numbered("full", whole)
    texts, lines = emit_named(plan, TRITON, {name: settled(plan, end, along) for name, end in ends.items()}, along)
    pairs = {kind: _pairs(texts, kind, len(spans)) for kind, spans in groups.items()}
    reach = (lambda hi: hi) if plan.direction == "backward" else (lambda hi: _at_most_whole(hi, along))
    loops = tuple((kind, _loop(kind, spans, lines, reach)) for kind, spans in pairs.items() if spans)
    outside = [_outside(lo, hi) for lo, hi in _pairs(texts, "full", len(whole))]
    condition = " & ".join(f"({test})" for test in outside) if len(outside) > 1 else "".join(outside)
    ragged = _ragged([pair for spans in pairs.values() for pair in spans])
    used = [text for _, loop in loops for text in (loop.lo, loop.hi)]
    return Visits(_with_corners(lines, [*used, condition], along=along), loops, condition or None, ragged)


def _pairs(texts: Mapping[str, str], kind: str, count: int) -> list[tuple[str, str]]:
    """Return the texts of the ends of ``count`` ranges."""
    suffixes = [""] if count == 1 else [f"_{number}" for number in range(count)]
    return [(texts[f"{kind}_lo{suffix}"], texts[f"{kind}_hi{suffix}"]) for suffix in suffixes]


def _loop(kind: str, ranges: Sequence[tuple[str, str]], lines: list[str], reach: Callable[[str], str]) -> Ranges:
    """Return the loop over the tiles of ranges, one after the other; add the lines that count them.

    ``reach`` gives how far a range goes: a forward leaves the ragged last tile to another loop.
    """
    whole = [(lo, reach(hi)) for lo, hi in ranges]
    if len(whole) == 1:
        return Ranges(*whole[0])
    jumps: list[str] = []
    before = ""
    for number, (lo, hi) in enumerate(whole):
        length = hi if lo == "0" else f"tl.maximum({hi} - {lo}, 0)"
        lines.append(f"{kind}_until_{number} = {before + ' + ' if before else ''}{length}")
        if before:
            jumps.append(f"tile = tl.where(i < {before}, tile, {lo} + i - {before})")
        before = f"{kind}_until_{number}"
    first = whole[0][0]
    return Ranges("0", before, first="i" if first == "0" else f"{first} + i", jumps=tuple(jumps))


def _at_most_whole(end: str, along: Along) -> str:
    return WHOLE_TILES.name if end == along.tiles_text else f"tl.minimum({end}, {WHOLE_TILES.name})"


def _ragged(ranges: Sequence[tuple[str, str]]) -> str:
    """Return the test whether a range holds the tile behind the whole ones; no range reaches beyond the last key.

    The text is empty where there is no range at all.
    """
    tests = []
    for lo, hi in ranges:
        reached = f"{hi} > {WHOLE_TILES.name}"
        tests.append(reached if lo == "0" else f"({lo} <= {WHOLE_TILES.name}) & ({reached})")
    return tests[0] if len(tests) == 1 else " | ".join(f"({test})" for test in tests) or ""


def _outside(lo: str, hi: str) -> str:
    """Return the test that a tile lies outside a range of full tiles."""
    after = f"tile >= {hi}"
    return after if lo == "0" else f"(tile < {lo}) | ({after})"


def _hull(plan: Plan, found: Bands, along: Along = KEYS) -> tuple[dict[str, str], list[str]]:
    """Return names and lines of the tiles between the first and the last visible position."""
    texts, lines = emit_named(plan, TRITON, hull_ends(plan, found, along), along)
    return texts, [*lines, *(f"{name} = {text}" for name, text in texts.items() if text != name)]


def _with_corners(lines: Sequence[str], others: Sequence[str] = (), *, along: Along = KEYS) -> tuple[str, ...]:
    """Return the lines behind definitions of the corners that they, or the ``others``, use."""
    texts = "\n".join([*lines, *others])
    if along is QUERIES:
        # A tile behind the used keys has a key of its own all the same, which a mask may ask about.
        hi = "kv_hi = tl.maximum(tl.minimum(kv_start + BLOCK_N, seqlen_k) - 1, kv_start)"
        return (*([hi] if "kv_hi" in texts else []), *lines)
    corners = []
    if any(name in texts for name in ("q_hi", "q_pos_hi")):
        corners.append("q_hi = tl.minimum(q_start + BLOCK_M, seqlen_q) - 1")
    if "q_pos_lo" in texts:
        corners.append("q_pos_lo = q_start + (seqlen_k - seqlen_q)")
    if "q_pos_hi" in texts:
        corners.append("q_pos_hi = q_hi + (seqlen_k - seqlen_q)")
    return (*corners, *lines)


def words(plan: Plan, along: Along = KEYS) -> Words:
    """Return the lines that make the bits of 32 tiles: from the tile map, or by classifying them in the kernel."""
    if plan.driver == "ranges":
        return Words((), None)
    if plan.driver == "tile_map":
        return Words(
            (
                "partial_word = tl.load(tile_map + words + word)",
                "visible_word = tl.load(tile_map + word) | partial_word",
                "visible_count = count_bits(visible_word)",
            ),
            _NEEDS_MASK,
        )
    return _classified_words(plan, along)


def _classified_words(plan: Plan, along: Along) -> Words:
    may, must = classify(plan.variant.mask, facts_of(plan))
    corners = _corners_of_tiles(along, names(may) | names(must))
    bound = corner_bindings(plan, TRITON, along)
    bound |= {name: Binding(name, frozenset({along.axis})) for name in _CORNERS[along.axis]}
    code = emit_for(plan, TRITON, [may, must], bound, prefix="tiles_", inner=along.axis)
    lines = ["tiles = word * 32 + tl.arange(0, 32)", *corners]
    seen, seen_whole = code.results
    last = "tl.minimum(visible_hi, whole_tiles)"
    if plan.direction == "backward":  # the ragged tile is one that the mask cuts, if it is not out of sight
        last = "visible_hi"
        seen = f"({seen}) | (tiles >= whole_tiles)"
        seen_whole = f"({seen_whole}) & (tiles < whole_tiles)"
    lines += [
        *code.hoisted,
        *code.body,
        f"seen = (tiles >= visible_lo) & (tiles < {last})",
        *([f"seen &= {seen}"] if may != TRUE else []),
        "bit = 1 << tl.arange(0, 32)",
        "visible_word = tl.sum(tl.where(seen, bit, 0))",
        "visible_count = tl.sum(seen.to(tl.int32))",
    ]
    if must == FALSE:
        return Words(tuple(lines), None)
    lines += [
        f"seen_whole = {seen_whole}",
        "partial_word = tl.sum(tl.where(seen & ~seen_whole, bit, 0))",
    ]
    return Words(tuple(lines), _NEEDS_MASK)


def _corners_of_tiles(along: Along, used: frozenset[str]) -> list[str]:
    """Return the lines that give the corners of 32 tiles, as far as they are used."""
    if along is KEYS:
        wanted = bool({"kv_lo", "kv_hi"} & used)
        return ["kv_lo = tiles * BLOCK_N", "kv_hi = kv_lo + (BLOCK_N - 1)"] if wanted else []
    lines = []
    if used & set(_CORNERS["q"]):
        lines += ["q_lo = tiles * BLOCK_M", "q_hi = q_lo + (BLOCK_M - 1)"]
    if used & {"q_pos_lo", "q_pos_hi"}:
        lines += ["q_pos_lo = q_lo + (seqlen_k - seqlen_q)", "q_pos_hi = q_hi + (seqlen_k - seqlen_q)"]
    return lines


def classifier(plan: Plan) -> Classifier:
    """Return the lines of the kernel that computes the tile map: the mask of every element, tile by tile."""
    return map_lines(plan, KEYS)


def map_lines(plan: Plan, along: Along) -> Classifier:
    """Return the lines of a kernel that computes the map of the tiles along an axis."""
    found = bands(plan.variant.mask, facts_of(plan), over=along.axis)
    _, lines = _hull(plan, found, along)
    ragged = plan.direction == "backward"  # whose map has the ragged last tile, too
    bound = _elements(plan, ragged=ragged) if along is KEYS else _elements_of_key_tile(plan)
    mask = emit_for(plan, TRITON, [plan.variant.mask], bound, taken=defined(lines), inner=along.axis)
    body, hoisted = list(mask.body), list(mask.hoisted)
    texts = "\n".join([*hoisted, *body, *mask.results])
    moving, kept = (body, hoisted) if along is KEYS else (hoisted, body)
    rows = "q_packed = q_begin + q_row" if along is KEYS else "q_packed = q_begin + q_index"
    if "kv_packed" in texts:
        moving.insert(0, "kv_packed = k_begin + " + ("kv_index" if along is KEYS else "kv_row"))
    if "q_packed" in texts:
        kept.insert(0, rows)
    if along is QUERIES and "q_pos[" in texts:
        body.insert(0, "q_pos = q_index + (seqlen_k - seqlen_q)")
    body.append(f"visible = {mask.results[0]}")
    return Classifier(_with_corners(lines, along=along), tuple(hoisted), tuple(body))


def _elements_of_key_tile(plan: Plan) -> dict[str, Binding]:
    """Return the bindings where a tile of keys is kept: the keys beyond the end repeat the last one."""
    queries = {"q": "q_index", "q_pos": "q_pos", "q_global": "q_packed"}
    return scalar_bindings(plan, TRITON) | {
        **{name: Binding(f"{text}[:, None]", _Q) for name, text in queries.items()},
        "kv": Binding("kv_row[None, :]", _KV, below=frozenset({"seqlen_k", "total_k"})),
        "kv_global": Binding("kv_packed[None, :]", _KV, below=frozenset({"seqlen_k", "total_k"})),
    }
