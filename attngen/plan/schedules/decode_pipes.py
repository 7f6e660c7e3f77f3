"""The pipes of the Hopper split-KV forward: one ring of steps, which groups of warps take in turn."""

from __future__ import annotations

from attngen.plan.model import Plan
from attngen.plan.pipes import BARRIER_BYTES, NamedBarrier, Pipes, Ring, Role, Signal

#: Shared memory in its order: matrices first, which need the most alignment, and words last.
_ORDER = ("kv", "q", "merge", "barriers", "begin", "last", "counts")
_WALK_BYTES = 24  # where a share begins
_COUNT_BYTES = 12  # of a warp: pieces, units, tiles of the longest unit
_FILE = 64 * 1024  # registers of a multiprocessor

#: Warps that copy: one takes about 500 cycles for a step, in which a block can read four from memory.
LOADERS = 4

#: Floats of a partial result beside its columns: reference and sum of a warp and of a block, and what keeps rows apart.
ROW_PADDING = 8


def decode_pipes(*, warps: int, stages: int, stage: int, merge: int, q: int) -> Pipes:
    """Return the pipes of a block of ``warps`` that multiply and those that copy, whose ``stages`` have ``stage`` bytes
    each, with ``merge`` bytes for partial results, and ``q`` for Q if it lies in shared memory."""
    kv = Ring(
        "kv", stages, "a loader", "the warps of a group",
        guards="a tile of K and one of V stay until all warps of a group have multiplied them; groups take the stages "
        "in turn, and so do loaders, each of which has stages of its own: so nobody is a whole round ahead",
        full=Signal(1, "a loader", "K and V of a step have landed", bytes=True),
        empty=Signal(
            warps // 2, "each warp of the group, as many times as make half of the warps together",
            "all warps of the group are done with a step",
        ),
        stored=(("kv", stage),),
    )  # fmt: skip
    others = {
        "q": q, "merge": merge, "begin": _WALK_BYTES, "last": BARRIER_BYTES, "counts": (warps + LOADERS) * _COUNT_BYTES,
    }  # fmt: skip
    registers = min(_FILE // (32 * (warps + LOADERS)) // 8 * 8, 255)
    return Pipes(
        (kv,),
        named=(
            NamedBarrier("consumers", 1, 1, 32 * warps, "partial results of warps are there, or have been read"),
            NamedBarrier("made", 2, 1, 32 * (warps + LOADERS), "barriers that loaders have made"),
        ),
        roles=(Role("consumers", 0, warps, registers), Role("loaders", warps, LOADERS, registers)),
        order=_ORDER,
        others=tuple((name, size) for name, size in others.items() if size),
    )


def decode_pipes_of(plan: Plan) -> Pipes:
    """Return the pipes of a planned kernel."""
    qk, v = plan.columns_qk[0].width, plan.columns_v[0].width
    warps = plan.num_warps - LOADERS
    sizes = memory(warps, qk, v, plan.operands.k.bytes, plan.q_operand)
    return decode_pipes(warps=warps, stages=plan.stages, **sizes)


def memory(warps: int, qk: int, v: int, element: int, q_operand: str) -> dict[str, int]:
    """Return the bytes of a stage, of what all warps have found, and of Q; ``qk`` and ``v`` are columns in shared
    memory, of ``element`` bytes."""
    rows = keys = 16
    return {
        "stage": keys * (qk + v) * element,
        "merge": warps * rows * 4 * (v + ROW_PADDING),
        "q": warps // 2 * rows * qk * element if q_operand == "shared" else 0,
    }
