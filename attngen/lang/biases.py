"""Biases: elements that a score reads at ``[..., q, kv]``, one for each pair of query and key."""

from __future__ import annotations

from dataclasses import replace

from attngen.dtypes import DTYPES
from attngen.lang.ir import Const, Expr, Load, Type, Var, rewrite, walk
from attngen.lang.literals import fold_literals
from attngen.lang.variant import Variant

#: Bytes per element of a bias whose tiles kernels can load as matrix fragments.
BIAS_BYTES = 2

#: Last two indices of a bias, and the indices allowed before them, which are constant over a tile.
_PAIR, _OF_TILE = (Var("q", Type.INT), Var("kv", Type.INT)), frozenset({"b", "h", "hk"})
_MOST_AXES = 5  # of a tensor map


def is_of_pair(node: Expr) -> bool:
    """Whether a node is an element of a tensor whose last two indices are ``q`` and ``kv``."""
    return isinstance(node, Load) and node.indices[-2:] == _PAIR


def biases(variant: Variant) -> tuple[Load, ...]:
    """The elements that a score reads at ``[..., q, kv]``, 16 bits each: one copy can load a tile of them.

    The other indices are ``b``, ``h``, ``hk`` or numbers.
    """
    if variant.score is None:
        return ()
    narrow = {tensor.name for tensor in variant.tensors if _is_narrow_float(tensor.dtype)}
    nodes = walk(rewrite(variant.score, fold_literals))
    return tuple(
        dict.fromkeys(
            node
            for node in nodes
            if isinstance(node, Load) and node.tensor in narrow and is_of_pair(node) and _comes_in_tiles(node)
        )
    )


def _is_narrow_float(name: str) -> bool:
    return DTYPES[name].kind == "float" and DTYPES[name].bytes == BIAS_BYTES


def _comes_in_tiles(load: Load) -> bool:
    same = all(isinstance(one, Const) or (isinstance(one, Var) and one.name in _OF_TILE) for one in load.indices[:-2])
    return same and len(load.indices) <= _MOST_AXES


def without_biases(variant: Variant) -> Variant:
    """The variant with a score that reads no bias; it decides the tile of kernels that load tiles of biases."""
    tiled = frozenset(biases(variant))
    if not tiled or variant.score is None:
        return variant
    score = rewrite(variant.score, lambda node: Var("s", Type.FLOAT) if node in tiled else None)
    return replace(variant, score=score)
