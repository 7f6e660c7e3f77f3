"""Elements that a score reads at ``[..., q, kv]``, where a loader brings tiles of them: what consumers read instead."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from attngen.dtypes import dtype
from attngen.lang.biases import LANES, MOST_HELD, asked_by, box_bytes, element_bytes, hiding_entries, lookups
from attngen.lang.emit import Binding
from attngen.lang.folding import LOG2E
from attngen.lang.ir import Const, Expr, Load, Op, Type, Var, names, own, rewrite, spelled
from attngen.lang.literals import fold_literals
from attngen.lang.naming import label
from attngen.lang.statements import Statement, written
from attngen.lang.variant import Tensor
from attngen.plan.model import Plan
from attngen.plan.symbols import extent_name, map_name, strides
from attngen.render.bias_symbols import bias_ranges, bias_symbols
from attngen.render.cuda_statements import int_constant
from attngen.render.expressions import CUDA, emit_for, scalar_bindings

#: Axes up to which there is a copy of tiles that are read once.
_MOST_AXES_ONCE = 4

#: The number of a lane.
LANE = own("lane")
_LANE_ABOVE = Op("add", (LANE, Const(LANES, Type.INT)), Type.INT)
_MINUS_INFINITY = Const(-math.inf, Type.FLOAT)


@dataclass(frozen=True, slots=True)
class Bias:
    """A bias whose tiles the loader copies, as templates see it."""

    load: Load
    symbol: Var  # for an element of a lane, in expressions
    tile: str  # name of the tile in kernels
    pairs: str  # name of the registers with a lane's elements of 16 keys, or in a backward of 16 queries
    words: int  # number of these registers
    element: str  # CUDA type
    bytes: int  # of an element
    before: int  # for each pair, of the biases that lie before this one in a stage
    box_bytes: int  # of a row of one copy, over which it is swizzled
    map: str  # name of the tensor map
    places: tuple[str, ...]  # coordinates of a tile along the axes before that of queries, the last axis first
    load_box: str  # what copies a tile: one that no other head reads need not stay in L2
    lines: tuple[Statement, ...]  # that compute these coordinates


def biases_of(plan: Plan) -> tuple[Bias, ...]:
    """The biases whose tiles a plan has room for."""
    before = accumulate(element_bytes(plan.variant, plan.structure.bias_bytes), initial=0)
    return tuple(
        _bias(plan, load, symbol, at) for (load, symbol), at in zip(bias_symbols(plan).items(), before, strict=False)
    )


def _bias(plan: Plan, load: Load, symbol: Var, before: int) -> Bias:
    tensor = next(one for one in plan.variant.tensors if one.name == load.tensor)
    tile = spelled(symbol.name)
    suffix = tile.removeprefix("bias")
    places, lines = _places(plan, tensor, load.indices[:-2], tile)
    once = any("h" in names(index) for index in load.indices[:-2]) and not any(map(_is_shared, load.indices[:-2]))
    return Bias(
        load=load,
        symbol=symbol,
        tile=tile,
        pairs=f"bias_pairs{suffix}",
        words=_words(plan, dtype(tensor.dtype).bytes),
        element=dtype(tensor.dtype).cuda,
        bytes=dtype(tensor.dtype).bytes,
        before=before,
        box_bytes=box_bytes(_keys_of_tile(plan), dtype(tensor.dtype).bytes),
        map=map_name(tensor.name),
        places=tuple(reversed(places)) or ("0",),  # a tensor map has at least three axes
        load_box="load_box_once" if once and len(load.indices) <= _MOST_AXES_ONCE else "load_box",
        lines=lines,
    )


def _is_shared(index: Expr) -> bool:
    """Whether batch entries or heads have an index in common, as with ``b // rows``."""
    return isinstance(index, Op)


def _places(plan: Plan, tensor: Tensor, indices: Sequence[Expr], tile: str) -> tuple[list[str], tuple[Statement, ...]]:
    """The coordinates of a tile along the axes before that of queries, and the lines that compute them."""
    code = emit_for(plan, CUDA, indices, scalar_bindings(plan, CUDA), prefix=f"{tile}_")
    steps, lines, places = strides(tensor), [*code.hoisted, *code.body], []
    for axis, (index, value) in enumerate(zip(indices, code.results, strict=True)):
        if isinstance(index, Const):
            places.append(str(index.value))
            continue
        place, step, extent = f"{tile}_{label(index) or axis}", steps[axis], extent_name(tensor, axis)
        # the tensor map of an axis that the call expanded has one place
        lines.append(int_constant(place, written(f"{{{step}}} == 0 && {{{extent}}} > 1 ? 0 : {{}}", value)))
        places.append(place)
    return places, tuple(lines)


def _keys_of_tile(plan: Plan) -> int:
    """Keys of a tile of a bias: those of a tile of K, or in a backward those of one consumer."""
    return plan.tile_n if plan.direction == "forward" else plan.tile_n // plan.structure.consumers


def _words(plan: Plan, size: int) -> int:
    """Registers for the elements that a lane reads of 16 keys or queries: one for two neighbours that a single load
    brings, else one for each element."""
    return 4 if size == 2 or (size == 1 and plan.direction == "forward") else 8


def bias_bindings(plan: Plan, element: str, function: str = "element_of") -> dict[str, Binding]:
    """The bindings of the symbols of biases; ``element`` is the pattern of an element's number in the row of a lane.
    ``function`` gives its value (``element_of``), or a word whose lowest bits it is (``bits_of``)."""
    return {
        each.symbol.name: Binding(
            f"{function}<{each.element}>({{{each.pairs}}}, {element}, {{row}})", frozenset({"q", "kv"})
        )
        for each in biases_of(plan)
    }


