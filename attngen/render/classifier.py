"""The classifier, a kernel that makes the tile map of a CUDA kernel: interval bounds and statistics classify most
tiles; in the rest, the mask is evaluated for each pair."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from attngen.lang.blocks import Block, at_corner
from attngen.lang.emit import Binding
from attngen.lang.facts import index
from attngen.lang.ir import Const, Load, Type, Var, names, rewrite, spelled, walk
from attngen.lang.simplify import FALSE, TRUE
from attngen.lang.statements import Code, Statement, declared, depending, joined, leaf, reads, written
from attngen.lang.statistics import Separated, Statistic, one_sided, separated
from attngen.plan.model import Launch, Plan
from attngen.plan.traits import mask_block
from attngen.render.blocks import BlocksView
from attngen.render.cuda_masking import map_block, row_values
from attngen.render.cuda_math import element_bindings
from attngen.render.cuda_statements import int_constant, number_queries
from attngen.render.cuda_tiles import TileBounds
from attngen.render.expressions import CUDA, KEYS, Along, emit_for, facts_of, is_wide, tensor_bindings

#: Most nodes in a bound of a tile, which is computed once for each tile of a map.
_NODES = 3000

#: Emits the statements that classify 32 tiles by bounds.
Word = Callable[[Plan, TileBounds], tuple[Statement, ...]]

#: Names that differ from query to query of a tile.
_QUERY_NAMES = ("q_row", "q_pos", "q_packed")


@dataclass(frozen=True, slots=True)
class StatisticView:
    """A statistic in the kernel: the range of its values over a tile, their type, and the value of one position."""

    name: str
    type: str
    value: Code


@dataclass(frozen=True, slots=True)
class SideView:
    """The statistics of queries or of keys: statements before the loop over positions, and those of one position."""

    statistics: tuple[StatisticView, ...]
    hoisted: tuple[Statement, ...]
    lines: tuple[Statement, ...]

    @property
    def reads(self) -> frozenset[str]:
        """Names that the values read."""
        return reads([*self.hoisted, *self.lines, *(each.value for each in self.statistics)])


@dataclass(frozen=True, slots=True)
class PairsView:
    """A tensor of bools that the mask reads at each pair: the address of a row of a tile, and the statements that
    classify 32 tiles if all elements of a tile are false, and if all are true."""

    lines: tuple[Statement, ...]
    inside: Code  # whether the tensor has the row
    address: Code  # of the row's first key
    extent: str  # keys of a row
    if_none: tuple[Statement, ...]
    if_every: tuple[Statement, ...]

    @property
    def reads(self) -> frozenset[str]:
        """Names that the code reads."""
        return reads([*self.lines, self.inside, self.address, *self.if_none, *self.if_every])


@dataclass(frozen=True, slots=True)
class ClassifierView:
    """The kernel that makes a tile map, of the template ``file``. ``bounds`` classify 32 tiles as far as bounds can;
    ``own`` holds the statistics of a map row's own tile, ``listed`` those of the tiles that the row lists.

    The mask of a pair is in parts: statements before all loops (``hoisted``), of a query, of a key, and of the pair."""

    file: str
    symbol: str
    threads: int
    argument_lines: tuple[str, ...]
    uses_packed: bool
    uses_hk: bool
    uses_q_hi: bool
    uses_q_row: bool  # in the lines of a pair
    own: SideView
    listed: SideView
    pairs: PairsView | None
    blocks: BlocksView | None  # in place of bounds and pairs
    rows_alike: bool  # all queries of a block see the same of its keys
    bounds: tuple[Statement, ...]
    hoisted: tuple[Statement, ...]
    query_values: tuple[tuple[str, str], ...]  # of a query, which pairs use: the type and the name of each
    query_lines: tuple[Statement, ...]
    key_lines: tuple[Statement, ...]
    pair_lines: tuple[Statement, ...]
    visible: Code


def classifier_view(
    plan: Plan, own: Launch, argument_lines: tuple[str, ...], along: Along, word: Word
) -> ClassifierView:
    """Build the view of the launch ``own``, for a map whose rows list tiles ``along`` an axis."""
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
    blocks = _blocks(plan, by, block) if block and not of_consumer else None
    bounds, pairs = () if blocks else word(plan, by), None if block else _pairs(plan, by, word)
    used = reads(bounds) | frozenset[str]().union(*(each.reads for each in (blocks, pairs) if each is not None))
    queries, keys = (
        _side(plan, [each for each in parts.statistics if each.axis == axis and spelled(each.name.name) in used])
        for axis in ("q", "kv")
    )
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
        symbol=own.symbol,
        threads=32 * own.num_warps,
        argument_lines=argument_lines,
        uses_packed=not read.isdisjoint(("q_begin", "k_begin")),
        uses_hk="hk" in read,
        uses_q_hi="q_hi" in used,
        uses_q_row="q_row" in reads([*pair, visible]),
        own=queries if along.axis == "kv" else keys,
        listed=keys if along.axis == "kv" else queries,
        pairs=pairs,
        blocks=blocks,
        rows_alike=names(mask).isdisjoint(("q", "q_pos", "q_global")),
        bounds=bounds,
        hoisted=hoisted,
        query_values=query_values,
        query_lines=query_lines,
        key_lines=key,
        pair_lines=pair,
        visible=visible,
    )


def _pairs(plan: Plan, by: TileBounds, word: Word) -> PairsView | None:
    """The scan of a tensor of bools over queries and keys, if the mask reads exactly one; else None."""
    loads = {node for node in walk(by.mask) if isinstance(node, Load) and _is_of_pairs(plan, node)}
    if len(loads) != 1 or plan.tile_n % 16:
        return None
    (load,) = loads
    bound = tensor_bindings(plan)[load.tensor]
    *indices, _ = load.indices
    code = emit_for(plan, CUDA, indices, element_bindings(plan, ragged=True))
    lines = [*code.hoisted, *code.body]
    tests, address = [], leaf(bound.pointer)
    for at, place, extent, stride in zip(indices, code.results, bound.extents, bound.strides, strict=False):
        if not (isinstance(at, Var) and at.name in ("b", "h", "hk")):
            tests.append(written("({}) >= 0 && ({}) < {}", place, place, leaf(extent)))
        address = written("{} + static_cast<long long>({}) * {}", address, place, leaf(stride))

    def bits(value: Const) -> tuple[Statement, ...]:
        return word(plan, replace(by, mask=rewrite(by.mask, lambda node: value if node == load else None)))

    return PairsView(
        lines=(*_named(lines, *code.results), *lines),
        inside=joined(" && ", tests),
        address=address,
        extent=bound.extents[-1],
        if_none=bits(FALSE),
        if_every=bits(TRUE),
    )


def _blocks(plan: Plan, by: TileBounds, size: Block) -> BlocksView:
    """The conditions on a block of pairs."""
    names = ("q_lo", "q_hi", "q_pos_lo", "q_pos_hi", "kv_lo", "kv_hi")
    by = replace(by, bindings={**by.bindings, **{name: Binding(name) for name in names}})
    code, *_ = by.emitted(plan, KEYS)
    may, must = code.results
    asked = reads([*code.hoisted, *code.body, may, must])
    ends = {
        "q_hi": f"min({{q_lo}} + {size[0]}, {{seqlen_q}}) - 1",
        "kv_hi": f"min({{kv_lo}} + {size[1]}, {{seqlen_k}}) - 1",
        "q_pos_lo": "{q_lo} + ({seqlen_k} - {seqlen_q})", "q_pos_hi": "{q_hi} + ({seqlen_k} - {seqlen_q})",
    }  # fmt: skip
    asked |= {"q_hi"} if "q_pos_hi" in asked else set()
    lines = [int_constant(name, end) for name, end in ends.items() if name in asked]
    return BlocksView(size, (*lines, *code.hoisted, *code.body), may, must)


def _is_of_pairs(plan: Plan, load: Load) -> bool:
    """Whether a load reads a bool at a query and at the key, the last axis."""
    if not load.indices:
        return False
    *indices, last = load.indices
    read = frozenset[str]().union(*map(names, indices))
    dtype = next(one.dtype for one in plan.variant.tensors if one.name == load.tensor)
    of_queries = bool(read & {"q", "q_pos", "q_global"}) and not read & {"kv", "kv_global"}
    return dtype == "bool" and last == index("kv") and of_queries


def _bindings(plan: Plan, each: Statistic) -> dict[str, Binding]:
    """Kernel names of the ends of a statistic, and of the flag that says whether all its values are numbers."""
    name, wide = spelled(each.name.name), _is_wide(plan, each)
    pattern = f"({{{name}}}.{{}} != 0)" if each.value.type is Type.BOOL else f"{{{name}}}.{{}}"
    least, greatest = (end.name for end in each.ends)
    return {
        least: Binding(pattern.replace("{}", "least"), wide=wide),
        greatest: Binding(pattern.replace("{}", "greatest"), wide=wide),
        each.numbers.name: Binding(f"{{{name}}}.numbers"),
    }


def _is_wide(plan: Plan, each: Statistic) -> bool:
    return each.value.type is Type.INT and is_wide(plan, each.value)


def _side(plan: Plan, statistics: list[Statistic]) -> SideView:
    """The code of the statistics of one side; all positions lie inside the sequence."""
    if not statistics:
        return SideView((), (), ())
    code = emit_for(plan, CUDA, [each.value for each in statistics], element_bindings(plan, ragged=False))
    lines, hoisted = depending([*code.hoisted, *code.body], (*_QUERY_NAMES, "kv", "kv_packed"))
    views = []
    for each, value in zip(statistics, code.results, strict=True):
        kind = "float" if each.value.type is Type.FLOAT else "long long" if _is_wide(plan, each) else "int"
        views.append(StatisticView(spelled(each.name.name), kind, value))
    return SideView(tuple(views), hoisted, (*_named(lines, *code.results), *lines))


def _named(lines: Sequence[Statement], *results: Code) -> list[Statement]:
    """Statements that define the query and key positions which ``lines`` and results read."""
    read = reads([*lines, *results])
    numbered = number_queries(read)
    if "kv_packed" in read:
        numbered.append(int_constant("kv_packed", written("{k_begin} + {kv}")))
    return numbered
