"""Blocks of pairs on which conditions of a mask are constant: those of ``sel[h, q // 64, kv // 64]`` are 64 × 64.

A mask reads such a tensor at one element for all pairs of a block, so that one evaluation decides the block. The field
``blocks`` of a variant adds such a condition.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import gcd

from attngen.lang.declared import Tensor
from attngen.lang.facts import index
from attngen.lang.ir import Const, Expr, Load, Op, Type, Var, children, names, rewrite, walk
from attngen.lang.simplify import linear
from attngen.lang.variant import VISIBLE, Variant

#: Queries and keys of a block.
Block = tuple[int, int]

#: The sizes that a variant's field ``blocks`` takes, and the tensor that it declares.
BLOCKS = (64, 128)
BLOCK_MASK = Tensor("block_mask", "bool", ("b", "h", "query_blocks", "key_blocks"))

#: Fewest pairs of a block: a look at each smaller one would take longer than a look at each pair by all lanes.
_FEWEST_PAIRS = 16

#: Names that differ from query to query, and from key to key.
_QUERIES, _KEYS = frozenset({"q", "q_pos", "q_global"}), frozenset({"kv", "kv_global"})


def with_blocks(variant: Variant, size: int) -> Variant:
    """The variant whose queries see, of what its mask shows, the blocks of ``size`` keys that ``block_mask`` shows to
    their block of as many queries."""

    def block(axis: str) -> Expr:
        return Op("floordiv", (index(axis), Const(size, Type.INT)), Type.INT)

    shown = Load(BLOCK_MASK.name, (index("b"), index("h"), block("q"), block("kv")), Type.BOOL)
    mask = shown if variant.mask == VISIBLE else Op("and", (shown, variant.mask), Type.BOOL)
    return replace(variant, mask=mask, mask_text=None, tensors=(*variant.tensors, BLOCK_MASK))


def block_of(mask: Expr, tile: Block) -> Block | None:
    """Return the largest block that divides a tile, and on which every condition is constant that reads tensors by
    blocks of queries and of keys; None if no condition does."""
    steps = [_steps(each) for each in _conditions(mask) if _reads_both(each)]
    of_blocks = [(rows, columns) for rows, columns in steps if rows * columns >= _FEWEST_PAIRS]
    if not of_blocks:
        return None
    rows, columns = (gcd(of_tile, *sizes) for of_tile, sizes in zip(tile, zip(*of_blocks, strict=True), strict=True))
    return (rows, columns) if rows * columns >= _FEWEST_PAIRS else None


def at_corner(mask: Expr, block: Block) -> Expr:
    """Return a mask as the pairs of one block evaluate it: what is constant there reads the block's first query
    ``q_lo`` and key ``kv_lo``."""
    sizes = dict(zip(("q", "kv"), block, strict=True))
    names_of = {"q": "q", "q_pos": "q", "kv": "kv"}
    alone: dict[Expr, Expr] = {index(n): index(f"{n}_lo") for n, axis in names_of.items() if sizes[axis] == 1}

    def rule(node: Expr) -> Expr | None:
        if node in alone:
            return alone[node]
        divided = _divided(node)
        if divided is None or divided[1] % sizes[divided[0]]:
            return None
        axis = divided[0]
        return rewrite(node, lambda each: index(f"{axis}_lo") if each == index(axis) else None)

    return rewrite(mask, rule)


def block_of_value(*parts: Expr) -> Block:
    """The queries and the keys, from a multiple of their number on, over which expressions are constant; 0: all."""
    steps = [_steps(each) for each in parts]
    return gcd(*(rows for rows, _ in steps)), gcd(*(columns for _, columns in steps))


def loads_at_corner(expr: Expr, block: Block) -> Expr:
    """Return an expression that reads tensors by queries and by keys at ``q_lo`` and ``kv_lo`` where such an element is
    the same for all pairs of a block."""

    def rule(node: Expr) -> Expr | None:
        if not isinstance(node, Load) or not all(names(node) & axis for axis in (_QUERIES, _KEYS)):
            return None
        constant = all(own % size == 0 for own, size in zip(_steps(node), block, strict=True))
        return at_corner(node, block) if constant else None

    return rewrite(expr, rule)


def _conditions(node: Expr) -> Iterator[Expr]:
    """The conditions that ``and``, ``or`` and ``not`` combine to a mask."""
    if isinstance(node, Op) and node.op in ("and", "or", "not", "xor"):
        for each in node.args:
            yield from _conditions(each)
    elif node.type is Type.BOOL:
        yield node


def _reads_both(condition: Expr) -> bool:
    """Whether a condition reads tensors by query and by key."""
    read = [names(each) for each in walk(condition) if isinstance(each, Load)]
    return any(each & _QUERIES for each in read) and any(each & _KEYS for each in read)


def _steps(node: Expr) -> Block:
    """The queries and the keys, from a multiple of their number on, over which an expression is constant; 0: all."""
    divided = _divided(node)
    if divided is not None:
        return (divided[1], 0) if divided[0] == "q" else (0, divided[1])
    if isinstance(node, Var):
        return int(node.name in _QUERIES), int(node.name in _KEYS)
    rows, columns = 0, 0
    for each in children(node):
        of_rows, of_columns = _steps(each)
        rows, columns = gcd(rows, of_rows), gcd(columns, of_columns)
    return rows, columns


def _divided(node: Expr) -> tuple[str, int] | None:
    """The axis of ``(q + c) // n``, or of the same of ``kv``, and the positions over which it is constant; else
    None."""
    match node:
        case Op(op="floordiv", args=(x, Const(value=n))) if n > 0:
            size = int(n)
        case Op(op="rshift", args=(x, Const(value=n))) if 0 <= n < 31:
            size = 1 << int(n)
        case _:
            return None
    total = linear(x)
    for axis in ("q", "kv"):
        if total.terms == {index(axis): 1}:
            return axis, gcd(size, total.constant)
    return None
