"""The user's mathematics as Triton lines: scores and masks of a tile, and which tiles a block visits."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

from attngen.lang.bands import Bands, Interval, bands, classify
from attngen.lang.emit import Binding, EmittedMany, TensorBinding, emit_many
from attngen.lang.facts import Facts
from attngen.lang.folding import PRODUCT, fold_logit
from attngen.lang.intervals import bounds
from attngen.lang.ir import MAX_SEQLEN, Const, Expr, Op, Type, Var, names
from attngen.lang.ranges import Range
from attngen.lang.segments import segments
from attngen.lang.simplify import FALSE, TRUE, add, ceildiv, floordiv, integer, make, maximum, minimum, sub
from attngen.lang.targets import Target
from attngen.plan.arguments import KERNEL_NAMES, argument_name, extent_name, pointer_name, strides
from attngen.plan.model import Plan

_Q, _KV = frozenset({"q"}), frozenset({"kv"})
_ELEMENT = _Q | _KV
_TILE_N = Var("BLOCK_N", Type.INT)
_WHOLE_TILES = Var("whole_tiles", Type.INT)
_KV_TILES = Var("kv_tiles", Type.INT)
_SEQLEN_K = Var("seqlen_k", Type.INT)


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


def _scalars(plan: Plan) -> dict[str, Binding]:
    """Return the bindings of what is the same for a whole block."""
    plain = ("b", "h", "hk", "heads", "kv_heads", "seqlen_q", "seqlen_k", "total_q", "total_k")
    bound = {name: Binding(name) for name in (*plain, "softmax_scale", "LOG2E")}
    for scalar in plan.variant.arguments:
        name = argument_name(scalar.name)
        bound[scalar.name] = Binding(f"({name} != 0)" if scalar.dtype == "bool" else name, wide=scalar.dtype == "int64")
    return bound


def _elements(plan: Plan, *, ragged: bool = False) -> dict[str, Binding]:
    """Return the bindings inside a step: rows along the first axis, keys along the second.

    Rows beyond the end repeat the last one and so stay inside their sequence; keys do, save in the ragged last tile.
    """
    keys = frozenset() if ragged else frozenset({"seqlen_k", "total_k"})
    return _scalars(plan) | {
        "q": Binding("q_row[:, None]", _Q, below=frozenset({"seqlen_q"})),
        "q_pos": Binding("q_pos[:, None]", _Q, below=frozenset({"seqlen_k"})),
        "q_global": Binding("q_packed[:, None]", _Q, below=frozenset({"total_q"})),
        "kv": Binding("kv_index[None, :]", _KV, below=keys),
        "kv_global": Binding("kv_packed[None, :]", _KV, below=keys),
        PRODUCT.name: Binding("s", _ELEMENT),
    }


def _corners(plan: Plan) -> dict[str, Binding]:
    """Return the bindings of the box symbols of the tile analysis."""
    return _scalars(plan) | {
        "q_lo": Binding("q_start"),
        "q_hi": Binding("q_hi"),
        "q_pos_lo": Binding("q_pos_lo"),
        "q_pos_hi": Binding("q_pos_hi"),
        "kv_lo": Binding("kv_lo"),
        "kv_hi": Binding("kv_hi"),
        "q_start": Binding("q_begin"),
        "kv_start": Binding("k_begin"),
        _TILE_N.name: Binding(_TILE_N.name),
        _WHOLE_TILES.name: Binding(_WHOLE_TILES.name),
        _KV_TILES.name: Binding(_KV_TILES.name),
    }


def _tensors(plan: Plan) -> dict[str, TensorBinding]:
    return {
        tensor.name: TensorBinding(
            pointer=pointer_name(tensor.name),
            strides=tuple(strides(tensor)),
            extents=tuple(extent_name(tensor, axis) for axis in range(len(tensor.shape))),
            dtype=tensor.dtype,
            shape=tensor.shape,
        )
        for tensor in plan.variant.tensors
    }


def _emit(
    plan: Plan,
    exprs: Sequence[Expr],
    bound: Mapping[str, Binding],
    *,
    prefix: str = "",
    taken: Iterable[str] = (),
    labels: Mapping[Expr, str] | None = None,
) -> EmittedMany:
    return emit_many(
        exprs,
        Target.TRITON,
        bound,
        _tensors(plan),
        prefix=prefix,
        fast_math=plan.fast_math,
        ranges=_known_ranges(plan),
        labels={**plan.variant.labels, **(labels or {})},
        taken={*taken, *KERNEL_NAMES, *(argument.name for argument in plan.arguments)} - set((labels or {}).values()),
    )


def _known_ranges(plan: Plan) -> dict[str, Range]:
    return {
        **plan.variant.ranges,
        _TILE_N.name: (plan.tile_n, plan.tile_n),
        _WHOLE_TILES.name: (0, MAX_SEQLEN // plan.tile_n),
        _KV_TILES.name: (0, MAX_SEQLEN // plan.tile_n + 1),
    }


def _facts(plan: Plan) -> Facts:
    facts = Facts.of(plan.variant)
    return Facts(_known_ranges(plan), facts.tensors)


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
        taken = _defined(before)
        scored = _emit(plan, [logit.value, logit.multiplier], bound, taken=taken)
        taken += _defined([*scored.hoisted, *scored.body])
        masked = _emit(plan, [variant.mask], bound, taken=taken)
        hoisted |= dict.fromkeys([*scored.hoisted, *masked.hoisted])
        score_lines = [*scored.body] if plain else [*scored.body, f"logit = {scored.results[0]}"]
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
        hoisted=(*_packed_rows(texts), *hoisted),
        whole=bodies[0],
        ragged=bodies[1],
        logit=name,
        multiplier=multiplier,
        uses_q_row=any(word in texts for word in ("q_row", "q_pos", "q_packed")),
        uses_q_pos="q_pos[" in texts,
    )


def _defined(lines: Iterable[str]) -> list[str]:
    """Return the names that statements assign, one entry for each assignment."""
    return [match[1] for line in lines if (match := re.match(r"(\w+) = ", line))]


def _packed_rows(texts: str) -> list[str]:
    return ["q_packed = q_begin + q_row"] if "q_packed" in texts else []


# --- which tiles a block visits -----------------------------------------------------------------------------


def ranges(plan: Plan) -> Visits:
    """Return the tiles of a block: by ranges of visible and of full tiles, or the hull that a listing goes through."""
    found = bands(plan.variant.mask, _facts(plan), over="kv")
    if plan.driver != "ranges":
        texts, lines = _hull(plan, found)
        if plan.driver == "tile_map":
            rows = "b * stride_tile_map_b + h * stride_tile_map_h + q_tile * stride_tile_map_q"
            lines.append(f"tile_map = tile_map_ptr + {rows}")
        ragged = _ragged([(texts["visible_lo"], texts["visible_hi"])])
        return Visits(_with_corners(lines, words(plan).lines), (), None, ragged)
    if plan.mask_code == "loop":
        pieces = segments(found, _TILE_N, _SEQLEN_K, _facts(plan))
        groups = {"full": list(pieces.full), "partial": list(pieces.partial)}
        whole: list[tuple[Expr, Expr]] = []
    else:
        bounded = Bands(found.visible, (), exact=True)
        groups = {"visible": list(segments(bounded, _TILE_N, _SEQLEN_K, _facts(plan)).partial)}
        whole = [_inward(interval) for interval in found.full]
    ends = {name: end for kind, spans in groups.items() for name, end in _numbered(kind, spans).items()}
    ends |= _numbered("full", whole)
    texts, lines = _emit_named(plan, {name: _settled(plan, end) for name, end in ends.items()})
    pairs = {kind: _pairs(texts, kind, len(spans)) for kind, spans in groups.items()}
    loops = tuple((kind, _loop(kind, spans, lines)) for kind, spans in pairs.items() if spans)
    outside = [_outside(lo, hi) for lo, hi in _pairs(texts, "full", len(whole))]
    condition = " & ".join(f"({test})" for test in outside) if len(outside) > 1 else "".join(outside)
    ragged = _ragged([pair for spans in pairs.values() for pair in spans])
    used = [text for _, loop in loops for text in (loop.lo, loop.hi)]
    return Visits(_with_corners(lines, [*used, condition]), loops, condition or None, ragged)


def _pairs(texts: Mapping[str, str], kind: str, count: int) -> list[tuple[str, str]]:
    """Return the texts of the ends of ``count`` ranges."""
    suffixes = [""] if count == 1 else [f"_{number}" for number in range(count)]
    return [(texts[f"{kind}_lo{suffix}"], texts[f"{kind}_hi{suffix}"]) for suffix in suffixes]


def _numbered(kind: str, spans: Sequence[tuple[Expr, Expr]]) -> dict[str, Expr]:
    """Return the ends of ranges by name: ``full_lo``, or ``full_lo_0`` where there are several."""
    named: dict[str, Expr] = {}
    for number, (lo, hi) in enumerate(spans):
        suffix = f"_{number}" if len(spans) > 1 else ""
        named |= {f"{kind}_lo{suffix}": lo, f"{kind}_hi{suffix}": hi}
    return named


def _inward(interval: Interval) -> tuple[Expr, Expr]:
    """Return the whole tiles inside an interval of keys."""
    lo = integer(0) if interval.lo is None else ceildiv(maximum(interval.lo, integer(0)), _TILE_N)
    if interval.hi is None:
        return lo, _WHOLE_TILES
    return lo, minimum(floordiv(maximum(interval.hi, integer(0)), _TILE_N), _WHOLE_TILES)


def _settled(plan: Plan, end: Expr) -> Expr:
    """Return a bound of tiles that reads well: whole tiles by their name, and dividends clamped to 0.

    Tiles are numbered from 0, so that clamping changes no range, and what is not negative divides plainly.
    """
    known = _known_ranges(plan)

    def clamped(x: Expr) -> Expr:
        return maximum(x, integer(0)) if bounds(x, known)[0] < 0 else x

    match end:
        case Op(op="floordiv", args=(x, divisor)) if divisor == _TILE_N:
            return _WHOLE_TILES if x == _SEQLEN_K else Op("floordiv", (clamped(x), divisor), Type.INT)
        case Op(op="add", args=(Op(op="floordiv", args=(x, divisor)), Const(value=1))) if divisor == _TILE_N:
            rounded_up = add(x, integer(1))
            if rounded_up == _SEQLEN_K:
                return _KV_TILES
            return Op("floordiv", (add(clamped(rounded_up), sub(divisor, integer(1))), divisor), Type.INT)
        case Op(op="min" | "max", args=(x, y)):
            x, y = _settled(plan, x), _settled(plan, y)
            # what is clamped already needs no 0 beside it
            return x if end.op == "max" and y == integer(0) and bounds(x, known)[0] >= 0 else make(end.op, x, y)
    return end


def _emit_named(plan: Plan, values: Mapping[str, Expr]) -> tuple[dict[str, str], list[str]]:
    """Return the text of each value, and the lines that give them their names."""
    labels: dict[Expr, str] = {}
    for name, value in values.items():
        labels.setdefault(value, name)
    code = _emit(plan, list(values.values()), _corners(plan), labels=labels)
    lines = list(code.hoisted)
    texts = {}
    for (name, value), text in zip(values.items(), code.results, strict=True):
        if _is_wide(value):
            text = f"{text}.to(tl.int32)" if text.isidentifier() else f"({text}).to(tl.int32)"
        if not re.fullmatch(r"\w+", text):
            lines.append(f"{name} = {text}")
            text = name
        texts[name] = text
    return texts, lines


def _is_wide(value: Expr) -> bool:
    """Whether the text of a value is an int64: tile numbers fit int32, and tensor maps ask for that."""
    if not isinstance(value, Op) or value.type is not Type.INT:
        return False
    return value.wide or any(_is_wide(argument) for argument in value.args)


def _loop(kind: str, ranges: Sequence[tuple[str, str]], lines: list[str]) -> Ranges:
    """Return the loop over the whole tiles of ranges, one after the other; add the lines that count them."""
    whole = [(lo, _at_most_whole(hi)) for lo, hi in ranges]
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


def _at_most_whole(end: str) -> str:
    return _WHOLE_TILES.name if end == _KV_TILES.name else f"tl.minimum({end}, {_WHOLE_TILES.name})"


def _ragged(ranges: Sequence[tuple[str, str]]) -> str:
    """Return the test whether a range holds the tile behind the whole ones; no range reaches beyond the last key."""
    tests = []
    for lo, hi in ranges:
        reached = f"{hi} > {_WHOLE_TILES.name}"
        tests.append(reached if lo == "0" else f"({lo} <= {_WHOLE_TILES.name}) & ({reached})")
    return tests[0] if len(tests) == 1 else " | ".join(f"({test})" for test in tests) or "whole_tiles < 0"


def _outside(lo: str, hi: str) -> str:
    """Return the test that a tile lies outside a range of full tiles."""
    after = f"tile >= {hi}"
    return after if lo == "0" else f"(tile < {lo}) | ({after})"


def _hull(plan: Plan, found: Bands) -> tuple[dict[str, str], list[str]]:
    """Return names and lines of the tiles between the first and the last visible key."""
    lows = [integer(0) if interval.lo is None else interval.lo for interval in found.visible] or [integer(0)]
    highs = [_SEQLEN_K if interval.hi is None else interval.hi for interval in found.visible] or [integer(0)]
    first = floordiv(reduce(minimum, lows), _TILE_N)
    last = ceildiv(minimum(reduce(maximum, highs), _SEQLEN_K), _TILE_N)
    texts, lines = _emit_named(plan, {"visible_lo": _settled(plan, first), "visible_hi": _settled(plan, last)})
    return texts, [*lines, *(f"{name} = {text}" for name, text in texts.items() if text != name)]


def _with_corners(lines: Sequence[str], others: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the lines behind definitions of the corners that they, or the ``others``, use."""
    texts = "\n".join([*lines, *others])
    corners = []
    if any(name in texts for name in ("q_hi", "q_pos_hi")):
        corners.append("q_hi = tl.minimum(q_start + BLOCK_M, seqlen_q) - 1")
    if "q_pos_lo" in texts:
        corners.append("q_pos_lo = q_start + (seqlen_k - seqlen_q)")
    if "q_pos_hi" in texts:
        corners.append("q_pos_hi = q_hi + (seqlen_k - seqlen_q)")
    return (*corners, *lines)


