"""The pipes of the Hopper split-KV forward: one ring of steps, which groups of warps take in turn."""

from __future__ import annotations

from dataclasses import replace

from attngen.dtypes import CHUNK_BYTES, HEAD_DIMS, PAGE_BLOCK, DType
from attngen.parts.ranges import COUNT_BYTES, WALK_BYTES
from attngen.plan.model import Columns, Plan
from attngen.plan.pipes import BARRIER_BYTES, ROW_PADDING, NamedBarrier, Pipes, Ring, Role, Signal

#: Shared memory in its order: matrices first, which need the most alignment, and words last.
_ORDER = ("kv", "q", "merge", "scales", "entries", "barriers", "begin", "last", "counts")
_ENTRY_BYTES = 4  # of a list of keys
_SCALE_BYTES = 16  # of a page, or of a key: the scale of K, and logarithm and reciprocal of the scale of V
_WIDENED_BYTES = 2  # of an operand of the products
#: Scales of a kernel that come with the keys of a step, and what its name says of them.
KEY_SCALES = {PAGE_BLOCK: "pagescales", 1: "tokenscales"}
_FILE = 64 * 1024  # 32-bit registers of a multiprocessor

#: Warps that copy: one takes about 500 cycles for a step, in which a block can read four from memory
#: (docs/notebook/hopper_decode.md, "The schedule, second form").
LOADERS = 4

#: Slices of the columns of rows that are beyond the registers of a warp. Four leave each 128 columns of Q and O of 512,
#: all in registers, and two groups of warps. Not measured against two.
SLICES = 4


def decode_pipes(
    *,
    warps: int,
    stages: int,
    stage: int,
    merge: int,
    q: int,
    scales: int = 0,
    entries: int = 0,
    slices: int = 1,
    by_lanes: bool = False,
) -> Pipes:
    """Return the pipes of a block of ``warps`` that multiply and those that copy, whose ``stages`` have ``stage`` bytes
    each, ``scales`` of the scales of pages and ``entries`` of the list of keys, with ``merge`` bytes for partial
    results, and ``q`` for Q if it lies in shared memory. ``slices``: of the columns, each of which is a warp's.
    ``by_lanes``: each lane of a loader copies by cp.async and arrives at the barrier, instead of TMA."""
    most = "half of the warps together" if slices == 1 else "all warps together"
    kv = Ring(
        "kv", stages, "a loader", "the warps of a group",
        guards="a tile of K and one of V stay until all warps of a group have multiplied them; groups take the stages "
        "in turn, and so do loaders; a stage is always that of the same group and of the same loader: so nobody is a "
        "whole round ahead, though copies may land in any order",
        full=Signal(32, "each lane of a loader", "K and V of a step have landed")
        if by_lanes
        else Signal(1, "a loader", "K and V of a step have landed", bytes=True),
        empty=Signal(
            warps // 2 if slices == 1 else warps, f"each warp of the group, as many times as make {most}",
            "all warps of the group are done with a step",
        ),
        stored=(("kv", stage), *((name, size) for name, size in (("scales", scales), ("entries", entries)) if size)),
    )  # fmt: skip
    others = {
        "q": q, "merge": merge, "begin": WALK_BYTES, "last": BARRIER_BYTES, "counts": (warps + LOADERS) * COUNT_BYTES,
    }  # fmt: skip
    of_slices = NamedBarrier("slices", 3, warps // slices, 32 * slices, "logits of all slices of columns are there")
    registers = min(_FILE // (32 * (warps + LOADERS)) // 8 * 8, 255)
    return Pipes(
        (kv,),
        named=(
            NamedBarrier("consumers", 1, 1, 32 * warps, "partial results of warps are there, or have been read"),
            NamedBarrier("made", 2, 1, 32 * (warps + LOADERS), "barriers that loaders have made"),
            *([of_slices] if slices > 1 else ()),
        ),
        roles=(Role("consumers", 0, warps, registers), Role("loaders", warps, LOADERS, registers)),
        order=_ORDER,
        others=tuple((name, size) for name, size in others.items() if size),
    )


def decode_pipes_of(plan: Plan) -> Pipes:
    """Return the pipes of a planned kernel."""
    warps, slices = plan.num_warps - LOADERS, slices_of(plan.columns_v[0])
    sizes = memory(
        warps, plan.columns_qk[0], plan.columns_v[0], plan.operands.k, plan.q_operand, keys=plan.tile_n,
        scaled_keys=plan.scale_block in KEY_SCALES, listed=plan.variant.keys is not None, slices=slices,
    )  # fmt: skip
    return decode_pipes(warps=warps, stages=plan.stages, slices=slices, by_lanes=plan.loads == "pointer", **sizes)


def slices_of(v: Columns) -> int:
    """Warps that have the same rows and keys, and a slice of the columns each."""
    return SLICES if v.width > HEAD_DIMS[-1] else 1


def multiplied(columns: Columns, element: DType) -> Columns:
    """Return the columns that take part in products, of those in shared memory; a lane has 16 bytes of a row."""
    step = 4 * CHUNK_BYTES
    width = columns.width if element.bytes > 1 or slices_of(columns) > 1 else -(-columns.used // step) * step
    return replace(columns, width=width)


def memory(
    warps: int,
    qk: Columns,
    v: Columns,
    element: DType,
    q_operand: str,
    *,
    keys: int,
    scaled_keys: bool = False,
    listed: bool = False,
    slices: int = 1,
) -> dict[str, int]:
    """Bytes of a stage of ``keys``, of the scales that come with ``scaled_keys``, of its entries of a list if keys are
    ``listed``, of the partial results of all warps, and of Q. Partial results take the place of the logits
    that ``slices`` of columns add up."""
    rows, size = 16, element.bytes
    of_q, of_o = multiplied(qk, element).width, multiplied(v, element).width
    factors = 4 if size < _WIDENED_BYTES else 0  # the scale of a row of Q
    return {
        "stage": keys * (qk.width + v.width) * size,
        "scales": keys * _SCALE_BYTES if scaled_keys else 0,
        "entries": keys * _ENTRY_BYTES if listed else 0,
        "merge": warps // slices * rows * 4 * (of_o + ROW_PADDING),
        "q": warps // 2 * rows * (of_q * max(size, _WIDENED_BYTES) + factors) if q_operand == "shared" else 0,
    }
