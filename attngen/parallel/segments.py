"""Segments: rows of a rank that follow one another in a sequence or document, with the keys that they see.

Kernels of packed sequences put the last query at the last key. So a variant that reads positions only as the distance
from a key to its query, and sees no key after the query, computes the same over a segment as over the whole sequence:
the kernels of one GPU serve.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from attngen.lang.bands import bands
from attngen.lang.facts import Facts, index
from attngen.lang.ir import Const, Expr, Load, Op, Type, Var, rewrite
from attngen.lang.simplify import COMPLEMENT, Linear, add, integer, linear, make, simplify
from attngen.lang.symbols import Symbols
from attngen.lang.variant import Variant
from attngen.parallel.sharding import Sharding

#: Names that have another value in a segment than in the whole sequence, but for ``q_pos`` and ``kv``.
_ELSEWHERE = frozenset({"q", "q_global", "kv_global", "b", "seqlen_q", "seqlen_k", "total_q", "total_k"})

_DISTANCE = Var("distance", Type.INT)
_SUMS = ("add", "sub", "neg", "mul")


def named(expr: Expr) -> Expr:
    """The expression with ``q + seqlen_k - seqlen_q``, in sums and comparisons of integers, rewritten as ``q_pos``."""

    def position(total: Linear) -> Linear | None:
        times = total.terms.get(index("q"), 0)
        if not times or total.terms.get(index("seqlen_k")) != times or total.terms.get(index("seqlen_q")) != -times:
            return None
        for name, factor in (("q", -1), ("seqlen_k", -1), ("seqlen_q", 1), ("q_pos", 1)):
            total = total.plus(Linear({index(name): 1}), factor * times)
        return total

    def rule(node: Expr) -> Expr | None:
        if not isinstance(node, Op) or any(arg.type is not Type.INT for arg in node.args):
            return None
        if node.op in ("add", "sub"):
            total = position(linear(node))
            return None if total is None else total.expr()
        if node.op in COMPLEMENT:
            total = position(linear(node.args[0]).plus(linear(node.args[1]), -1))
            return None if total is None else make(node.op, total.expr(), integer(0))
        return None

    return rewrite(expr, rule)


def ends_at_query(variant: Variant) -> bool:
    """Whether no query sees a key after itself."""
    facts = Facts.of(variant)
    same = rewrite(named(variant.mask), lambda node: index("q") if node == index("q_pos") else None)
    order = Symbols(facts.of_tiles(), {})
    after = add(index("q_hi"), integer(1))
    visible = bands(same, facts, over="kv").visible
    return all(interval.hi is not None and order.holds("le", interval.hi, after) for interval in visible)


@lru_cache(maxsize=256)
def reads_no_positions(variant: Variant) -> bool:
    """Whether a variant is the same for all pairs of a query and a key."""
    read = variant.uses()[0]
    return not read & (_ELSEWHERE | {"q_pos", "kv"}) and _same_bounds(variant)


@lru_cache(maxsize=256)
def is_relative(variant: Variant, numbers: tuple[tuple[str, int], ...] = ()) -> bool:
    """Whether a variant reads positions only as the distance from a key to its query, and sees no later key, if some of
    its scalars are these ``numbers``."""
    kv = index("kv")
    moved = Op("add", (kv, _DISTANCE), Type.INT)

    def free(expr: Expr) -> bool:
        match expr:
            case Const():
                return True
            case Var(name=name):
                return name != "kv" and name not in _ELSEWHERE
            case Load(indices=indices):
                return all(map(free, indices))
            case Op(op=op, args=(left, right)) if op in COMPLEMENT and left.type is right.type is Type.INT:
                return all(map(free, linear(left).plus(linear(right), -1).terms))
            case Op(op=op) if op in _SUMS and expr.type is Type.INT:
                terms = linear(expr, expand=True).terms
                return (expr not in terms and all(map(free, terms))) or all(map(free, expr.args))
            case Op(args=args):
                return all(map(free, args))
        return False

    expressions = [named(each) for each in (variant.mask, variant.score, variant.sink) if each is not None]
    of_keys = [rewrite(each, lambda node: moved if node == index("q_pos") else None) for each in expressions]
    return _same_bounds(variant) and all(map(free, of_keys)) and _ends_at_query(variant, dict(numbers))


def _ends_at_query(variant: Variant, numbers: dict[str, int]) -> bool:
    def known(node: Expr) -> Expr | None:
        return integer(numbers[node.name]) if isinstance(node, Var) and node.name in numbers else None

    return ends_at_query(replace(variant, mask=simplify(rewrite(variant.mask, known)), mask_text=None))


def _same_bounds(variant: Variant) -> bool:
    """Whether no bound of a scalar or tensor names a length that a segment changes."""
    bounds = {bound for scalar in variant.scalars for bound in (scalar.min, scalar.max)}
    bounds |= {bound for tensor in variant.tensors for bound in (*(tensor.range or ()), *tensor.shape)}
    return not any(bound in _ELSEWHERE for bound in bounds if isinstance(bound, str))


@dataclass(frozen=True)
class RowSegments:
    """Rows ``begin`` to ``end - 1`` of the sequence and the keys ``lo`` to ``hi - 1`` that they see; rows ascend."""

    begin: np.ndarray
    end: np.ndarray
    lo: np.ndarray
    hi: np.ndarray

    @classmethod
    def of(
        cls, runs: np.ndarray, first: np.ndarray, sharding: Sharding, offsets: Sequence[int], *, positions: bool = True
    ) -> RowSegments:
        """The segments of runs of rows, (n, 2). ``first`` is the first tile of keys that each tile of rows visits,
        ``offsets`` those of the documents. Without ``positions``, rows of a document see all of it and are one segment.
        """
        if not len(runs):
            none: np.ndarray = np.empty(0, dtype=np.int64)
            return cls(none, none, none, none)
        documents = np.unique(np.asarray(offsets, dtype=np.int64))
        run_of = np.searchsorted(runs[:, 0], documents, side="right") - 1
        inside = (run_of >= 0) & (documents > runs[run_of, 0]) & (documents < runs[run_of, 1])
        begin = np.sort(np.concatenate([runs[:, 0], documents[inside]]))
        end = np.sort(np.concatenate([runs[:, 1], documents[inside]]))
        number = np.searchsorted(documents, begin, side="right") - 1
        low, high = documents[number], documents[number + 1]
        if not positions:
            return cls(begin, end, low, high)
        keys = sharding.bounds[first[sharding.tiles_of(begin)]]
        return cls(begin, end, np.maximum(low, keys), end)

    def __len__(self) -> int:
        return len(self.begin)

    @property
    def work(self) -> float:
        """Pairs of rows and keys, about."""
        rows = self.end - self.begin
        return float((rows * (self.hi - self.lo - rows / 2)).sum())

    def take(self, which: np.ndarray) -> RowSegments:
        """Some of them."""
        return RowSegments(self.begin[which], self.end[which], self.lo[which], self.hi[which])

    def split(self, at: np.ndarray, first: np.ndarray) -> tuple[RowSegments, RowSegments]:
        """The rows of each segment before ``at``, and those from there on, which see keys from ``first`` on."""
        before = RowSegments(self.begin, at, self.lo, np.where(at < self.end, at, self.hi))
        after = RowSegments(at, self.end, np.maximum(self.lo, first), self.hi)
        return before.take(at > self.begin), after.take(at < self.end)
