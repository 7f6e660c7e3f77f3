"""Gradients of a variant's own tensors: which ones kernels compute, and how a CUDA backward sums them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from math import gcd

from attngen.lang.biases import is_of_pair, is_of_tile
from attngen.lang.blocks import Block, at_corner, block_of_value
from attngen.lang.folding import ONE, PRODUCT, Slope, fold_slope, fold_variant, split_slope_factors
from attngen.lang.ir import Const, Expr, Load, Op, Type, Var, names, own
from attngen.lang.separate import MIRRORED
from attngen.lang.simplify import linear, mul
from attngen.lang.variant import Variant
from attngen.plan.model import Plan

#: The position of a query minus that of a key, which indices of relative position tables are functions of.
APART = own("apart")

_ROWS, _KEYS = frozenset({"q", "q_pos", "q_global"}), frozenset({"kv", "kv_global"})
_FEW = frozenset({"b", "h", "hk", "heads", "kv_heads", "batch"})  # extents that are never long
#: Queries, and keys, of which a block has a multiple if it is summed from tiles of dS: as many as one load brings.
#: Not measured against others.
_ROUND = 8
#: Keys of a warp in the accumulators of a consumer.
WARP_KEYS = 16


def differentiable(plan: Plan) -> tuple[str, ...]:
    """Return the tensors whose gradients the kernels of a plan compute."""
    return differentiable_of(plan.variant)


def differentiable_of(variant: Variant) -> tuple[str, ...]:
    """Return the variant's tensors that get a gradient through the score; sinks get theirs after the kernels."""
    read = variant.uses(variant.score)[1] if variant.score is not None else frozenset()
    return tuple(tensor.name for tensor in variant.tensors if tensor.grad and tensor.name in read)


def derivative(variant: Variant, *, fast_math: bool) -> Slope:
    """Return the derivative of the logit by the product, with a factor that all heads share: dK sums over them."""
    logit = fold_variant(variant, fast_math=fast_math, by_position=True)
    slope = fold_slope(logit, fast_math=fast_math)
    return Slope(ONE, mul(slope.varying or ONE, slope.factor)) if "h" in names(slope.factor) else slope


class Way(Enum):
    """Place of the sum over pairs that is an element's gradient, by what the element's index depends on."""

    HEAD = "head"  # neither query nor key: a register of each consumer thread
    KEY = "key"  # the key: registers, one for each key of a thread
    COLUMN = "column"  # the key, in a cluster: sums of columns of a tile of dS
    ROW = "row"  # the query: sums of rows of a tile of dS
    DIAGONAL = "diagonal"  # query minus key: sums of diagonals of a tile of dS
    BLOCK = "block"  # the block of pairs: sums of blocks of a tile of dS
    PAIR = "pair"  # both, as [..., q, kv]: the tile of dS itself
    EACH = "each"  # anything else: registers, as long as consecutive pairs of a thread share an entry


@dataclass(frozen=True, slots=True)
class TensorGradient:
    """The gradient of one element that the score reads.

    The derivative of the logit is ``constant``, the same for all pairs of a head, times ``varying``. The indices of a
    DIAGONAL, and its ``varying``, are functions of ``APART``; in a cluster, the indices may be the same for all pairs.
    Those of a BLOCK are constant on ``block``, so many queries and keys; 0: all.
    """

    load: Load
    way: Way
    constant: Expr
    varying: Expr
    indices: tuple[Expr, ...]
    block: Block = (0, 0)

    def within(self, tile: Block) -> tuple[TensorGradient, Block]:
        """A BLOCK's gradient as the largest block that divides a tile evaluates it, at its first query ``q_lo`` and key
        ``kv_lo``; and the queries and keys of that block."""
        rows, columns = (gcd(own, of_tile) for own, of_tile in zip(self.block, tile, strict=True))
        indices = tuple(at_corner(index, (rows, columns)) for index in self.indices)
        return replace(self, indices=indices, varying=at_corner(self.varying, (rows, columns))), (rows, columns)

    @property
    def in_registers(self) -> bool:
        """Whether consumers add it up; else a warp does so from tiles of dS."""
        return self.way in (Way.HEAD, Way.KEY, Way.EACH)

    @property
    def of_product(self) -> bool:
        """Whether the derivative depends on the product of query and key, which is gone when dS is there."""
        return PRODUCT.name in names(self.varying)

    @property
    def by_warps(self) -> bool:
        """Whether warps of consumers can add it up among their lanes, which have ``WARP_KEYS`` keys and as many queries
        at a time."""
        blocks = self.way is Way.BLOCK and all(n % WARP_KEYS == 0 for n in self.block)
        return self.way is Way.DIAGONAL or blocks

    @property
    def repeats(self) -> bool:
        """Whether diagonals may share an entry of a DIAGONAL: no index is a multiple of their number and a constant."""
        apart = [[term for term in linear(each).terms if APART.name in names(term)] for each in self.indices]
        return [APART] not in apart

    @property
    def reads(self) -> frozenset[str]:
        """Names that index and derivative read."""
        return frozenset[str]().union(*map(names, (self.constant, self.varying, *self.indices)))

    @property
    def prefix(self) -> frozenset[str]:
        """The indices of a PAIR before those of query and key."""
        return frozenset(index.name for index in self.indices[:-2] if isinstance(index, Var))


