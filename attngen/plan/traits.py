"""Traits of masks and scores that decide which schedule and which tile suit them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from attngen.lang.bands import Axis, Bands, Heads, bands, has_short_bounds
from attngen.lang.blocks import Block, block_of
from attngen.lang.distances import distance_values
from attngen.lang.divisors import prepared, wide_names
from attngen.lang.facts import Facts
from attngen.lang.folding import PRODUCT, fold_slope, fold_variant, value_of_distance
from attngen.lang.ir import Expr, Load, Op, children, names, rewrite, walk
from attngen.lang.literals import fold_literals
from attngen.lang.runs import by_position
from attngen.lang.separate import KEYS, ROWS, asked, costly_values, largest_values, narrow_tensors
from attngen.lang.simplify import TRUE
from attngen.lang.tables import tables, with_places
from attngen.lang.variant import Variant
from attngen.schema.kernel_spec import KernelSpec


def bands_of(spec: KernelSpec, over: Axis = "kv") -> Bands:
    """Bands of keys that a tile of queries sees, or of queries that see a tile of keys."""
    return _bands(spec.variant, over, "packed" if spec.pack_gqa else "single")


@lru_cache(maxsize=256)  # the kernels of a spec share a few variants
def _bands(variant: Variant, over: Axis, heads: Heads) -> Bands:
    return bands(variant.mask, Facts.of(variant), over=over, heads=heads)


@lru_cache(maxsize=256)
def mask_block(variant: Variant, tile: Block) -> Block | None:
    """The largest block that divides a tile of queries and keys, and on which a mask reads tensors at one element;
    None if there is none."""
    return block_of(variant.mask, tile)


def reads_data(variant: Variant) -> bool:
    """Whether the mask reads a tensor."""
    return any(isinstance(node, Load) for node in walk(variant.mask))


def reads_data_per_key(variant: Variant) -> bool:
    """Whether the mask reads a tensor at an index that depends on the key: no interval rule can bound that."""
    return any(names(index) & KEYS for node in walk(variant.mask) if isinstance(node, Load) for index in node.indices)


def reads_data_per_query(variant: Variant) -> bool:
    """Whether the mask reads a tensor that is not monotone at an index that depends on the query: a tile of queries may
    read any of its values, so that a bound of all is seldom a bound of the tile."""
    monotone = {tensor.name for tensor in variant.tensors if tensor.monotone is not None}
    loads = (load for load in _mask_loads(variant) if load.tensor not in monotone)
    return any(names(index) & ROWS for load in loads for index in load.indices)


def may_see_all_keys(variant: Variant) -> bool:
    """Whether an alternative of the mask depends on the query and not on the key, as ``q < 2`` of global queries."""
    return any(names(each) & ROWS and not names(each) & KEYS for each in _alternatives(variant.mask))


def has_global_queries(variant: Variant) -> bool:
    """Whether an alternative of the mask, narrowed by no tensor, depends on the query alone: some rows see all keys,
    and have many times the tiles of others."""
    return any(names(each) & ROWS and not names(each) & KEYS for each in _free_alternatives(variant.mask))


def has_global_keys(variant: Variant) -> bool:
    """The same of keys: all queries see some keys."""
    return any(names(each) & KEYS and not names(each) & ROWS for each in _free_alternatives(variant.mask))


def _alternatives(mask: Expr) -> Iterator[Expr]:
    return (each for node in walk(mask) if isinstance(node, Op) and node.op == "or" for each in node.args)


def _free_alternatives(mask: Expr) -> Iterator[Expr]:
    """Alternatives of the mask, and of those of its terms beside which no other term reads a tensor."""
    if not isinstance(mask, Op) or mask.op not in ("and", "or"):
        return
    if mask.op == "or":
        yield from mask.args
    for each in mask.args:
        others = (node for other in mask.args if other is not each for node in walk(other))
        if mask.op == "or" or not any(isinstance(node, Load) for node in others):
            yield from _free_alternatives(each)


def has_short_bounds_of(spec: KernelSpec) -> bool:
    """Whether code of moderate size classifies each tile as full, partial or empty."""
    return has_short_bounds(spec.variant.mask, Facts.of(spec.variant), "packed" if spec.pack_gqa else "single")


def key_loads(variant: Variant, heads: Heads = "single") -> frozenset[Load]:
    """Values of 4 bytes or less that a mask loads for each key, the same for all rows of a tile; none if the index of
    one depends on another.

    A forward with warp roles has room for as many, and its loader loads these.
    """
    varying = ROWS | {"h"} if heads == "packed" else ROWS
    loads = _mask_loads(variant)
    if any(isinstance(inner, Load) for load in loads for index in load.indices for inner in walk(index)):
        return frozenset()
    narrow = narrow_tensors(variant)
    used = [(load, frozenset[str]().union(*map(names, load.indices))) for load in loads]
    return frozenset(load for load, read in used if load.tensor in narrow and read & KEYS and not read & varying)


@dataclass(frozen=True, slots=True)
class LoadedKeyValues:
    """Values of a key, the same for all rows of a tile, that the loader of a forward may compute, in the order in which
    there is room for them: those that the mask loads (``key_loads``), which always fit, those of the score, and those
    that the mask divides for, the most costly first."""

    loads: tuple[Expr, ...]
    score: tuple[Expr, ...]
    divided: tuple[Expr, ...]

    def __len__(self) -> int:
        return len(self.loads) + len(self.score) + len(self.divided)

    def first(self, count: int) -> LoadedKeyValues:
        """The first ``count`` of them."""
        loads, score = self.loads[:count], self.score[: max(count - len(self.loads), 0)]
        return LoadedKeyValues(loads, score, self.divided[: max(count - len(self.loads) - len(self.score), 0)])


NO_KEY_VALUES = LoadedKeyValues((), (), ())


def key_values(
    variant: Variant, heads: Heads = "single", *, fast_math: bool, bits: bool = False, tabled: bool = False
) -> LoadedKeyValues:
    """Values of a key, the same for all rows of a tile, that the loader of a forward may compute.

    ``bits``: a tile map has the mask as bits, so that only the score is left. ``tabled``: consumers hold the small
    tables that it reads.
    """
    score = _key_values_of_score(variant, heads, fast_math, tabled)
    if bits:
        return LoadedKeyValues((), score, ())
    divided, loads = key_divisions(variant, heads), key_loads(variant, heads)
    if divided:
        loads &= frozenset(_loads_outside(_asked(variant), frozenset(divided)))
    return LoadedKeyValues(tuple(loads), score, divided)


def key_divisions(variant: Variant, heads: Heads = "single") -> tuple[Expr, ...]:
    """Values of a key, the same for all rows of a tile, that the mask divides for, the most costly first."""
    return costly_values(_asked(variant), KEYS, _beside_keys(variant, heads), narrow_tensors(variant))


@lru_cache(maxsize=256)
def _key_values_of_score(variant: Variant, heads: Heads, fast_math: bool, tabled: bool) -> tuple[Expr, ...]:
    """Parts of a logit that depend on the key alone and load, divide or call a function."""
    if variant.score is None:
        return ()
    logit = fold_variant(variant, fast_math=fast_math, heads=heads, by_position=True)
    others = _beside_keys(variant, heads) | {PRODUCT.name}
    value = with_places(logit.value, tables(logit.value, variant)) if tabled else logit.value
    return largest_values(value, KEYS, others, narrow_tensors(variant))


@lru_cache(maxsize=256)
def distance_values_of_score(variant: Variant, *, fast_math: bool) -> tuple[Expr, ...]:
    """Parts of a logit that depend on a pair by its distance alone and load, divide or call a function, which the
    loader of a forward may compute where the rows of a tile are those of one head."""
    if variant.score is None:
        return ()
    logit = fold_variant(variant, fast_math=fast_math, by_position=True)
    return distance_values(logit.value, variant, frozenset({"s", PRODUCT.name}))


def computes_distance_values(variant: Variant, *, fast_math: bool) -> bool:
    """Whether what a logit takes of a distance is computed, not loaded from a table: such scores mostly fall with the
    distance."""
    values = distance_values_of_score(variant, fast_math=fast_math)
    loads = (node for value in values for node in walk(value) if isinstance(node, Load))
    return bool(values) and not any(names(index) & KEYS for load in loads for index in load.indices)


def without_distance_values(variant: Variant, *, fast_math: bool) -> Variant:
    """A variant with a symbol for what its score reads by distance: what a kernel computes for each pair then."""
    values = distance_values_of_score(variant, fast_math=fast_math)
    logit = fold_variant(variant, fast_math=fast_math, by_position=True)
    symbols = {each: value_of_distance(number, each.type) for number, each in enumerate(values)}
    return replace(variant, score=rewrite(logit.value, symbols.get)) if values else variant


@lru_cache(maxsize=256)
def query_values_of_score(
    variant: Variant, *, fast_math: bool, bits: bool = False, by_distance: bool = False
) -> tuple[Expr, ...]:
    """Parts of a logit that depend on the query alone and load, divide or call a function, which the loader of a
    backward may compute: none if the mask loads or divides for queries, if the derivative of the logit varies, or if
    the logit loads anything else by query.

    ``bits``: a tile map has the mask as bits; ``by_distance``: values of distances come with a tile.
    """
    of_mask = not bits and (_loads_by_query(_mask_loads(variant, "q")) or costly_query_values(variant))
    if variant.score is None or of_mask:
        return ()
    logit = fold_variant(variant, fast_math=fast_math, by_position=True)
    if fold_slope(logit, fast_math=fast_math).varying is not None:
        return ()
    others = wide_names(variant) | KEYS | {PRODUCT.name}
    values = largest_values(logit.value, ROWS, others, narrow_tensors(variant))
    others_inside = distance_values_of_score(variant, fast_math=fast_math) if by_distance else ()
    inside = {load for value in (*values, *others_inside) for load in walk(value) if isinstance(load, Load)}
    outside = (node for node in walk(logit.value) if isinstance(node, Load) and node not in inside)
    return () if _loads_by_query(outside) else values


def _loads_by_query(loads: Iterable[Load]) -> bool:
    """Whether any of the loads depends on the query."""
    return any(names(index) & ROWS for load in loads for index in load.indices)


def _beside_keys(variant: Variant, heads: Heads) -> frozenset[str]:
    """Names that no value of a key depends on."""
    return wide_names(variant) | ROWS | ({"h"} if heads == "packed" else set())


def costly_query_values(variant: Variant) -> tuple[Expr, ...]:
    """Values of a query, the same for all keys of a tile, that take divisions; none if the mask loads values of queries
    (``query_loads``), which take their place."""
    if query_loads(variant):
        return ()
    return costly_values(_asked(variant, "q"), ROWS, KEYS | wide_names(variant), narrow_tensors(variant))


def _loads_outside(exprs: Iterable[Expr], values: frozenset[Expr]) -> Iterator[Load]:
    """Yield the loads of expressions, except those inside ``values``."""
    for each in exprs:
        if each not in values:
            if isinstance(each, Load):
                yield each
            yield from _loads_outside(children(each), values)


@lru_cache(maxsize=256)
def _asked(variant: Variant, along: Axis = "kv") -> tuple[Expr, ...]:
    """Expressions that kernels evaluate for a mask: the condition beside the intervals of keys, and their ends."""
    facts = Facts.of(variant)
    intervals, rest = asked(variant, facts, along)
    ends = (end for each in intervals for end in (each.lo, each.hi) if end is not None)
    return tuple(rewrite(prepared(each, variant, facts), fold_literals) for each in (rest, *ends))


@lru_cache(maxsize=256)
def _mask_loads(variant: Variant, along: Axis = "kv") -> frozenset[Load]:
    """Loads in the expressions that kernels evaluate for a mask."""
    return frozenset(node for each in _asked(variant, along) for node in walk(each) if isinstance(node, Load))


def query_loads(variant: Variant) -> int:
    """Number of values of 4 bytes or less that a mask loads for each query, the same for all keys; 0 if it loads one
    for each pair, if the index of one depends on another, or if the score loads anything by position."""
    loads = _mask_loads(variant, "q")
    narrow = narrow_tensors(variant)
    used = [frozenset[str]().union(*map(names, load.indices)) for load in loads]
    nested = any(isinstance(inner, Load) for load in loads for index in load.indices for inner in walk(index))
    scored = replace(variant, mask=TRUE)
    if nested or reads_positions(scored) or any(read & ROWS and read & KEYS for read in used):
        return 0
    by_query = [load for load, read in zip(loads, used, strict=True) if read & ROWS]
    return len(by_query) if all(load.tensor in narrow for load in by_query) else 0


def gathers(variant: Variant) -> bool:
    """Whether mask or score load a value for each pair of query and key."""
    for node in _nodes(variant):
        if isinstance(node, Load):
            used = frozenset[str]().union(*(names(index) for index in node.indices))
            if used & ROWS and used & KEYS:
                return True
    return False


def reads_positions(variant: Variant) -> bool:
    """Whether mask or score read a tensor at an index that depends on the query or the key."""
    loads = (node for node in _nodes(variant) if isinstance(node, Load))
    return any(names(index) & (ROWS | KEYS) for load in loads for index in load.indices)


def shows_few_keys(spec: KernelSpec) -> bool:
    """Whether a query sees few of the keys before it: those of a window, or of its document."""
    windows = any(band.lo is not None for band in bands_of(spec, "kv").visible)
    return windows or reads_positions(replace(spec.variant, score=None))


def varies_within_head(expr: Expr) -> bool:
    """Whether an expression differs from pair to pair of a head."""
    return bool(names(expr) & (ROWS | KEYS | {"s", PRODUCT.name}))


def is_light(variant: Variant) -> bool:
    """Whether there is no score, and the mask takes almost no registers: comparisons of sums, nothing else."""
    if variant.score is not None:
        return False
    return not divides(variant) and not any(isinstance(node, Load) for node in _nodes(variant))


def divides(variant: Variant) -> bool:
    """Whether mask or score divide, or raise to a power."""
    return any(isinstance(node, Op) and node.op in ("floordiv", "mod", "truediv", "pow") for node in _nodes(variant))


def _nodes(variant: Variant) -> Iterator[Expr]:
    for expression in (variant.mask, variant.score):
        if expression is not None:
            yield from walk(by_position(expression, variant))
