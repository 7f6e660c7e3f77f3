"""Biases: elements that a score reads at ``[..., q, kv]``, one for each pair of query and key."""

from __future__ import annotations

from dataclasses import replace

from attngen.dtypes import DTYPES
from attngen.lang.ir import Const, Expr, Load, Op, Type, Var, holds_int64, names, own, rewrite, walk
from attngen.lang.literals import fold_literals
from attngen.lang.ranges import Range
from attngen.lang.variant import Tensor, Variant

#: Elements of which kernels can load tiles: their kinds and sizes in bytes.
_KINDS, _BYTES = frozenset({"float", "int"}), frozenset({1, 2, 4})

#: Lanes of a warp, each of which holds an entry of a small table; in a backward it may hold two. In a forward two
#: shuffles for an element are slower than a load from L1, at head dim 64.
LANES = 32
MOST_HELD = 2 * LANES

#: Any integer, in a condition on a bias.
_ANY = own("any integer")
#: Last two indices of a bias; what the indices before them may name beside integer scalars, constant over a tile; those
#: that tell work tiles apart.
_PAIR, _OF_TILE = (Var("q", Type.INT), Var("kv", Type.INT)), frozenset({"b", "h", "hk", "heads", "kv_heads"})
_OF_WORK = frozenset({"b", "h", "hk"})
_MOST_AXES = 5  # of a tensor map


def is_of_pair(node: Expr) -> bool:
    """Whether a node is an element of a tensor whose last two indices are ``q`` and ``kv``."""
    return isinstance(node, Load) and node.indices[-2:] == _PAIR


def biases(variant: Variant, room: int | None = None) -> tuple[Load, ...]:
    """The elements of up to 4 bytes that a score reads at ``[..., q, kv]``, of which kernels can load tiles.

    The other indices are functions of ``b``, ``h``, ``hk`` and scalars. The widest come first; ``room`` is the most
    bytes that they may take together for each pair, and those that do not fit are left out.
    """
    if variant.score is None:
        return ()
    tiled = {tensor.name for tensor in variant.tensors if _has_tiles(tensor, variant.ranges.get(tensor.name))}
    nodes = walk(rewrite(variant.score, fold_literals))
    loads = dict.fromkeys(
        node
        for node in nodes
        if isinstance(node, Load) and node.tensor in tiled and is_of_pair(node) and _comes_in_tiles(variant, node)
    )
    taken, left = [], room
    for load in sorted(loads, key=lambda load: -_bytes(variant, load)):
        if left is None or _bytes(variant, load) <= left:
            taken.append(load)
            left = None if left is None else left - _bytes(variant, load)
    return tuple(taken)


def element_bytes(variant: Variant, room: int | None = None) -> tuple[int, ...]:
    """The size in bytes of an element of each bias."""
    return tuple(_bytes(variant, load) for load in biases(variant, room))


def rooms(variant: Variant) -> tuple[int, ...]:
    """Bytes per pair that a plan may give to tiles of biases, in the order in which it tries them: all, then fewer; ()
    without biases."""
    totals = (sum(element_bytes(variant, room)) for room in (None, 4, 2, 1))
    return tuple(dict.fromkeys(total for total in totals if total))


def _bytes(variant: Variant, load: Load) -> int:
    return next(DTYPES[tensor.dtype].bytes for tensor in variant.tensors if tensor.name == load.tensor)


def box_bytes(keys: int, element: int) -> int:
    """Bytes of a row of one copy of a bias, and its swizzle: 128, or 64 if the ``keys`` of a tile do not fill whole
    rows of 128."""
    return 128 if keys * element % 128 == 0 else 64


def _has_tiles(tensor: Tensor, values: Range | None) -> bool:
    """Whether elements of a tensor may come as tiles. TMA fills with 0 outside of the tensor, so that 0 must be in the
    declared range of its values."""
    dtype = DTYPES[tensor.dtype]
    inside = values is None or values[0] <= 0 <= values[1]
    return dtype.kind in _KINDS and dtype.bytes in _BYTES and inside


def _comes_in_tiles(variant: Variant, load: Load) -> bool:
    return len(load.indices) <= _MOST_AXES and all(is_of_tile(variant, index) for index in load.indices[:-2])


def is_of_tile(variant: Variant, index: Expr) -> bool:
    """Whether an index is an int32 that is the same for all pairs of a tile, and reads no tensor, as ``b // rows``."""
    scalars = {scalar.name for scalar in variant.arguments if scalar.dtype == "int32"}
    reads_tensors = any(not isinstance(node, Const | Var | Op) for node in walk(index))
    return names(index) <= _OF_TILE | scalars and not (reads_tensors or holds_int64(index))


