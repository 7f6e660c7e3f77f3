"""User mathematics in the templates of all languages: bindings, tensors, and ends of tile ranges."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Literal

from attngen.lang.bands import Bands, Interval
from attngen.lang.divisors import prepared, wide_names
from attngen.lang.emit import Binding, EmittedMany, TensorBinding, emit_many
from attngen.lang.facts import KV_START, Q_START, Facts
from attngen.lang.folding import LOG2E, SOFTMAX_SCALE
from attngen.lang.intervals import bounds
from attngen.lang.ir import MAX_SEQLEN, Const, Expr, Op, Type, Var, holds_int64, names, own, spelled, tensors, walk
from attngen.lang.languages import Target
from attngen.lang.overflow import narrow, narrow_divisors
from attngen.lang.ranges import INT32, Range
from attngen.lang.simplify import add, ceildiv, floordiv, integer, make, maximum, minimum, sub
from attngen.lang.statements import Code, Statement, leaf, written
from attngen.plan.model import Plan
from attngen.plan.symbols import PREFIX, argument_name, divisor_name, extent_name, pointer_name, strides
from attngen.render.bias_symbols import bias_ranges

TILE_N, WHOLE_TILES, KV_TILES = own("BLOCK_N"), own("whole_tiles"), own("kv_tiles")
SEQLEN_K = Var("seqlen_k", Type.INT)


@dataclass(frozen=True, slots=True)
class Along:
    """The axis along which a block goes from tile to tile: its tile, how many there are whole and in all, its length.

    ``tiles_text`` is how kernels call the number of all; that of whole ones is ``whole_tiles`` in each kernel.
    """

    axis: Literal["kv", "q"]
    tile: Var
    whole: Var
    tiles: Var
    length: Var
    tiles_text: str
    start: str  # of the box that goes along, as kernels call it
    keys: str | None = None  # of the box, if it is not a tile of them


KEYS = Along("kv", TILE_N, WHOLE_TILES, KV_TILES, SEQLEN_K, "kv_tiles", "q_start")
QUERIES = Along(
    "q",
    own("tile of queries"),
    own("whole tiles of queries"),
    own("tiles of queries"),
    Var("seqlen_q", Type.INT),
    "q_tiles",
    "kv_start",
)
#: The same for the keys of one consumer of a block.
OWN_QUERIES = replace(QUERIES, start="own_start", keys="kOwnKeys")


@dataclass(frozen=True, slots=True)
class Language:
    """Names in a target language for what all targets share, and its conversion of an int64 to an int32."""

    target: Target
    tile_m: str
    tile_n: str
    log2e: str
    narrow: Callable[[Code], Code]


TRITON = Language(
    Target.TRITON,
    "BLOCK_M",
    "BLOCK_N",
    "LOG2E",
    lambda value: written("{}.to(tl.int32)" if value.text.isidentifier() else "({}).to(tl.int32)", value),
)
CUDA = Language(Target.CUDA, "kBlockM", "kBlockN", "kLog2e", lambda value: written("static_cast<int>({})", value))


#: Factor of the products of quantized operands: the softmax scale times the scales of Q and K.
LOGIT_SCALE = "logit_scale"

#: Lengths that may be 0 while a block is at work, by the axis along which it goes.
_LENGTHS = {"kv": ("seqlen_k",), "q": ("seqlen_q", "seqlen_k")}


def scalar_bindings(plan: Plan, language: Language) -> dict[str, Binding]:
    """Return the bindings of what is the same for a whole block."""
    plain = ("b", "h", "hk", "heads", "kv_heads", "seqlen_q", "seqlen_k", "total_q", "total_k", "softmax_scale")
    bound = {name: Binding(name) for name in plain}
    if plan.scaled_logits:
        bound[SOFTMAX_SCALE.name] = Binding(LOGIT_SCALE)
    bound[LOG2E.name] = Binding(language.log2e)
    for tensor in plan.variant.tensors:  # an extent that nobody declares is what the first tensor that names it has
        for axis, extent in enumerate(tensor.shape):
            if isinstance(extent, str):
                bound.setdefault(extent, Binding(extent_name(tensor, axis)))
    for scalar in plan.variant.arguments:
        name = argument_name(scalar.name)
        pattern = f"({{{name}}} != 0)" if scalar.dtype == "bool" else name
        bound[scalar.name] = Binding(pattern, wide=scalar.dtype == "int64")
    bound |= {each.symbol.name: Binding(divisor_name(each)) for each in plan.divisors}
    return bound


def start_bindings() -> dict[str, Binding]:
    """Return the bindings of where a sequence begins in packed tensors."""
    return {Q_START.name: Binding("q_begin"), KV_START.name: Binding("k_begin")}


def corner_bindings(plan: Plan, language: Language, along: Along = KEYS) -> dict[str, Binding]:
    """Return the bindings of the box symbols of the tile analysis, for a block that goes ``along`` an axis."""
    names = ("q_lo", "q_hi", "q_pos_lo", "q_pos_hi", "h_lo", "h_hi", "kv_lo", "kv_hi")
    starts = {"q_lo" if along.axis == "kv" else "kv_lo": along.start}
    return scalar_bindings(plan, language) | {
        **{name: Binding(starts.get(name, name)) for name in names},
        along.whole.name: Binding(spelled(WHOLE_TILES.name)),
        along.tiles.name: Binding(along.tiles_text),
        **start_bindings(),
        QUERIES.tile.name: Binding(language.tile_m),
        TILE_N.name: Binding(along.keys or language.tile_n),
    }


def tensor_bindings(plan: Plan) -> dict[str, TensorBinding]:
    """Return pointer, strides and extents of each of the variant's tensors."""
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


