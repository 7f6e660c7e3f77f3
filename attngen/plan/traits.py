"""What masks and scores are made of, as far as it decides which schedule and which tile suit them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from attngen.dtypes import DTYPES
from attngen.lang.bands import Axis, Bands, Heads, bands, has_short_bounds
from attngen.lang.facts import Facts
from attngen.lang.folding import PRODUCT
from attngen.lang.ir import Expr, Load, Op, names, rewrite, walk
from attngen.lang.literals import fold_literals
from attngen.lang.rows import own_intervals
from attngen.lang.simplify import TRUE
from attngen.lang.variant import Variant
from attngen.schema.expand import KernelSpec

_WORD = 4  # bytes
_ROWS, _KEYS = frozenset({"q", "q_pos", "q_global"}), frozenset({"kv", "kv_global"})


def bands_of(spec: KernelSpec, over: Axis = "kv") -> Bands:
    """Return which keys a tile of queries sees, or which queries a tile of keys."""
    return _bands(spec.variant, over, "packed" if spec.pack_gqa else "single")


@lru_cache(maxsize=256)  # the kernels of a spec share a few variants
def _bands(variant: Variant, over: Axis, heads: Heads) -> Bands:
    return bands(variant.mask, Facts.of(variant), over=over, heads=heads)


def reads_data_per_key(variant: Variant) -> bool:
    """Whether the mask reads a tensor at an index that depends on the key: no interval rule can bound that."""
    return any(names(index) & _KEYS for node in walk(variant.mask) if isinstance(node, Load) for index in node.indices)


def reads_data_per_query(variant: Variant) -> bool:
    """Whether the mask reads a tensor that is not monotone at an index that depends on the query: a tile of queries may
    read any of its values, so that a bound of all is seldom a bound of the tile."""
    monotone = {tensor.name for tensor in variant.tensors if tensor.monotone is not None}
    loads = (load for load in _mask_loads(variant) if load.tensor not in monotone)
    return any(names(index) & _ROWS for load in loads for index in load.indices)


def has_short_bounds_of(spec: KernelSpec) -> bool:
    """Whether code of moderate size tells of each tile whether its rows see all of it, some, or nothing."""
    return has_short_bounds(spec.variant.mask, Facts.of(spec.variant), "packed" if spec.pack_gqa else "single")


def key_loads(variant: Variant, heads: Heads = "single") -> frozenset[Load]:
    """Return the values of 4 bytes or less that a mask loads for each key, the same for all rows of a tile; none if one
    is found by means of another.

    A forward with warp roles has room for as many, and its loader loads these.
    """
    varying = _ROWS | {"h"} if heads == "packed" else _ROWS
    loads = _mask_loads(variant)
    if any(isinstance(inner, Load) for load in loads for index in load.indices for inner in walk(index)):
        return frozenset()
    narrow = {tensor.name for tensor in variant.tensors if DTYPES[tensor.dtype].bytes <= _WORD}
    used = [(load, frozenset[str]().union(*map(names, load.indices))) for load in loads]
    return frozenset(load for load, read in used if load.tensor in narrow and read & _KEYS and not read & varying)


@lru_cache(maxsize=256)
def _mask_loads(variant: Variant) -> frozenset[Load]:
    """Return what a mask loads, as kernels ask for it: by the ends of the keys that a query sees, and what is left."""
    intervals, rest = own_intervals(variant.mask, Facts.of(variant))
    asked = [rest, *(end for each in intervals for end in (each.lo, each.hi) if end is not None)]
    return frozenset(node for each in asked for node in walk(rewrite(each, fold_literals)) if isinstance(node, Load))


def query_loads(variant: Variant) -> int:
    """Return how many values of 4 bytes or less a mask loads for each query, the same for all keys; 0 if it loads one
    for each pair, or finds one by means of another, or if the score loads anything by position."""
    loads = _mask_loads(variant)
    narrow = {tensor.name for tensor in variant.tensors if DTYPES[tensor.dtype].bytes <= _WORD}
    used = [frozenset[str]().union(*map(names, load.indices)) for load in loads]
    nested = any(isinstance(inner, Load) for load in loads for index in load.indices for inner in walk(index))
    scored = replace(variant, mask=TRUE)
    if nested or reads_positions(scored) or any(read & _ROWS and read & _KEYS for read in used):
        return 0
    by_query = [load for load, read in zip(loads, used, strict=True) if read & _ROWS]
    return len(by_query) if all(load.tensor in narrow for load in by_query) else 0


def gathers(variant: Variant) -> bool:
    """Whether mask or score load a value for each pair of query and key."""
    for node in _nodes(variant):
        if isinstance(node, Load):
            used = frozenset[str]().union(*(names(index) for index in node.indices))
            if used & _ROWS and used & _KEYS:
                return True
    return False


def reads_positions(variant: Variant) -> bool:
    """Whether mask or score read a tensor at an index that depends on the query or the key."""
    loads = (node for node in _nodes(variant) if isinstance(node, Load))
    return any(names(index) & (_ROWS | _KEYS) for load in loads for index in load.indices)


def packed_keys(variant: Variant) -> str | None:
    """Return what a variant reads of the place of keys in a tensor of all sequences, ``kv_global`` or ``total_k``, in
    expressions, shapes or bounds; None if nothing."""
    read: set[object] = set()
    for expression in (variant.mask, variant.score):
        read |= names(expression) if expression is not None else set()
    for tensor in variant.tensors:
        read |= {*tensor.shape, *(tensor.range or ())}
    for scalar in variant.scalars:
        read |= {scalar.min, scalar.max}
    return next((name for name in ("kv_global", "total_k") if name in read), None)


def varies_within_head(expr: Expr) -> bool:
    """Whether an expression differs from pair to pair of a head."""
    return bool(names(expr) & (_ROWS | _KEYS | {"s", PRODUCT.name}))


def is_light(variant: Variant) -> bool:
    """Whether there is no score, and the mask takes no registers to speak of: comparisons of sums, nothing else."""
    if variant.score is not None:
        return False
    return not divides(variant) and not any(isinstance(node, Load) for node in _nodes(variant))


def divides(variant: Variant) -> bool:
    """Whether mask or score divide, or raise to a power."""
    return any(isinstance(node, Op) and node.op in ("floordiv", "mod", "truediv", "pow") for node in _nodes(variant))


def _nodes(variant: Variant) -> Iterator[Expr]:
    for expression in (variant.mask, variant.score):
        if expression is not None:
            yield from walk(expression)
