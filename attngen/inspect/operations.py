"""The plans of kernels beside attention, in words: append to a cache, quantize, widen, score keys, select scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attngen.build.pipeline import plans as plans_of
from attngen.dtypes import CHUNK_BYTES
from attngen.formats import APPEND, INDEX_SCORES, QUANTIZE, TOPK, WIDEN
from attngen.plan.model import Plan
from attngen.schema import load_spec

#: Label and text of each line, for people.
Facts = Iterator[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class HelperExplanation:
    """The plan of such a kernel, and what its explanation says."""

    plan: Plan

    def facts(self) -> list[tuple[str, str]]:
        """Label and text of each line, for people."""
        does, *others = _FACTS[self.plan.direction](self.plan)
        return [does, ("target", f"{self.plan.arch_name}, {self.plan.dtype_name}, {self.plan.direction}"), *others]

    def to_dict(self) -> dict[str, Any]:
        """The document of ``attngen explain --json``."""
        return {"plan": self.plan.to_dict(), "facts": dict(self.facts())}


def explain_helpers(spec: str | Path, kernel: str | None = None) -> list[HelperExplanation]:
    """Explain the kernels of a spec that are no attention, or those whose name contains ``kernel``.

    Raises SpecError if the spec is wrong.
    """
    plans = [plan for _, plan in plans_of(load_spec(spec)) if kernel is None or kernel in plan.name]
    return [HelperExplanation(plan) for direction in _FACTS for plan in plans if plan.direction == direction]


def _of_append(plan: Plan) -> Facts:
    qk, v = plan.head_dim_qk, plan.head_dim_v
    widest = str(qk) if qk == v else f"{qk} for q and k, {v} for v"
    vectors = plan.threads * CHUNK_BYTES // plan.operands.k.bytes
    yield "does", "writes new keys and values into pages or dense caches; rotates keys and queries on the way"
    yield "head_dim", f"any whose rows are multiples of {CHUNK_BYTES} B; those of this spec up to {widest}"
    yield "block", f"{plan.threads} threads of {CHUNK_BYTES} B each: {vectors} numbers of a row of K, V or Q"
    yield "loads", f"by pointers; strides and addresses are multiples of {plan.alignment} B"
    yield "grid", "one block for as many rows of tokens and heads as it holds"


def _of_quantize(plan: Plan) -> Facts:
    if plan.loads == "descriptor":
        yield from _of_quantized_tiles(plan)
        return
    given = plan.operands.q.bytes
    yield "does", "rounds Q, K and V to 8 bits and finds their scales; rotates and transforms rows of Q and K"
    yield "head_dim", f"any multiple of {CHUNK_BYTES // given} up to 256"
    yield "block", f"some rows of a head; a thread has {4 * CHUNK_BYTES} B, up to {plan.threads} threads"
    yield "loads", f"by pointers; strides and addresses are multiples of {plan.alignment} B"
    yield "launches", "1 with a scale for each block of tokens; else 2, which find the largest numbers and round"
    yield "moves", f"{given} B of a number in, 1 B out; with 2 launches twice the former"


def _of_quantized_tiles(plan: Plan) -> Facts:
    heads, groups = 128 // plan.head_dim_qk, plan.num_warps // 4
    shared = plan.launches[0].shared_bytes
    yield "does", "rounds Q, K and V to 8 bits and finds scales but those of tensors; rotates and transforms Q and K"
    yield "head_dim", str(plan.head_dim_qk)
    yield "tile", f"{plan.tile_m} tokens of {heads} heads, for {groups} groups of 4 warps"
    yield "loads", f"by the copy engine, {plan.stages} tiles of a group at a time; {shared} B"
    yield "launches", "1; with rotation 2 for scales of tokens and 3 for those of heads, of which V has one"
    yield "moves", f"{plan.operands.q.bytes} B of a number in, 1 B out"


def _of_widen(plan: Plan) -> Facts:
    wide, narrow = plan.operands.q.bytes, plan.operands.k.bytes
    yield "does", f"writes the used keys and values of a cache in 8 bits in {plan.dtype_name}, times their scales"
    yield "head_dim", "any multiple of 8"
    yield "block", f"{plan.threads} threads: keys or values of {plan.tile_n} tokens of a sequence, of all heads"
    yield "runs", "before an ordinary kernel, where a call has many queries"
    yield "moves", f"{narrow} B of a number in, {wide} B out"


def _of_index_scores(plan: Plan) -> Facts:
    element, row = plan.operands.q, plan.head_dim_qk
    yield "does", f"scores keys for an index, mask '{plan.variant.name}': sums over heads of w relu(q k), in float32"
    boxes = [one.box for launch in plan.launches for one in launch.arguments if one.of == "q" and one.box]
    yield "head_dim", f"{row}, and up to {max(box[2] for box in boxes)} heads, which share the keys"
    yield "tile", f"{plan.tile_n} keys by {plan.tile_m} queries of 64 heads"
    yield "loads", f"by the copy engine, {plan.stages} tiles of keys at a time; {plan.launch(plan.main).shared_bytes} B"
    yield "launches", f"{len(plan.launches)}, of which a call runs the one for its heads and its number of queries"
    yield "moves", f"{row * element.bytes} B of a key in, 4 B of a query and a key out"
    yield "multiplies", f"{2 * 64 * row} operations in {plan.dtype_name} for a key and a query of 64 heads"


def _of_topk(plan: Plan) -> Facts:
    most = max(launch.tile_m for launch in plan.launches)
    yield "does", "selects the k largest scores of each row, ties by lower index; writes their indices, ascending"
    yield "k", f"up to {most}"
    yield "block", f"{plan.threads} threads have a row, and load {plan.tile_n} scores at once"
    yield "moves", "4 B of a score in, once"


_FACTS: Mapping[str, Callable[[Plan], Facts]] = {
    APPEND: _of_append, QUANTIZE: _of_quantize, WIDEN: _of_widen, INDEX_SCORES: _of_index_scores, TOPK: _of_topk,
}  # fmt: skip