def words(plan: Plan) -> Words:
    """Return the lines that make the bits of 32 tiles: from the tile map, or by classifying them in the kernel."""
    needs_mask = "((partial_word >> index) & 1) != 0"
    if plan.driver == "ranges":
        return Words((), None)
    if plan.driver == "tile_map":
        return Words(
            (
                "partial_word = tl.load(tile_map + words + word)",
                "visible_word = tl.load(tile_map + word) | partial_word",
                "visible_count = count_bits(visible_word)",
            ),
            needs_mask,
        )
    may, must = classify(plan.variant.mask, _facts(plan))
    code = _emit(plan, [may, must], _corners(plan), prefix="tiles_")
    lines = ["tiles = word * 32 + tl.arange(0, 32)"]
    if {"kv_lo", "kv_hi"} & (names(may) | names(must)):
        lines += ["kv_lo = tiles * BLOCK_N", "kv_hi = kv_lo + (BLOCK_N - 1)"]
    listed = "(tiles >= visible_lo) & (tiles < tl.minimum(visible_hi, whole_tiles))"
    lines += [
        *code.hoisted,
        f"seen = {listed}" if may == TRUE else f"seen = {listed} & ({code.results[0]})",
        "bit = 1 << tl.arange(0, 32)",
        "visible_word = tl.sum(tl.where(seen, bit, 0))",
        "visible_count = tl.sum(seen.to(tl.int32))",
    ]
    if must == FALSE:
        return Words(tuple(lines), None)
    lines += [
        f"seen_whole = {code.results[1]}",
        "partial_word = tl.sum(tl.where(seen & ~seen_whole, bit, 0))",
    ]
    return Words(tuple(lines), needs_mask)


def classifier(plan: Plan) -> Classifier:
    """Return the lines of the kernel that computes the tile map: the mask of every element, tile by tile."""
    found = bands(plan.variant.mask, _facts(plan), over="kv")
    _, lines = _hull(plan, found)
    mask = _emit(plan, [plan.variant.mask], _elements(plan), taken=_defined(lines))
    body = list(mask.body)
    texts = "\n".join([*mask.hoisted, *body, *mask.results])
    if "kv_packed" in texts:
        body.insert(0, "kv_packed = k_begin + kv_index")
    body.append(f"visible = {mask.results[0]}")
    return Classifier(_with_corners(lines), (*_packed_rows(texts), *mask.hoisted), tuple(body))
