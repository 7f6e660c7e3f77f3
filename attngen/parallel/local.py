"""The variant of one rank: the same mask and score over the rows and the keys that lie on it.

A rank holds some rows of the sequence and the keys that these visit, both in ascending order. Positions in expressions
become those of the whole sequence: ``q`` is read from a tensor of positions, and ``kv`` begins at a number of the call.
Tensors that are read by row or by key are cut in the same way, so that what is monotone stays so, and bands,
statistics and tile maps work as for one GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

from attngen.lang.check import with_dropout
from attngen.lang.dropout import DROPOUT_P
from attngen.lang.facts import index
from attngen.lang.ir import MAX_SEQLEN, Expr, Load, Op, Type, Var, rewrite
from attngen.lang.runs import TILE
from attngen.lang.variant import Monotone, Scalar, Tensor, Variant
from attngen.parallel.one_row import scalar_without_lengths, tensor_without_lengths

#: Positions of rows or keys: all of them lie here, or a run of them, or of rows two runs, or a table says
#: where each lies, of rows also where each tile of them lies. Of runs, bands have closed forms without a search.
Positions = Literal["all", "run", "runs", "tiles", "table"]

#: Suffixes that tell the names of local variants apart.
_SUFFIXES = {
    ("rows", "all"): "", ("rows", "run"): "_from_row", ("rows", "runs"): "_by_runs", ("rows", "tiles"): "_by_tiles",
    ("rows", "table"): "_by_rows",
    ("keys", "all"): "", ("keys", "run"): "_from_key", ("keys", "table"): "_by_keys",
}  # fmt: skip

#: Names of the call's own scalars and tensors.
ROW_BEGIN, ROW_POSITION = "row_begin", "row_position"
ROW_SPLIT, ROW_BEGIN_2 = "row_split", "row_begin_2"
KEY_BEGIN, KEY_POSITION = "key_begin", "key_position"
TOKENS, TOTAL = "tokens", "tokens_of_all"

#: Extents along which a tensor has something for each token of a sequence.
OF_TOKENS = ("seqlen_q", "seqlen_k")


#: Part of a tensor along an axis of tokens: the rows of a rank, its keys, or all tokens.
Part = Literal["rows", "keys", "all"]


@dataclass(frozen=True)
class LocalTensor:
    """A tensor of a local variant: which tensor of the variant it is, and what of it lies along each axis of tokens."""

    of: str
    axes: tuple[tuple[int, Part], ...] = ()


@dataclass(frozen=True)
class Local:
    """A variant over local rows and keys, and where its tensors come from, by name."""

    variant: Variant
    cuts: Mapping[str, LocalTensor]
    rows: Positions
    keys: Positions


@lru_cache(maxsize=256)
def local_variant(variant: Variant, rows: Positions, keys: Positions) -> Local:
    """The variant that a rank calls, for a variant of one dense sequence with as many queries as keys."""
    names = _Names(variant)
    q, row_tables, row_scalars = _positions("q", rows, names(ROW_POSITION), names(ROW_BEGIN))
    if rows == "runs":
        q, row_scalars = _in_two_runs(names(ROW_BEGIN), names(ROW_SPLIT), names(ROW_BEGIN_2))
    kv, key_tables, key_scalars = _positions("kv", keys, names(KEY_POSITION), names(KEY_BEGIN))
    tokens: Expr = index("seqlen_k") if keys == "all" else index(names(TOKENS))
    total = index(names(TOTAL))

    def packed(position: Expr) -> Expr:
        start = Op("mul", (index("b"), tokens), Type.INT)
        return Op("add", (start, position), Type.INT)

    meaning: dict[str, Expr] = {
        "q": q, "q_pos": q, "kv": kv, "q_global": packed(q), "kv_global": packed(kv),
        "seqlen_q": tokens, "seqlen_k": tokens, "total_q": total, "total_k": total,
    }  # fmt: skip
    cuts: dict[LocalTensor, Tensor] = {}
    taken: set[str] = set()

    def cut(load: Load) -> Expr:
        declared = tensor_without_lengths(variant.tensor(load.tensor))
        axes: list[tuple[int, Part]] = []
        shape, indices = list(declared.shape), list(load.indices)
        for axis, (extent, place) in enumerate(zip(declared.shape, load.indices, strict=True)):
            if extent in OF_TOKENS and place == q and rows != "all":
                axes.append((axis, "rows"))
                shape[axis], indices[axis] = "seqlen_q", index("q")
            elif extent in OF_TOKENS and place == kv and keys != "all":
                axes.append((axis, "keys"))
                shape[axis], indices[axis] = "seqlen_k", index("kv")
            elif extent in OF_TOKENS:
                axes.append((axis, "all"))
                shape[axis] = "seqlen_k" if keys == "all" else names(TOKENS)
            elif extent in ("total_q", "total_k"):
                shape[axis] = names(TOTAL)
        key = LocalTensor(load.tensor, tuple(axes))
        if key not in cuts:
            parts = [part for _, part in axes if part != "all"]
            name = load.tensor + "".join(f"_of_{part}" for part in parts)
            while name in taken or (parts and names.has(name)):
                name += "_"
            taken.add(name)
            cuts[key] = replace(declared, name=name, shape=tuple(shape))
        return Load(cuts[key].name, tuple(indices), load.type)

    def rule(node: Expr) -> Expr | None:
        if isinstance(node, Var):
            return meaning.get(node.name)
        own = isinstance(node, Load) and node.tensor in (names(ROW_POSITION), names(KEY_POSITION))
        return cut(node) if isinstance(node, Load) and not own else None

    def rewritten(expr: Expr | None) -> Expr | None:
        return None if expr is None else rewrite(expr, rule)

    mask, score, sink = rewritten(variant.mask), rewritten(variant.score), rewritten(variant.sink)
    assert mask is not None
    whole = Variant(variant.name, mask, score, sink=sink)
    read, loaded = whole.uses()
    extents = {extent for tensor in cuts.values() for extent in tensor.shape}
    own_scalars = (
        *row_scalars, *key_scalars,
        *(Scalar(name, "int32", min=1, max=MAX_SEQLEN) for name in (names(TOKENS), names(TOTAL))),
    )  # fmt: skip
    held = tuple(table for table in (*row_tables, *key_tables) if table.name in loaded or variant.dropout)
    made = replace(
        whole,
        name=f"{variant.name}{_SUFFIXES['rows', rows]}{_SUFFIXES['keys', keys]}"[:64],
        scalars=(
            *(scalar_without_lengths(scalar) for scalar in variant.scalars if scalar != DROPOUT_P),
            *(scalar for scalar in own_scalars if scalar.name in {*read, *extents}),
        ),
        tensors=(*cuts.values(), *held),
        mask_text=None, score_text=None, sink_text=None,
    )  # fmt: skip
    if variant.dropout:
        made = with_dropout(made)
    return Local(made, {tensor.name: key for key, tensor in cuts.items()}, rows, keys)


class _Names:
    """Names of the call's own, which no name of the variant equals."""

    def __init__(self, variant: Variant) -> None:
        self._taken = {*(scalar.name for scalar in variant.scalars), *(tensor.name for tensor in variant.tensors)}
        self._taken |= {extent for tensor in variant.tensors for extent in tensor.shape if isinstance(extent, str)}

    def has(self, name: str) -> bool:
        """Whether the variant has a name."""
        return name in self._taken

    def __call__(self, name: str) -> str:
        """The name itself, or if the variant has it, one like it."""
        while name in self._taken:
            name += "_"
        return name


