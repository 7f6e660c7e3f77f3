"""The classifier, a kernel that makes the tile map of a CUDA kernel: interval bounds and statistics decide most cells
of tiles; in the rest, the mask is evaluated for each pair."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from attngen.lang.blocks import Block, at_corner
from attngen.lang.emit import Binding
from attngen.lang.facts import index
from attngen.lang.ir import Const, Expr, Load, Type, Var, names, rewrite, spelled, walk
from attngen.lang.proof import larger
from attngen.lang.simplify import FALSE, TRUE, linear
from attngen.lang.statements import Code, Statement, declared, depending, joined, leaf, reads, written
from attngen.lang.statistics import Separated, Statistic, one_sided, separated
from attngen.plan.model import Launch, Plan
from attngen.plan.traits import mask_block
from attngen.render.cuda_masking import map_block, row_values
from attngen.render.cuda_math import element_bindings
from attngen.render.cuda_statements import int_constant, number_queries
from attngen.render.cuda_tiles import TileBounds
from attngen.render.expressions import CUDA, KEYS, Along, emit_for, facts_of, in_product, is_wide, tensor_bindings

#: Most nodes in a bound, which is computed once for each cell of a tile.
_NODES = 3000

#: Queries and keys of a cell, as many as those of pairs that a warp looks at; and most nodes in the bounds of cells.
#: Longer ones are computed once for each tile: of each cell, they would take longer than a look at its pairs.
_CELL, _SHORT = 32, 200

#: Most bytes of shared memory that the ranges of a mask's statistics may take, over the cells of 32 tiles.
_RANGE_BYTES = 32 * 1024

#: Bytes of the types of tile_map.cuh that hold a statistic.
_SIZES = {"Range<int>": 8, "Values<int>": 12, "Range<float>": 12, "Range<long long>": 16, "Values<long long>": 24}

#: Threads of a multiprocessor for which there are registers enough, 64 each.
_THREADS_AT_ONCE = 1024

#: Emits the statements that classify 32 tiles by bounds.
Word = Callable[[Plan, TileBounds], tuple[Statement, ...]]

#: A bool that is loaded under a condition.
_GUARDED_BOOL = re.compile(r"^const bool (\w+) = (.* \? .*) != 0 : false;$")

#: Names of the language that differ from query to query, and from key to key.
_QUERIES, _KEYS = frozenset({"q", "q_pos", "q_global"}), frozenset({"kv", "kv_global"})

#: Names of a kernel that differ from query to query of a tile.
_QUERY_NAMES = ("q_row", "q_pos", "q_packed")


@dataclass(frozen=True, slots=True)
class StatisticView:
    """A statistic in the kernel: the name and the type of what is known of its values over a tile, and the value of one
    position, which counts under the ``guard``; ``anything`` if none counts."""

    name: str
    type: str
    value: Code
    guard: Code | None
    anything: int


@dataclass(frozen=True, slots=True)
class SideView:
    """The statistics of queries or of keys: statements before the loop over positions, and those of one position."""

    statistics: tuple[StatisticView, ...]
    hoisted: tuple[Statement, ...]
    lines: tuple[Statement, ...]

    @property
    def reads(self) -> frozenset[str]:
        """Names that the values read."""
        values = [each.value for each in self.statistics]
        guards = [each.guard for each in self.statistics if each.guard is not None]
        return reads([*self.hoisted, *self.lines, *values, *guards])


@dataclass(frozen=True, slots=True)
class BoundsView:
    """Conditions on a cell of pairs: whether some pair may be visible, and whether all must be. The cell begins at
    ``q_lo`` and ``kv_lo``, and ends before ``q_end`` and ``kv_end``."""

    lines: tuple[Statement, ...]
    may: Code
    must: Code
    symbols: frozenset[str]  # names of the language in both

    @property
    def reads(self) -> frozenset[str]:
        """Names that the code reads."""
        return reads([*self.lines, self.may, self.must])


@dataclass(frozen=True, slots=True)
class PairsView:
    """A tensor of bools that the mask reads at each pair: the place of a query's row and of a key in it, and the bounds
    of a cell if all elements of its tile are false, and if all are true."""

    lines: tuple[Statement, ...]  # of a query
    key_lines: tuple[Statement, ...]
    inside: Code  # whether the tensor has the query's row
    in_order: bool  # rows of queries follow each other: those of a tile are inside if the first and the last one are
    address: Code  # of that row
    key: Code  # the place of a key in a row
    steps: Code  # bits in which the addresses of rows differ from multiples of 16
    extent: str  # keys of a row
    if_none: BoundsView
    if_every: BoundsView

    @property
    def reads(self) -> frozenset[str]:
        """Names that the code reads."""
        code: list[Code | Statement] = [*self.lines, *self.key_lines, self.inside, self.address, self.key, self.steps]
        return reads(code) | self.if_none.reads | self.if_every.reads

    @property
    def symbols(self) -> frozenset[str]:
        """Names of the language in the bounds."""
        return self.if_none.symbols | self.if_every.symbols


@dataclass(frozen=True, slots=True)
class CellsView:
    """The cells of a tile, each decided by bounds as far as these can: their size, the size of the groups of queries
    and of keys over which statistics are taken, and whether an open cell is what a warp looks at pair by pair."""

    size: Block
    ranges: Block
    are_parts: bool
    bounds: BoundsView


@dataclass(frozen=True, slots=True)
class ClassifierView:
    """The kernel that makes a tile map, of the template ``file``. Bounds decide the ``cells`` of tiles; where rows are
    those of single consumers, ``bounds`` classify 32 tiles. ``own`` holds the statistics of a map row's own tile,
    ``listed`` those of the tiles that the row lists.

    The mask of a pair is in parts: statements before all loops (``hoisted``), of a query, of a key, and of the pair."""

    file: str
    symbol: str
    threads: int
    blocks: int  # of a multiprocessor at once
    pdl: bool
    leads: bool  # the next kernel may start early; not one with clusters, which would crowd a part of the chip
    argument_lines: tuple[str, ...]
    uses_packed: bool
    uses_hk: bool
    uses_q_hi: bool
    uses_q_row: bool  # in the lines of a pair
    own: SideView
    listed: SideView
    cells: CellsView | None  # None: rows of single consumers
    pairs: PairsView | None
    rows_alike: bool  # all queries of a block see the same of its keys
    bounds: tuple[Statement, ...]
    hoisted: tuple[Statement, ...]
    query_values: tuple[tuple[str, str], ...]  # of a query, which pairs use: the type and the name of each
    query_lines: tuple[Statement, ...]
    key_lines: tuple[Statement, ...]
    pair_lines: tuple[Statement, ...]
    visible: Code


def classifier_view(
    plan: Plan, launch: Launch, argument_lines: tuple[str, ...], along: Along, word: Word
) -> ClassifierView:
    """Build the view of a launch, for a map whose rows list tiles ``along`` an axis."""
    mask, facts = plan.variant.mask, facts_of(plan)
    of_consumer, of_tile = map_block(plan), mask_block(plan.variant, (plan.tile_m, plan.tile_n))
    block = of_consumer or of_tile
    if block:
        mask = at_corner(mask, block)
    parts = Separated(mask) if of_consumer else separated(mask, facts)
    bindings: dict[str, Binding] = {}
    for each in parts.statistics:
        bindings |= _bindings(plan, each)
    by = TileBounds(parts.mask, _NODES, parts.statistics, bindings)
    bounds = word(plan, by) if of_consumer else ()
    decided = None if of_consumer else _bounds(plan, by)
    pairs = None if block else _pairs(plan, by)
    used = reads(bounds) | frozenset[str]().union(*(each.reads for each in (decided, pairs) if each is not None))
    symbols = frozenset[str]().union(*(each.symbols for each in (decided, pairs) if each is not None))
    asked = [each for each in parts.statistics if spelled(each.name.name) in used]
    queries, keys = (_side(plan, [each for each in asked if each.axis == axis], symbols) for axis in ("q", "kv"))
    cells = None if decided is None else _cells(plan, by, decided, of_tile, (queries, keys), launch.num_warps)
    of_keys = {expr: f"of_key_{number}" for number, expr in enumerate(one_sided(plan.variant.mask, "kv"))}
    masked = emit_for(plan, CUDA, [plan.variant.mask], element_bindings(plan, ragged=True), labels=of_keys)
    row, hoisted = depending(masked.hoisted, _QUERY_NAMES)
    (visible,) = masked.results
    pair, key = depending([*_named(masked.body, visible), *masked.body], (*_QUERY_NAMES, *declared(row)))
    query_values = row_values(row, [*pair, Statement("", visible.reads)])
    query_lines = (*_named(row), *row)
    read = reads([*hoisted, *query_lines, *key, *pair, visible]) | used | queries.reads | keys.reads
    return ClassifierView(
        file=f"cuda/shared/{'_row_classifier' if of_consumer else '_classifier'}.cu.j2",
        symbol=launch.symbol,
        threads=32 * launch.num_warps,
        blocks=_THREADS_AT_ONCE // (32 * launch.num_warps),
        pdl=launch.pdl,
        leads=plan.launch(plan.main).cluster == 1,
        argument_lines=argument_lines,
        uses_packed=not read.isdisjoint(("q_begin", "k_begin")),
        uses_hk="hk" in read,
        uses_q_hi="q_hi" in used,
        uses_q_row="q_row" in reads([*pair, visible]),
        own=queries if along.axis == "kv" else keys,
        listed=keys if along.axis == "kv" else queries,
        cells=cells,
        pairs=pairs,
        rows_alike=names(mask).isdisjoint(("q", "q_pos", "q_global")),
        bounds=bounds,
        hoisted=hoisted,
        query_values=query_values,
        query_lines=query_lines,
        key_lines=key,
        pair_lines=_tested_last(pair),
        visible=visible,
    )


def _bounds(plan: Plan, by: TileBounds) -> BoundsView:
    """The bounds of a cell."""
    corners = ("q_lo", "q_hi", "q_pos_lo", "q_pos_hi", "kv_lo", "kv_hi")
    by = replace(by, bindings={**by.bindings, **{name: Binding(name) for name in corners}})
    code, *exprs = by.emitted(plan, KEYS)
    may, must = code.results
    asked = reads([*code.hoisted, *code.body, may, must])
    ends = {
        "q_hi": "{q_end} - 1", "kv_hi": "{kv_end} - 1",
        "q_pos_lo": "{q_lo} + ({seqlen_k} - {seqlen_q})", "q_pos_hi": "{q_end} - 1 + ({seqlen_k} - {seqlen_q})",
    }  # fmt: skip
    lines = [int_constant(name, end) for name, end in ends.items() if name in asked]
    symbols = frozenset[str]().union(*map(names, exprs))
    return BoundsView((*lines, *_tested_last([*code.hoisted, *code.body])), may, must, symbols)


def _cells(
    plan: Plan, by: TileBounds, bounds: BoundsView, block: Block | None, sides: tuple[SideView, SideView], warps: int
) -> CellsView:
    """The cells of tiles of which ``block`` is the largest on which the mask reads tensors at one element, or None;
    ``sides`` are the statistics of queries and of keys, of whose own tile a warp takes one group at most."""
    tile = plan.tile_m, plan.tile_n
    _, may, must = by.emitted(plan, KEYS)
    size = block or tile
    if may != must and min(size) >= _CELL and not any(larger(each, _SHORT) for each in (may, must)):
        size = _CELL, _CELL
    rows, keys = (length if length >= _CELL else whole for length, whole in zip(size, tile, strict=True))
    groups = -(-plan.tile_m // rows), -(-plan.tile_n // keys)
    held = [
        count * sum(_SIZES[each.type] for each in side.statistics) for count, side in zip(groups, sides, strict=True)
    ]
    ranges = (rows, keys) if 32 * max(held) <= _RANGE_BYTES and max(groups) <= warps else tile
    return CellsView(size, ranges, size == (_CELL, _CELL), bounds)


def _pairs(plan: Plan, by: TileBounds) -> PairsView | None:
    """The scan of a tensor of bools over queries and keys, if the mask reads exactly one; else None."""
    loads = {node for node in walk(by.mask) if isinstance(node, Load) and _is_of_pairs(plan, node)}
    if len(loads) != 1 or plan.tile_n % 16:
        return None
    (load,) = loads
    bound = tensor_bindings(plan)[load.tensor]
    code = emit_for(plan, CUDA, load.indices, element_bindings(plan, ragged=True))
    *places, key = code.results
    lines = [*code.hoisted, *code.body]
    rows, keys = depending([*_named(lines, *code.results), *lines], _QUERY_NAMES)
    tests, address = [], leaf(bound.pointer)
    steps = written("reinterpret_cast<unsigned long long>({})", address)
    for at, place, extent, stride in zip(load.indices, places, bound.extents, bound.strides, strict=False):
        if not (isinstance(at, Var) and at.name in ("b", "h", "hk")):
            tests.append(written("{} >= 0 && {} < {}", in_product(place, CUDA), in_product(place, CUDA), leaf(extent)))
        address = written("{} + static_cast<long long>({}) * {}", address, place, leaf(stride))
        steps = written("{} | {}", steps, leaf(stride))

    def bounds(value: Const) -> BoundsView:
        return _bounds(plan, replace(by, mask=rewrite(by.mask, lambda node: value if node == load else None)))

    return PairsView(
        lines=rows,
        key_lines=keys,
        inside=joined(" && ", tests),
        in_order=all(_follows(at, _QUERIES) for at in load.indices[:-1]),
        address=address,
        key=in_product(key, CUDA),
        steps=steps,
        extent=bound.extents[-1],
        if_none=bounds(FALSE),
        if_every=bounds(TRUE),
    )


def _is_of_pairs(plan: Plan, load: Load) -> bool:
    """Whether a load reads a bool at a query and, along the last axis, at the key or a fixed distance from it."""
    if not load.indices:
        return False
    *indices, last = load.indices
    read = frozenset[str]().union(*map(names, indices))
    dtype = next(one.dtype for one in plan.variant.tensors if one.name == load.tensor)
    of_queries = bool(read & _QUERIES) and not read & _KEYS
    return dtype == "bool" and of_queries and "kv" in names(last) and _follows(last, {"kv"})


def _follows(at: Expr, positions: Collection[str]) -> bool:
    """Whether an index either is the same for all pairs, or a fixed distance from one of these positions."""
    varying = [(t, factor) for t, factor in linear(at).terms.items() if names(t) & (_QUERIES | _KEYS)]
    return not varying or varying in [[(index(name), 1)] for name in positions]


def _bindings(plan: Plan, each: Statistic) -> dict[str, Binding]:
    """Kernel names of the ends of a statistic, of its residues, and of the flag that says whether all its values are
    numbers."""
    name, wide = spelled(each.name.name), _is_wide(plan, each)
    pattern = f"({{{name}}}.{{}} != 0)" if each.value.type is Type.BOOL else f"{{{name}}}.{{}}"
    least, greatest = (end.name for end in each.ends)
    return {
        least: Binding(pattern.replace("{}", "least"), wide=wide),
        greatest: Binding(pattern.replace("{}", "greatest"), wide=wide),
        each.residues.name: Binding(f"{{{name}}}.residues"),
        each.numbers.name: Binding(f"{{{name}}}.numbers"),
    }


def _is_wide(plan: Plan, each: Statistic) -> bool:
    return each.value.type is Type.INT and is_wide(plan, each.value)


def _side(plan: Plan, statistics: list[Statistic], symbols: frozenset[str]) -> SideView:
    """The code of the statistics of one side, of which bounds have these ``symbols``; all positions lie inside the
    sequence."""
    if not statistics:
        return SideView((), (), ())
    exprs = [expr for each in statistics for expr in (each.value, each.guard)]
    code = emit_for(plan, CUDA, exprs, element_bindings(plan, ragged=False))
    values = zip(code.results[::2], code.results[1::2], strict=True)
    lines, hoisted = depending([*code.hoisted, *code.body], (*_QUERY_NAMES, "kv", "kv_packed"))
    views = []
    for each, (value, guard) in zip(statistics, values, strict=True):
        kind = "float" if each.value.type is Type.FLOAT else "long long" if _is_wide(plan, each) else "int"
        known = "Values" if each.residues.name in symbols else "Range"
        counts = None if each.guard == TRUE else guard
        views.append(StatisticView(spelled(each.name.name), f"{known}<{kind}>", value, counts, each.anything))
    return SideView(tuple(views), hoisted, (*_named(lines, *code.results), *lines))


def _tested_last(lines: Iterable[Statement]) -> tuple[Statement, ...]:
    """Lines in which bools that are loaded under a condition are compared with 0 after it. Else a comparison is under
    the condition, too, and the compiler has each load wait for that of the pair before."""
    return tuple(replace(line, text=_GUARDED_BOOL.sub(r"const bool \1 = (\2 : 0) != 0;", line.text)) for line in lines)


def _named(lines: Sequence[Statement], *results: Code) -> list[Statement]:
    """Statements that define the query and key positions which ``lines`` and results read."""
    read = reads([*lines, *results])
    numbered = number_queries(read)
    if "kv_packed" in read:
        numbered.append(int_constant("kv_packed", written("{k_begin} + {kv}")))
    return numbered