def emit_for(
    plan: Plan,
    language: Language,
    exprs: Sequence[Expr],
    bound: Mapping[str, Binding],
    *,
    prefix: str = "",
    taken: Iterable[str] = (),
    labels: Mapping[Expr, str] | None = None,
    inner: str = "kv",
    ranges: Mapping[str, Range] | None = None,
) -> EmittedMany:
    """Return expressions as text of a kernel; temporaries are names of the user, save those that ``labels`` gives.

    They avoid ``taken``. ``inner`` is the axis along which the kernel loops; ``ranges`` are those of names that the
    variant does not have.
    """
    # what does not depend on the key is computed for sequences without keys, too, and the other way round
    ranges = known_ranges(plan) | dict(ranges or {}) | dict.fromkeys(_LENGTHS[inner], (0, MAX_SEQLEN))
    named = {expr: f"{PREFIX}{prefix}{name}" for expr, name in plan.variant.labels.items()} | dict(labels or {})
    if language.target is Target.CUDA:
        facts = Facts(ranges, Facts.of(plan.variant).tensors)
        exprs = [_with_divisors(plan, expr, facts) for expr in exprs]
        named = {_with_divisors(plan, expr, facts): name for expr, name in named.items()}
        if any(map(_divides_by_int64, exprs)):
            exprs = [narrow_divisors(expr, facts) for expr in exprs]
            named = {narrow_divisors(expr, facts): name for expr, name in named.items()}
    return emit_many(
        exprs,
        language.target,
        bound,
        tensor_bindings(plan),
        prefix=f"{PREFIX}{prefix}",
        fast_math=plan.fast_math,
        approximate=plan.approximate,
        ranges=ranges,
        labels=named,
        taken=taken,
        inner=inner,
    )


def _with_divisors(plan: Plan, expr: Expr, facts: Facts) -> Expr:
    return prepared(expr, plan.variant, facts) if plan.divisors else expr


def _divides_by_int64(expr: Expr) -> bool:
    """Whether an expression has an integer division whose divisor is an int64."""
    return any(isinstance(n, Op) and n.op in ("floordiv", "mod") and holds_int64(n.args[1]) for n in walk(expr))


