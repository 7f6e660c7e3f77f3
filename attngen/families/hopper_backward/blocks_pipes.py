"""The pipes of the Hopper backward by blocks: both of its kernels keep two tiles and go through pairs of others."""

from __future__ import annotations

from attngen.families.hopper_backward.blocks_structure import BlocksBackward
from attngen.plan.model import Plan
from attngen.plan.operands import Operands
from attngen.plan.pipes import WARPGROUP, NamedBarrier, Pipes, Ring, Role, Signal

STEP_BYTES, WORK_BYTES = 8, 32  # barriers follow, which need 8-byte alignment
#: Rows of a step, and of a consumer: M of wgmma.
ROWS = 64

_ORDER = ("q", "dout", "k", "v", "lse", "delta", "work", "step", "barriers")


def keys_pipes(consumers: int, roles: tuple[Role, ...], qk: int, v: int, operands: Operands, stages: int) -> Pipes:
    """The pipes of the kernel of dK and dV, whose matrices have ``qk`` and ``v`` columns in shared memory."""
    loader, tile = "the loader", ROWS * consumers
    kv = Ring(
        "kv", 1, loader, "each consumer",
        guards="K and V of a work tile, and its record, stay until dK and dV, which leave through the same memory, are "
        "written",
        full=Signal(1, loader, "K and V of a work tile have landed", bytes=True),
        empty=Signal(consumers, "each consumer", "dK and dV of a work tile are written"),
        stored=(("k", tile * qk * operands.k.bytes), ("v", tile * v * operands.v.bytes), ("work", WORK_BYTES)),
    )  # fmt: skip
    q = Ring(
        "q", stages, loader, "each warp of the consumers",
        guards="Q and dO of a step, log-sum-exp and D of their rows, and which consumer sees them; the end of a work "
        "tile takes a stage, too. A consumer gives back its own stage before it waits behind a step of the other",
        full=Signal(2, f"{loader} twice, for the tiles and for the row statistics", "a step has landed", bytes=True),
        empty=Signal(
            WARPGROUP * consumers, "each warp of the consumers", "dV and dK of a step are complete, or it is hidden"
        ),
        stored=(
            ("q", ROWS * qk * operands.q.bytes), ("dout", ROWS * v * operands.dout.bytes), ("lse", ROWS * 4),
            ("delta", ROWS * 4), ("step", STEP_BYTES),
        ),
    )  # fmt: skip
    return Pipes((kv, q), named=_named(consumers, "K and V"), roles=roles, order=_ORDER)


def queries_pipes(consumers: int, roles: tuple[Role, ...], qk: int, v: int, operands: Operands, stages: int) -> Pipes:
    """The pipes of the kernel of dQ, likewise."""
    loader, tile = "the loader", ROWS * consumers
    q = Ring(
        "q", 1, loader, "each consumer",
        guards="Q and dO of a work tile, and its record, stay until dQ, which leaves through Q's memory, is written",
        full=Signal(1, loader, "Q and dO of a work tile have landed", bytes=True),
        empty=Signal(consumers, "each consumer", "dQ of a work tile is written"),
        stored=(("q", tile * qk * operands.q.bytes), ("dout", tile * v * operands.dout.bytes), ("work", WORK_BYTES)),
    )  # fmt: skip
    kv = Ring(
        "kv", stages, loader, "each warp of the consumers",
        guards="K and V of a step, and which consumer sees them; the end of a work tile takes a stage, too",
        full=Signal(1, loader, "a step has landed", bytes=True),
        empty=Signal(WARPGROUP * consumers, "each warp of the consumers", "dQ of a step is complete, or it is hidden"),
        stored=(("k", ROWS * qk * operands.k.bytes), ("v", ROWS * v * operands.v.bytes), ("step", STEP_BYTES)),
    )  # fmt: skip
    return Pipes((q, kv), named=_named(consumers, "Q"), roles=roles, order=_ORDER)


def keys_pipes_of(plan: Plan) -> Pipes:
    """The pipes of the kernel of dK and dV of a plan."""
    assert isinstance(plan.structure, BlocksBackward)
    return keys_pipes(
        plan.structure.consumers, plan.structure.warp_roles, plan.columns_qk[0].width, plan.columns_v[0].width,
        plan.operands, plan.stages,
    )  # fmt: skip


def queries_pipes_of(plan: Plan) -> Pipes:
    """The pipes of the kernel of dQ of a plan."""
    assert isinstance(plan.structure, BlocksBackward)
    return queries_pipes(
        plan.structure.consumers, plan.structure.warp_roles, plan.columns_qk[0].width, plan.columns_v[0].width,
        plan.operands, plan.launch("dq").stages,
    )  # fmt: skip


def _named(consumers: int, memory: str) -> tuple[NamedBarrier, ...]:
    guards = f"threads of a consumer meet around gradients in the memory of {memory}"
    return (NamedBarrier("group", 1, consumers, 32 * WARPGROUP, guards),)


def blocks_roles(consumers: int, producer: int, consumer: int) -> tuple[Role, ...]:
    """Roles of the warps of either kernel, with the registers of a thread of the ``producer`` and of a ``consumer``."""
    first = WARPGROUP * consumers
    return (Role("consumers", 0, first, consumer), Role("loader", first, 1, producer))