def _positions(
    axis: str, positions: Positions, table: str, begin: str
) -> tuple[Expr, tuple[Tensor, ...], tuple[Scalar, ...]]:
    """The position in the sequence of a local row or key, and what it reads."""
    here = index(axis)
    if positions == "all":
        return here, (), ()
    if positions in ("run", "runs"):
        scalar = Scalar(begin, "int32", min=0, max=MAX_SEQLEN)
        return Op("add", (here, index(begin)), Type.INT), (), (scalar,)
    extent = "seqlen_q" if axis == "q" else "seqlen_k"
    steps = Monotone(0, runs=TILE if positions == "tiles" else None)
    tensor = Tensor(table, "int32", (extent,), steps, (0, MAX_SEQLEN))
    return Load(table, (here,), Type.INT), (tensor,), ()


def _in_two_runs(begin: str, split: str, begin_2: str) -> tuple[Expr, tuple[Scalar, ...]]:
    """The position of a local row of two runs, the second of which begins at row ``split``."""
    q = index("q")
    first, second = (Op("add", (q, index(name)), Type.INT) for name in (begin, begin_2))
    position = Op("select", (Op("lt", (q, index(split)), Type.BOOL), first, second), Type.INT)
    return position, tuple(Scalar(name, "int32", min=0, max=MAX_SEQLEN) for name in (begin, split, begin_2))


def own_values(variant: Variant, here: Mapping[str, Any]) -> dict[str, Any]:
    """Values by the names above, by those that a local variant of ``variant`` has for them."""
    names = _Names(variant)
    return {names(name): value for name, value in here.items()}