def with_biases(plan: Plan, value: Expr) -> Expr:
    """An expression with symbols for the biases that come as tiles."""
    symbols = bias_symbols(plan)
    if not symbols:
        return value
    return rewrite(rewrite(value, fold_literals), lambda node: symbols.get(node) if isinstance(node, Load) else None)


@dataclass(frozen=True, slots=True)
class Lookup:
    """A value of each entry of a small table: every lane of a warp holds that of one entry, or of two, and asks for
    others by shuffles with an integer bias as the index."""

    symbol: Var  # for the value that a lane asked for, in expressions
    values: tuple[Expr, ...]  # of the entries that a lane holds: of its own number, and of 32 more
    index: Var  # symbol of the integer bias
    more: int  # entries that are added to a negative index
    sure: bool  # the range of the index says that a lane holds its entry

    @property
    def held(self) -> tuple[str, ...]:
        """Names of the variables with the values that a lane holds."""
        name = f"{spelled(self.symbol.name)}_held"
        return (name, f"{name}_above")[: len(self.values)]


def with_lookups(plan: Plan, values: Sequence[Expr]) -> tuple[list[Expr], tuple[Lookup, ...]]:
    """Expressions, already ``with_biases``, with symbols for entries of small tables, and the lookups that these stand
    for.

    A constant factor of an entry, such as log2(e), becomes a part of the value that lanes hold.
    """
    most = LANES if plan.direction == "forward" else MOST_HELD
    tables = lookups(plan.variant, plan.structure.bias_bytes, most)
    if not tables:
        return list(values), ()
    symbols: dict[Expr, Var] = {each.load: each.symbol for each in biases_of(plan)}
    entries = {}
    for load in tables:
        integer, more = asked_by(load.indices[-1])
        extent = plan.variant.tensor(load.tensor).shape[-1]
        assert isinstance(extent, int)
        numbers = (LANE, _LANE_ABOVE)[: -(-extent // LANES)]
        entries[rewrite(load, symbols.get)] = numbers, symbols[integer], more
    ranges = bias_ranges(plan)
    asked: dict[tuple[Expr, ...], Lookup] = {}

    def ask(values: tuple[Expr, ...], index: Var, more: int) -> Expr:
        low, high = ranges[index.name]
        sure = -more <= low and high < LANES * len(values)
        symbol = own(f"entry_{len(asked)}", Type.FLOAT)
        return asked.setdefault(values, Lookup(symbol, values, index, more, sure)).symbol

    def rule(node: Expr) -> Expr | None:
        match node:
            case Load() if node in entries:
                numbers, index, more = entries[node]
                return ask(tuple(replace(node, indices=(*node.indices[:-1], one)) for one in numbers), index, more)
            case Op(op="mul", args=(Var() as symbol, factor)) if factor == LOG2E or isinstance(factor, Const):
                before = next((each for each in asked.values() if each.symbol == symbol), None)
                if before is not None:
                    values = tuple(Op("mul", (value, factor), Type.FLOAT) for value in before.values)
                    return ask(values, before.index, before.more)
        return None

    changed = [rewrite(value, rule) for value in values]
    read = frozenset[str]().union(*map(names, changed))
    wanted = [each for each in asked.values() if each.symbol.name in read]
    if plan.structure.hides_by_entries:
        wanted = [_hiding(plan, each, most) for each in wanted]
    return changed, tuple(wanted)


def _hiding(plan: Plan, asked: Lookup, most: int) -> Lookup:
    """The lookup with entries of −inf where the mask hides a pair that asks for them."""
    integer, mask = hiding_entries(plan.variant, plan.structure.bias_bytes, most), plan.variant.mask
    assert integer is not None
    numbers: tuple[Expr, ...] = (LANE, _LANE_ABOVE)
    symbols: list[dict[Expr, Expr]] = [{integer: number} for number in numbers]
    values = tuple(
        Op("select", (rewrite(mask, each.get), value, _MINUS_INFINITY), Type.FLOAT)
        for each, value in zip(symbols, asked.values, strict=False)
    )
    return replace(asked, values=values)


def lookup_bindings(plan: Plan, asked: Iterable[Lookup], element: str) -> dict[str, Binding]:
    """The bindings of the symbols of lookups; ``element`` as in ``bias_bindings``."""
    values, bits, bindings = bias_bindings(plan, element), bias_bindings(plan, element, "bits_of"), {}
    for each in asked:
        bound = bits if each.sure and not each.more else values
        index = bound[each.index.name].pattern
        index = f"from_end({index}, {each.more})" if each.more else index
        ask = "entry_of_lane" if each.sure else "entry_of_any"
        held = ", ".join(f"{{{name}}}" for name in each.held)
        bindings[each.symbol.name] = Binding(f"{ask}({held}, {index})", frozenset({"q", "kv"}))
    return bindings


def go_beyond_queries(plan: Plan) -> bool:
    """Whether a tile of a bias may extend beyond the queries of a sequence to other rows of the tensor, which may hold
    anything. Elements beyond the tensor are zeros."""
    read = {each.load.tensor for each in biases_of(plan)}
    shapes = [tensor.shape for tensor in plan.variant.tensors if tensor.name in read]
    return bool(read) and (plan.varlen or any(shape[-2] != "seqlen_q" for shape in shapes))
