"""The user's mathematics as Triton lines: scores and masks of a tile, and which tiles a block visits."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

from attngen.lang.bands import Bands, bands, classify
from attngen.lang.emit import Binding, EmittedMany, TensorBinding, emit_many
from attngen.lang.facts import Facts
from attngen.lang.folding import PRODUCT, fold_logit
from attngen.lang.intervals import bounds
from attngen.lang.ir import MAX_SEQLEN, Const, Expr, Op, Type, Var, names
from attngen.lang.ranges import Range
from attngen.lang.segments import segments
from attngen.lang.simplify import (
    FALSE,
    TRUE,
    add,
    and_,
    ceildiv,
    floordiv,
    gt,
    integer,
    lt,
    make,
    maximum,
    minimum,
    or_,
    sub,
)
from attngen.lang.targets import Target
from attngen.plan.arguments import KERNEL_NAMES, argument_name, extent_name, pointer_name, strides
from attngen.plan.model import Plan

_Q, _KV = frozenset({"q"}), frozenset({"kv"})
_ELEMENT = _Q | _KV
_TILE_N = Var("BLOCK_N", Type.INT)
_WHOLE_TILES = Var("whole_tiles", Type.INT)
_WHOLE_KEYS = Var("whole_keys", Type.INT)
_SEQLEN_K = Var("seqlen_k", Type.INT)


@dataclass(frozen=True, slots=True)
class Body:
    """Lines of one step, and the texts of the logit and of its multiplier."""

    lines: tuple[str, ...]
    logit: str
    multiplier: str


@dataclass(frozen=True, slots=True)
class Math:
    """Score and mask of the three kinds of tile, and the lines that come before the loops."""

    hoisted: tuple[str, ...]
    full: Body
    partial: Body
    tail: Body
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
    """The lines that find the tiles of a block, and the loops over full and partial tiles (None: there are none)."""

    lines: tuple[str, ...]
    full: Ranges | None
    partial: Ranges | None


@dataclass(frozen=True, slots=True)
class Words:
    """The lines that list 32 tiles as bits, and whether any tile can be full."""

    lines: tuple[str, ...]
    full: bool


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


def _elements(plan: Plan, *, tail: bool = False) -> dict[str, Binding]:
    """Return the bindings inside a step: rows along the first axis, keys along the second.

    Rows stay inside their sequence, as those beyond the end repeat the last one; keys do save in the ``tail``.
    """
    keys = frozenset() if tail else frozenset({"seqlen_k", "total_k"})
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
        _WHOLE_KEYS.name: Binding(_WHOLE_KEYS.name),
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
        _WHOLE_KEYS.name: (0, MAX_SEQLEN),
    }


def _facts(plan: Plan) -> Facts:
    facts = Facts.of(plan.variant)
    return Facts(_known_ranges(plan), facts.tensors)


# --- score and mask of a tile -------------------------------------------------------------------------------


def math(plan: Plan, before: Iterable[str] = ()) -> Math:
    """Return the lines of the three kinds of tile; what does not depend on the key is computed once, before.

    ``before`` are lines of the kernel that stand earlier: their names are not used again.
    """
    taken = _defined(before)
    variant, bound = plan.variant, _elements(plan)
    logit = fold_logit(variant.score, variant.ranges, fast_math=plan.fast_math)
    scored = _emit(plan, [logit.value, logit.multiplier], bound, taken=taken)
    masked = _emit(plan, [logit.value, logit.multiplier, variant.mask], bound, taken=taken)
    ragged = _emit(plan, [logit.value, logit.multiplier, variant.mask], _elements(plan, tail=True), taken=taken)
    hoisted = _united(scored.hoisted, masked.hoisted, ragged.hoisted)
    if hoisted is None:
        scored = _emit(plan, [logit.value, logit.multiplier], bound, prefix="score_", taken=taken)
        hoisted = (*scored.hoisted, *masked.hoisted)
    plain = variant.score is None
    multiplier = "scale_log2e" if plain else scored.results[1]
    mask = masked.results[2] if variant.masked else None
    beyond = "kv_index[None, :] < seqlen_k"
    bodies = {
        "full": _body(scored, None, plain, multiplier),
        "partial": _body(masked, mask, plain, multiplier),
        "tail": _body(ragged, f"({beyond}) & ({mask})" if mask else beyond, plain, multiplier),
    }
    texts = "\n".join([*hoisted, *(line for body in bodies.values() for line in body.lines)])
    hoisted = (*_packed_rows(texts), *hoisted)
    uses_row = any(name in texts for name in ("q_row", "q_pos", "q_packed"))
    return Math(hoisted, **bodies, uses_q_row=uses_row, uses_q_pos="q_pos" in texts)


def _body(code: EmittedMany, visible: str | None, plain: bool, multiplier: str) -> Body:
    name = "s" if plain else "logit"
    lines = list(code.body)
    if any("kv_packed" in line for line in (*lines, *code.results)):
        lines.insert(0, "kv_packed = k_begin + kv_index")
    if not plain:
        lines.append(f"logit = {code.results[0]}")
    if visible is not None:
        lines += [f"visible = {visible}", f'{name} = tl.where(visible, {name}, float("-inf"))']
    return Body(tuple(lines), name, multiplier)


def _united(*parts: Sequence[str]) -> tuple[str, ...] | None:
    """Return all statements without repetition, or None if they give one name two meanings."""
    lines = list(dict.fromkeys(line for part in parts for line in part))
    defined = _defined(lines)
    return tuple(lines) if len(set(defined)) == len(defined) else None


def _defined(lines: Iterable[str]) -> list[str]:
    """Return the names that statements assign, one entry for each assignment."""
    return [match[1] for line in lines if (match := re.match(r"(\w+) = ", line))]


def _packed_rows(texts: str) -> list[str]:
    return ["q_packed = q_begin + q_row"] if "q_packed" in texts else []


# --- which tiles a block visits -----------------------------------------------------------------------------


def ranges(plan: Plan) -> Visits:
    """Return the tiles of a block: by ranges of full and partial tiles, or the hull that a listing goes through."""
    found = bands(plan.variant.mask, _facts(plan), over="kv")
    tail = _tail(found)
    if plan.driver != "ranges":
        lines = _hull_lines(plan, found, tail)
        if plan.driver == "tile_map":
            rows = "b * stride_tile_map_b + h * stride_tile_map_h + q_tile * stride_tile_map_q"
            lines.append(f"tile_map = tile_map_ptr + {rows}")
        return Visits(_with_corners(lines), None, None)
    pieces = segments(found, _TILE_N, _WHOLE_KEYS, _facts(plan))
    ends: dict[str, Expr] = {}
    for kind, spans in (("full", pieces.full), ("partial", pieces.partial)):
        for number, (lo, hi) in enumerate(spans):
            suffix = f"_{number}" if len(spans) > 1 else ""
            ends |= {f"{kind}_lo{suffix}": _settled(plan, lo), f"{kind}_hi{suffix}": _settled(plan, hi)}
    texts, lines = _emit_named(plan, ends, tail)
    full = _loop("full", len(pieces.full), texts, lines)
    partial = _loop("partial", len(pieces.partial), texts, lines)
    return Visits(_with_corners(lines), full, partial)


def _settled(plan: Plan, end: Expr) -> Expr:
    """Return a bound of tiles that reads well: whole tiles by their name, and dividends clamped to 0.

    Tiles are numbered from 0, so that clamping changes no range, and what is not negative divides plainly.
    """
    known = _known_ranges(plan)

    def clamped(x: Expr) -> Expr:
        return maximum(x, integer(0)) if bounds(x, known)[0] < 0 else x

    match end:
        case Op(op="floordiv", args=(x, divisor)) if divisor == _TILE_N:
            return _WHOLE_TILES if x == _WHOLE_KEYS else Op("floordiv", (clamped(x), divisor), Type.INT)
        case Op(op="add", args=(Op(op="floordiv", args=(x, divisor)), Const(value=1))) if divisor == _TILE_N:
            rounded_up = add(x, integer(1))
            if rounded_up == _WHOLE_KEYS:
                return _WHOLE_TILES
            return Op("floordiv", (add(clamped(rounded_up), sub(divisor, integer(1))), divisor), Type.INT)
        case Op(op="min" | "max", args=(x, y)):
            x, y = _settled(plan, x), _settled(plan, y)
            # what is clamped already needs no 0 beside it
            return x if end.op == "max" and y == integer(0) and bounds(x, known)[0] >= 0 else make(end.op, x, y)
    return end


def _emit_named(plan: Plan, values: Mapping[str, Expr], tail: Expr) -> tuple[dict[str, str], list[str]]:
    """Return the text of each value, and the lines that give them their names and say if there is a tail."""
    labels: dict[Expr, str] = {}
    for name, value in values.items():
        labels.setdefault(value, name)
    code = _emit(plan, [*values.values(), tail], _corners(plan), labels=labels)
    lines = list(code.hoisted)
    texts = {}
    for (name, value), text in zip(values.items(), code.results, strict=False):
        if _is_wide(value):
            text = f"({text}).to(tl.int32)"
        if not re.fullmatch(r"\w+", text):
            lines.append(f"{name} = {text}")
            text = name
        texts[name] = text
    return texts, [*lines, *_tail_line(code.results[-1], tail)]


def _is_wide(value: Expr) -> bool:
    """Whether the text of a value is an int64: tile numbers fit int32, and tensor maps ask for that."""
    if not isinstance(value, Op) or value.type is not Type.INT:
        return False
    return value.wide or any(_is_wide(argument) for argument in value.args)


def _loop(kind: str, count: int, texts: Mapping[str, str], lines: list[str]) -> Ranges | None:
    """Return the loop over ``count`` ranges one after the other; add the lines that count their tiles."""
    if count == 0:
        return None
    if count == 1:
        return Ranges(texts[f"{kind}_lo"], texts[f"{kind}_hi"])
    jumps: list[str] = []
    before = ""
    for number in range(count):
        lo, hi = texts[f"{kind}_lo_{number}"], texts[f"{kind}_hi_{number}"]
        length = f"tl.maximum({hi} - {lo}, 0)"
        lines.append(f"{kind}_until_{number} = {before + ' + ' if before else ''}{length}")
        if before:
            jumps.append(f"tile = tl.where(i < {before}, tile, {lo} + i - {before})")
        before = f"{kind}_until_{number}"
    first = texts[f"{kind}_lo_0"]
    return Ranges("0", before, first="i" if first == "0" else f"{first} + i", jumps=tuple(jumps))


def _tail(found: Bands) -> Expr:
    """Return whether any row sees a key of the ragged last tile."""
    seen: Expr = FALSE
    for interval in found.visible:
        reached = TRUE if interval.hi is None else gt(interval.hi, _WHOLE_KEYS)
        begun = TRUE if interval.lo is None else lt(interval.lo, _SEQLEN_K)
        seen = or_(seen, and_(begun, reached))
    return and_(lt(_WHOLE_KEYS, _SEQLEN_K), seen)


def _tail_line(text: str, tail: Expr) -> list[str]:
    if tail == FALSE:
        return []
    return [f"tail_tiles = ({text}).to(tl.int32)"]


def _hull_lines(plan: Plan, found: Bands, tail: Expr) -> list[str]:
    """Return the lines that name the tiles between the first and the last visible key."""
    lows = [integer(0) if interval.lo is None else interval.lo for interval in found.visible] or [integer(0)]
    highs = [_SEQLEN_K if interval.hi is None else interval.hi for interval in found.visible] or [integer(0)]
    first = floordiv(maximum(reduce(minimum, lows), integer(0)), _TILE_N)
    last = ceildiv(maximum(minimum(reduce(maximum, highs), _WHOLE_KEYS), integer(0)), _TILE_N)
    texts, lines = _emit_named(plan, {"visible_lo": _settled(plan, first), "visible_hi": _settled(plan, last)}, tail)
    return [*(f"{name} = {text}" for name, text in texts.items() if text != name), *lines]


def _with_corners(lines: Sequence[str]) -> tuple[str, ...]:
    """Return the lines behind definitions of the corners that they use."""
    texts = "\n".join(lines)
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
    if plan.driver == "ranges":
        return Words((), False)
    if plan.driver == "tile_map":
        return Words(
            (
                "full_word = tl.load(tile_map + word)",
                "partial_word = tl.load(tile_map + words + word)",
                "full_count = count_bits(full_word)",
                "partial_count = count_bits(partial_word)",
            ),
            True,
        )
    may, must = classify(plan.variant.mask, _facts(plan))
    code = _emit(plan, [may, must], _corners(plan), prefix="tiles_")
    lines = ["tiles = word * 32 + tl.arange(0, 32)"]
    if {"kv_lo", "kv_hi"} & (names(may) | names(must)):
        lines += ["kv_lo = tiles * BLOCK_N", "kv_hi = kv_lo + (BLOCK_N - 1)"]
    lines += [*code.hoisted, "listed = (tiles >= visible_lo) & (tiles < visible_hi)", "bit = 1 << tl.arange(0, 32)"]
    partial = "listed" if may == TRUE else f"listed & ({code.results[0]})"
    if must != FALSE:
        lines += [
            f"seen_whole = listed & ({code.results[1]})",
            "full_word = tl.sum(tl.where(seen_whole, bit, 0))",
            "full_count = tl.sum(seen_whole.to(tl.int32))",
        ]
        partial += " & ~seen_whole"
    lines += [
        f"seen_partly = {partial}",
        "partial_word = tl.sum(tl.where(seen_partly, bit, 0))",
        "partial_count = tl.sum(seen_partly.to(tl.int32))",
    ]
    return Words(tuple(lines), must != FALSE)


def classifier(plan: Plan) -> Classifier:
    """Return the lines of the kernel that computes the tile map: the mask of every element, tile by tile."""
    found = bands(plan.variant.mask, _facts(plan), over="kv")
    lines = _hull_lines(plan, found, FALSE)
    mask = _emit(plan, [plan.variant.mask], _elements(plan), taken=_defined(lines))
    body = list(mask.body)
    texts = "\n".join([*mask.hoisted, *body, *mask.results])
    if "kv_packed" in texts:
        body.insert(0, "kv_packed = k_begin + kv_index")
    body.append(f"visible = {mask.results[0]}")
    return Classifier(_with_corners(lines), (*_packed_rows(texts), *mask.hoisted), tuple(body))