def known_ranges(plan: Plan) -> dict[str, Range]:
    """Return the ranges of all names of a kernel's expressions."""
    return {
        **plan.variant.ranges,
        **{each.symbol.name: each.range for each in plan.divisors},
        **bias_ranges(plan),
        TILE_N.name: (plan.tile_n, plan.tile_n),
        WHOLE_TILES.name: (0, MAX_SEQLEN // plan.tile_n),
        KV_TILES.name: (0, MAX_SEQLEN // plan.tile_n + 1),
        QUERIES.tile.name: (plan.tile_m, plan.tile_m),
        QUERIES.whole.name: (0, MAX_SEQLEN // plan.tile_m),
        QUERIES.tiles.name: (0, MAX_SEQLEN // plan.tile_m + 1),
    }


def facts_of(plan: Plan) -> Facts:
    """Ranges of a kernel's names, and facts of its tensors."""
    facts = Facts.of(plan.variant)
    return Facts(known_ranges(plan), facts.tensors)


def numbered(kind: str, spans: Sequence[tuple[Expr, Expr]]) -> dict[str, Expr]:
    """Return the ends of ranges by name: ``full_lo``, or ``full_lo_0`` where there are several."""
    named: dict[str, Expr] = {}
    for number, (lo, hi) in enumerate(spans):
        suffix = f"_{number}" if len(spans) > 1 else ""
        named |= {f"{kind}_lo{suffix}": lo, f"{kind}_hi{suffix}": hi}
    return named


def inward(plan: Plan, interval: Interval, along: Along = KEYS) -> tuple[Expr, Expr]:
    """Return the whole tiles inside an interval of the axis."""
    lo: Expr = integer(0)
    if interval.lo is not None:
        first = maximum(interval.lo, integer(0))
        rounded_up = add(first, sub(along.tile, integer(1)))
        if bounds(rounded_up, known_ranges(plan))[1] > INT32[1]:  # beyond the last position all are alike
            first = minimum(first, along.length)
        lo = ceildiv(first, along.tile)
    if interval.hi is None:
        return lo, along.whole
    return lo, minimum(floordiv(maximum(interval.hi, integer(0)), along.tile), along.whole)


def settled(plan: Plan, end: Expr, along: Along = KEYS) -> Expr:
    """Return a bound of tiles that reads well: whole tiles by their name, and dividends clamped to 0.

    Tiles are numbered from 0, so that clamping changes no range, and what is not negative divides plainly.
    """
    known = known_ranges(plan)

    def clamped(x: Expr) -> Expr:
        return maximum(x, integer(0)) if bounds(x, known)[0] < 0 else x

    match end:
        case Op(op="floordiv", args=(x, divisor)) if divisor == along.tile:
            return along.whole if x == along.length else Op("floordiv", (clamped(x), divisor), Type.INT)
        case Op(op="add", args=(Op(op="floordiv", args=(x, divisor)), Const(value=1))) if divisor == along.tile:
            rounded_up = add(x, integer(1))
            if rounded_up == along.length:
                return along.tiles
            return Op("floordiv", (add(clamped(rounded_up), sub(divisor, integer(1))), divisor), Type.INT)
        case Op(op="min" | "max", args=(x, y)):
            x, y = settled(plan, x, along), settled(plan, y, along)
            # what is clamped already needs no 0 beside it
            return x if end.op == "max" and y == integer(0) and bounds(x, known)[0] >= 0 else make(end.op, x, y)
    return end


def multiplies_int64(end: Expr) -> bool:
    """Whether a product in a bound of tiles is an int64."""
    return any(isinstance(node, Op) and node.op == "mul" and holds_int64(node) for node in walk(end))


def narrowed(plan: Plan, end: Expr, along: Along = KEYS) -> Expr:
    """Return a bound of tiles that is computed in int32 as far as can be: int64 takes two registers for each value."""
    return narrow(end, along.length, along.tile, along.tiles, facts_of(plan).of_tiles())


def hull_ends(plan: Plan, visible: Bands, along: Along = KEYS) -> dict[str, Expr]:
    """Return the tiles between the first and the last visible position, as ``visible_lo`` and ``visible_hi``."""
    lows = [integer(0) if interval.lo is None else interval.lo for interval in visible.visible] or [integer(0)]
    highs = [along.length if interval.hi is None else interval.hi for interval in visible.visible] or [integer(0)]
    first = floordiv(reduce(minimum, lows), along.tile)
    last = ceildiv(minimum(reduce(maximum, highs), along.length), along.tile)
    return {"visible_lo": settled(plan, first, along), "visible_hi": settled(plan, last, along)}


def emit_named(
    plan: Plan, language: Language, values: Mapping[str, Expr], along: Along = KEYS
) -> tuple[dict[str, Code], list[Statement]]:
    """Return each value as a name or a literal, and the statements that give them their names."""
    values = {name: _reachable(plan, value, along) for name, value in values.items()}
    labels: dict[Expr, str] = {}
    for name, value in values.items():
        if language.target is not Target.CUDA or not is_wide(plan, value):  # there a name has one type
            labels.setdefault(value, name)
    code = emit_for(plan, language, list(values.values()), corner_bindings(plan, language, along), labels=labels)
    dialect = language.target.dialect
    statements = list(code.hoisted)
    named = {}
    for (name, value), piece in zip(values.items(), code.results, strict=True):
        if is_wide(plan, value):
            piece = language.narrow(piece)
        if not (piece.text.isidentifier() or piece.text.isdecimal()):
            statements.append(dialect.declare(name, Type.INT, False, piece))
            piece = leaf(name)
        named[name] = piece
    return named, statements


def _reachable(plan: Plan, tile: Expr, along: Along) -> Expr:
    """Return a tile that fits int32: all that lie beyond the last one are alike, and none lies before the first."""
    low, high = bounds(tile, known_ranges(plan))
    tile = tile if high <= INT32[1] else minimum(tile, add(along.tiles, integer(1)))
    return tile if low >= INT32[0] else maximum(tile, integer(0))


def is_wide(plan: Plan, value: Expr) -> bool:
    """Whether a value is an int64: as it was widened, or since a scalar or a tensor of int64 is part of it."""
    return holds_int64(value) or not wide_names(plan.variant).isdisjoint(names(value) | tensors(value))


def in_product(value: Code, language: Language) -> Code:
    """Return a value as a factor: in parentheses unless it is a name, a literal, a call or a subscript."""
    return value.within(language.target.dialect.atom)