def tensor_gradients(variant: Variant, slope: Slope, *, fast_math: bool) -> tuple[TensorGradient, ...]:
    """The gradients of all elements that the score reads, with the way in which a CUDA backward sums each.

    ``slope`` is the derivative of the logit by the product. Tiles of dS are used only if dS is the derivative by the
    logit.
    """
    wanted = differentiable_of(variant)
    if not wanted:
        return ()
    loads = fold_slope(fold_variant(variant, fast_math=fast_math), wanted, fast_math=fast_math).loads
    return tuple(_gradient(variant, load, by_load, by_tile=slope.varying is None) for load, by_load in loads)


def _gradient(variant: Variant, load: Load, by_load: Expr, *, by_tile: bool) -> TensorGradient:
    constant, varying = split_slope_factors(by_load)
    used = frozenset[str]().union(*map(names, load.indices))
    gradient = TensorGradient(load, Way.EACH, constant, varying, load.indices)
    if not used & (_ROWS | _KEYS):
        return replace(gradient, way=Way.HEAD)
    if not used & _ROWS:
        return replace(gradient, way=Way.KEY)
    if not by_tile or gradient.of_product:
        return gradient
    if not used & _KEYS:
        return gradient if names(varying) & _KEYS else replace(gradient, way=Way.ROW)
    if is_of_pair(load) and varying == ONE and all(is_of_tile(variant, index) for index in load.indices[:-2]):
        return replace(gradient, way=Way.PAIR)
    moved = [_along_diagonal(each) for each in (*load.indices, varying)]
    if not is_large(variant, load) and not any(names(each) & (_ROWS | _KEYS) for each in moved):
        *indices, varying = moved
        return replace(gradient, way=Way.DIAGONAL, varying=varying, indices=tuple(indices))
    block = block_of_value(*load.indices, varying)
    return replace(gradient, way=Way.BLOCK, block=block) if all(n % _ROUND == 0 for n in block) else gradient


def is_large(variant: Variant, load: Load) -> bool:
    """Whether an element's place in its tensor may exceed an int32: the call decides the extents of two axes, besides
    those of heads and of what has an index of a head or of a sequence."""
    shape = variant.tensor(load.tensor).shape
    axes = zip(shape, load.indices, strict=True)
    return sum(isinstance(extent, str) and extent not in _FEW and not _is_few(at) for extent, at in axes) > 1


def _is_few(index: Expr) -> bool:
    return isinstance(index, Var) and index.name in _FEW


def _along_diagonal(node: Expr) -> Expr:
    """Write differences of a query and a key in terms of ``APART``."""
    if isinstance(node, Op) and node.type is Type.INT and node.op in ("add", "sub", "neg", "mul"):
        total = linear(node)
        queries, keys = (total.terms.get(Var(name, Type.INT), 0) for name in ("q", "kv"))
        at = total.terms.get(Var("q_pos", Type.INT), 0)  # q + seqlen_k - seqlen_q, and so is APART
        if queries + at and queries + at == -keys:
            gone = {Var(name, Type.INT): total.terms.get(Var(name, Type.INT), 0) for name in ("q", "q_pos", "kv")}
            total = total.plus(linear(_shifted(queries, at)))
            total.terms = {term: c for term, c in total.terms.items() if term not in gone}
            return _within(total.expr())
    return _within(node)


