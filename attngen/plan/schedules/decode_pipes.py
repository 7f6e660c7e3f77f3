"""The pipes of the Hopper split-KV forward: one ring of steps, which groups of warps share out."""

from __future__ import annotations

from attngen.plan.model import Plan
from attngen.plan.pipes import BARRIER_BYTES, Pipes, Ring, Role, Signal

#: Shared memory in its order: matrices first, which need the most alignment, and words last.
_ORDER = ("kv", "q", "merge", "barriers", "begin", "last", "counts")
_WALK_BYTES = 24  # where a share begins
_COUNT_BYTES = 12  # of a warp: pieces, units, tiles of the longest unit
_REGISTERS = 255


def decode_pipes(*, warps: int, stages: int, stage: int, merge: int, q: int) -> Pipes:
    """Return the pipes of a block whose ``stages`` have ``stage`` bytes each, with so many bytes for what warps merge,
    and for Q if it lies in shared memory."""
    kv = Ring(
        "kv", stages, "the first warp of a group", "the warps of a group",
        guards="a tile of K and one of V stay until all warps of a group have multiplied them; each group has a "
        "section of the stages",
        full=Signal(1, "the first warp of the group", "K and V of a step have landed", bytes=True),
        empty=Signal(
            warps // 2, "each warp of the group, as many times as make half of the block's warps together",
            "all warps of the group are done with a step",
        ),
        stored=(("kv", stage),),
    )  # fmt: skip
    others = {
        "q": q, "merge": merge, "begin": _WALK_BYTES, "last": BARRIER_BYTES, "counts": warps * _COUNT_BYTES,
    }  # fmt: skip
    return Pipes(
        (kv,),
        named=(),
        roles=(Role("warps", 0, warps, _REGISTERS),),
        order=_ORDER,
        others=tuple((name, size) for name, size in others.items() if size),
    )


def decode_pipes_of(plan: Plan) -> Pipes:
    """Return the pipes of a planned kernel."""
    qk, v = plan.columns_qk[0].width, plan.columns_v[0].width
    sizes = memory(plan.num_warps, qk, v, plan.operands.k.bytes, plan.q_operand)
    return decode_pipes(warps=plan.num_warps, stages=plan.stages, **sizes)


def memory(warps: int, qk: int, v: int, element: int, q_operand: str) -> dict[str, int]:
    """Return the bytes of a stage, of what warps merge, and of Q; ``qk`` and ``v`` are columns in shared memory, of so
    many bytes.

    Half of the warps give what they have found to the other half: 32 lanes, 16 bytes for each 8 columns and 16 more.
    """
    rows = keys = 16
    return {
        "stage": keys * (qk + v) * element,
        "merge": warps // 2 * 32 * 16 * (v // 8 + 1),
        "q": warps // 2 * rows * qk * element if q_operand == "shared" else 0,
    }