def _is_of_work(load: Load) -> bool:
    """Whether all indices but the last one are numbers, or names that tell work tiles apart."""
    return all(isinstance(one, Const) or (isinstance(one, Var) and one.name in _OF_WORK) for one in load.indices[:-1])


def lookups(variant: Variant, room: int, most: int = LANES) -> frozenset[Load]:
    """The reads of tables of at most so many floats whose index is an integer bias: a warp holds all entries, one or
    two in each lane.

    There are none if a condition of the score decides which lanes read: all lanes take part in a shuffle.
    """
    if variant.score is None:
        return frozenset()
    score = rewrite(variant.score, fold_literals)
    integers = {load for load in biases(variant, room) if load.type is Type.INT}
    small = {tensor.name for tensor in variant.tensors if _has_entries(tensor, most)}
    held = frozenset(
        node
        for node in walk(score)
        if isinstance(node, Load) and node.tensor in small and asked_by(node.indices[-1])[0] in integers
        and _is_of_work(node)
    )  # fmt: skip
    around = rewrite(score, lambda node: Var("s", Type.FLOAT) if node in held else None)
    chooses = any(isinstance(node, Op) and node.op == "select" for node in walk(around))
    return frozenset() if chooses else held


def hiding_entries(variant: Variant, room: int, most: int = LANES) -> Load | None:
    """The integer bias that alone decides which pairs are visible, where the score adds an entry of a table that lanes
    hold at that integer: entries that hide a pair may then be −inf, so that no pair is masked. None otherwise."""
    held = lookups(variant, room, most)
    if len(held) != 1 or variant.score is None:
        return None
    (load,) = held
    integer, more = asked_by(load.indices[-1])
    assert isinstance(integer, Load)
    low, high = variant.ranges[integer.tensor]
    mask, score = (rewrite(each, fold_literals) for each in (variant.mask, variant.score))
    read = set(walk(rewrite(mask, lambda node: _ANY if node == integer else None)))
    alone = _ANY in read and not any(isinstance(node, Load | Var) and node != _ANY for node in read)
    return integer if alone and not more and low >= 0 and high < most and _adds_once(score, load) else None


def _adds_once(score: Expr, load: Load) -> bool:
    """Whether a score is a sum of the load and of terms without it."""
    if isinstance(score, Op) and score.op == "add":
        holding = [part for part in score.args if load in walk(part)]
        return len(holding) == 1 and _adds_once(holding[0], load)
    return score == load


def asked_by(index: Expr) -> tuple[Expr, int]:
    """The integer of an index, and the number of entries that is added if it is negative, as torch's indices count from
    the end; 0 if none is added."""
    match index:
        case Op(
            op="select",
            args=(Op(op="lt", args=(low, Const(0))), Op(op="add", args=(moved, Const(int() as more))), other),
        ):
            negative = Op(
                "min", (low, Const(-1, Type.INT)), Type.INT, wide=True
            )  # of an int64, which a sum might exceed
            return (other, more) if low == other and moved in (low, negative) else (index, 0)
    return index, 0


def _has_entries(tensor: Tensor, most: int) -> bool:
    """Whether the last axis of a tensor of floats is declared to have at most so many."""
    extent = tensor.shape[-1] if tensor.shape else None  # a single number has no entries to choose from
    return DTYPES[tensor.dtype].kind == "float" and isinstance(extent, int) and extent <= most


def without_biases(variant: Variant, room: int, most: int = LANES) -> Variant:
    """The variant without the reads that tiles of biases replace: what consumers still do for each pair, which decides
    the tile. An integer bias may be an index: what it indexes is still read for each pair, unless a warp holds it,
    which it does up to so many entries."""
    tiled = frozenset(biases(variant, room))
    if not tiled or variant.score is None:
        return variant
    other: dict[Type, Expr] = {Type.FLOAT: Var("s", Type.FLOAT), Type.INT: Op("add", _PAIR, Type.INT)}
    held = lookups(variant, room, most)
    score = rewrite(rewrite(variant.score, fold_literals), lambda node: Var("s", Type.FLOAT) if node in held else None)
    score = rewrite(score, lambda node: other[node.type] if node in tiled else None)
    return replace(variant, score=score)


def reads_integers(variant: Variant, room: int) -> bool:
    """Whether a bias is an integer, which may be an index of another tensor."""
    return any(load.type is Type.INT for load in biases(variant, room))