def _shifted(queries: int, at: int) -> Expr:
    """Return the part of a sum that stands for so many ``q`` and ``q_pos``, as many keys taken from these."""
    lengths = Op("sub", (Var("seqlen_q", Type.INT), Var("seqlen_k", Type.INT)), Type.INT)
    apart: Expr = mul(APART, Const(queries + at, Type.INT))
    return Op("add", (apart, mul(lengths, Const(queries, Type.INT))), Type.INT) if queries else apart


def _subtracted_first(node: Expr) -> Expr:
    """Write a difference of positions that are converted to floats, one by one, as a conversion of their difference."""
    match node:
        case Op("sub", (Op("to_float", (a,)), Op("to_float", (b,)) as converted)):
            return replace(converted, args=(Op("sub", (a, b), Type.INT),))
        case Op(args=args):
            return replace(node, args=tuple(map(_subtracted_first, args)))
    return node


def _within(node: Expr) -> Expr:
    match node:
        case Op(op=op, args=(a, b)) if op in MIRRORED and a.type is Type.INT is b.type:
            apart = _along_diagonal(Op("sub", (a, b), Type.INT))
            if APART.name in names(apart) and not names(apart) & (_ROWS | _KEYS):
                return replace(node, args=(apart, Const(0, Type.INT)))
            return replace(node, args=tuple(map(_along_diagonal, (a, b))))
        case Op(args=args):
            return replace(node, args=tuple(map(_along_diagonal, args)))
        case Load(indices=indices):
            return replace(node, indices=tuple(map(_along_diagonal, indices)))
    return node


def stored(gradients: tuple[TensorGradient, ...], dtypes: dict[str, str], element: str) -> Iterator[TensorGradient]:
    """Yield the biases whose gradients a call may store tile by tile, without a sum in memory: those of the dtype
    ``element`` of dS, or float32, that are read once. No two heads of the call may share an entry."""
    for each in gradients:
        alone = sum(other.load.tensor == each.load.tensor for other in gradients) == 1
        dtype = dtypes[each.load.tensor]
        if each.way is Way.PAIR and alone and (dtype == "fp32" or (dtype == element and each.constant == ONE)):
            yield each


def gradients_of(variant: Variant, *, fast_math: bool, tiles_only: bool = False) -> tuple[TensorGradient, ...]:
    """The gradients of a variant's own tensors, each with the way in which it is added up; ``tiles_only``: from tiles
    of dS where possible, as kernels need it whose consumers add up nothing."""
    slope = derivative(variant, fast_math=fast_math)
    gradients = tensor_gradients(variant, slope, fast_math=fast_math)
    if not tiles_only or slope.varying is not None:
        return gradients
    return tuple(_from_tiles(variant, each) for each in gradients)


def _from_tiles(variant: Variant, gradient: TensorGradient) -> TensorGradient:
    """The same gradient, summed from tiles of dS if its derivative allows that."""
    if gradient.of_product:
        return gradient
    if gradient.way is Way.KEY and not names(gradient.varying) & _ROWS:
        return replace(gradient, way=Way.COLUMN)
    if gradient.way is Way.HEAD and not is_large(variant, gradient.load):
        varying = _along_diagonal(_subtracted_first(gradient.varying))
        if not names(varying) & (_ROWS | _KEYS):
            return replace(gradient, way=Way.DIAGONAL, varying=varying)
    return gradient


def stored_gradients(plan: Plan) -> tuple[TensorGradient, ...]:
    """Return the biases whose gradient a call may have stored tile by tile; to that of a sink more is added."""
    variant = plan.variant
    of_sink = variant.uses(variant.sink)[1] if variant.sink is not None else frozenset()
    dtypes = {tensor.name: tensor.dtype for tensor in variant.tensors}
    once = stored(gradients_of(variant, fast_math=plan.fast_math), dtypes, plan.operands.ds.name)
    return tuple(each for each in once if each.load.tensor not in of_sink)
