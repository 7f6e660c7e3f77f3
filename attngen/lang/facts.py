"""Assumptions of the tile analysis: ranges of names, facts about tensors, and the box of a tile.

A box is a set of rows and keys: ``q_lo <= q <= q_hi``, ``kv_lo <= kv <= kv_hi`` and, where a tile packs several
heads of one KV head, ``h_lo <= h <= h_hi``; all bounds are inclusive and inside their sequence. Everything else
(``b``, ``hk``, lengths, scalars, elements at indices that do not vary) has one value over the box.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from attngen.lang.ir import MAX_SEQLEN, Const, Expr, Op, Type, Var, own, rewrite
from attngen.lang.ranges import INDEX_RANGES, INT32, Range, declared_ranges

if TYPE_CHECKING:
    from attngen.lang.declared import Scalar, Tensor
    from attngen.lang.variant import Variant

#: Start of the sequence in the packed tensor: ``q_global = q + q_start``, ``kv_global = kv + kv_start``.
Q_START, KV_START = own("q_start"), own("kv_start")
STARTS: dict[str, tuple[str, Var]] = {"q_global": ("q", Q_START), "kv_global": ("kv", KV_START)}

#: Extents whose length has another name in expressions.
_LENGTHS: dict[str, str] = {"h": "heads", "hk": "kv_heads"}


_LENGTH: Range = (0, MAX_SEQLEN)

#: A mask is evaluated for keys that exist; the loop over keys must also be right where there is none.
_WITHOUT_KEYS: dict[str, Range] = {
    **dict.fromkeys(("seqlen_q", "seqlen_k", "total_q", "total_k"), _LENGTH),
    **dict.fromkeys(("q_pos", "q_pos_lo", "q_pos_hi"), (-MAX_SEQLEN, MAX_SEQLEN - 1)),
}


def index(name: str) -> Var:
    """Return an integer variable."""
    return Var(name, Type.INT)


def reserved(name: Var) -> bool:
    """Whether a variable is an index, a length or a corner, whose range is that of a sequence."""
    return name.name in INDEX_RANGES or name in (Q_START, KV_START)


@dataclass(frozen=True)
class Facts:
    """Declared facts about the names of an expression; trusted, as ``verify`` and ``debug`` check them.

    ``ranges`` holds inclusive numeric ranges of scalars, of the elements of tensors and of the index names;
    ``tensors`` the declarations of the tensors.
    """

    ranges: Mapping[str, Range] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    def __hash__(self) -> int:
        """Return the hash of both tables, which are never changed: facts are keys of caches."""
        return hash((frozenset(self.ranges.items()), frozenset(self.tensors)))

    @classmethod
    def of(cls, variant: Variant) -> Facts:
        """Return the facts that a variant declares."""
        return cls.declared(variant.scalars, variant.tensors)

    @classmethod
    def declared(cls, scalars: Iterable[Scalar], tensors: Iterable[Tensor]) -> Facts:
        """Return the facts that these declarations state."""
        tensors = tuple(tensors)
        return cls(declared_ranges(scalars, tensors), {tensor.name: tensor for tensor in tensors})

    def of_tiles(self, lengths: Iterable[str] = (), sizes: Iterable[str] = ()) -> Facts:
        """Return the facts for loop bounds, which are also computed where a sequence has no key.

        Names in ``lengths`` that are not declared are lengths, too; those in ``sizes`` are sizes of tiles.
        """
        named = {**dict.fromkeys(lengths, _LENGTH), **dict.fromkeys(sizes, (1, MAX_SEQLEN))}
        return Facts({**named, **INDEX_RANGES, **self.ranges, **_WITHOUT_KEYS}, self.tensors)

    def range(self, name: str, type: Type) -> Range:
        """Return the range of a name; a name that is not declared is an extent bound at the call."""
        known = self.ranges.get(name) or INDEX_RANGES.get(name)
        if known is not None:
            return known
        if name in (Q_START.name, KV_START.name):
            return _LENGTH
        return (0, INT32[1]) if type is Type.INT else (-float("inf"), float("inf"))

    def monotone_axis(self, tensor: str) -> int | None:
        """Return the axis along which an integer tensor never decreases, or None."""
        declared = self.tensors.get(tensor)
        if declared is None or declared.monotone is None or declared.type is not Type.INT:
            return None
        axis = declared.monotone.axis % len(declared.shape)
        return None if declared.shape[axis] == "b" else axis  # no name says how large the batch is

    def extent(self, tensor: str, axis: int) -> tuple[Expr, bool]:
        """Number of elements of a tensor along ``axis``, and whether it is exact.

        A sequence may be shorter than the tensor: then its length is a lower bound.
        """
        extent = self.tensors[tensor].shape[axis]
        if isinstance(extent, int):
            return Const(extent, Type.INT), True
        return index(_LENGTHS.get(extent, extent)), extent not in ("seqlen_q", "seqlen_k")


def local(expr: Expr) -> Expr:
    """Write packed positions as positions within the sequence plus its start."""

    def rule(node: Expr) -> Expr | None:
        if isinstance(node, Var) and node.name in STARTS:
            position, start = STARTS[node.name]
            return Op("add", (index(position), start), Type.INT)
        return None

    return rewrite(expr, rule)


def aligned() -> Expr:
    """``q_pos`` in terms of ``q``: ``q + seqlen_k - seqlen_q``."""
    return Op("sub", (Op("add", (index("q"), index("seqlen_k")), Type.INT), index("seqlen_q")), Type.INT)
