"""The pipes of the Hopper backward by blocks: both of its kernels keep two tiles and go through pairs of others."""

from __future__ import annotations

from attngen.families.hopper_backward.blocks_structure import BlocksBackward
from attngen.plan.model import Plan
from attngen.plan.operands import Operands
from attngen.plan.pipes import WARPGROUP, NamedBarrier, Pipes, Ring, Role, Signal

STEP_BYTES, WORK_BYTES = 8, 32  # barriers follow, which need 8-byte alignment
#: Rows of a step, and of a consumer: M of wgmma.
ROWS = 64

_ORDER = ("q", "dout", "k", "v", "p", "lse", "delta", "work", "step", "barriers")

_GIVEN_BACK = "A consumer gives back its own stage before it waits behind a step of the other"


def keys_pipes(
    consumers: int, roles: tuple[Role, ...], qk: int, v: int, operands: Operands, stages: int, *, tile: int
) -> Pipes:
    """The pipes of the kernel of dK and dV, whose matrices have ``qk`` and ``v`` columns in shared memory. A work tile
    has ``tile`` rows: 64 of each consumer, or the same 64 of both."""
    loader, apart = "the loader", tile < ROWS * consumers
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
        "tile takes a stage, too" + ("" if apart else f". {_GIVEN_BACK}"),
        full=Signal(2, f"{loader} twice, for the tiles and for the row statistics", "a step has landed", bytes=True),
        empty=Signal(
            WARPGROUP * consumers, "each warp of the consumers", f"dV and dK of a step are complete{_hidden(apart)}"
        ),
        stored=(
            ("q", ROWS * qk * operands.q.bytes), ("dout", ROWS * v * operands.dout.bytes), ("lse", ROWS * 4),
            ("delta", ROWS * 4), ("step", STEP_BYTES),
        ),
    )  # fmt: skip
    named = _named(consumers, "K and V", tile=apart)
    return Pipes((kv, q, *_pairs(operands, apart=apart)), named=named, roles=roles, order=_ORDER)


def queries_pipes(
    consumers: int, roles: tuple[Role, ...], qk: int, v: int, operands: Operands, stages: int, *, tile: int
) -> Pipes:
    """The pipes of the kernel of dQ, likewise."""
    loader, apart = "the loader", tile < ROWS * consumers
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
        empty=Signal(WARPGROUP * consumers, "each warp of the consumers", f"dQ of a step is complete{_hidden(apart)}"),
        stored=(("k", ROWS * qk * operands.k.bytes), ("v", ROWS * v * operands.v.bytes), ("step", STEP_BYTES)),
    )  # fmt: skip
    named = _named(consumers, "Q")
    return Pipes((q, kv, *_pairs(operands, apart=apart)), named=named, roles=roles, order=_ORDER)


def keys_pipes_of(plan: Plan) -> Pipes:
    """The pipes of the kernel of dK and dV of a plan."""
    assert isinstance(plan.structure, BlocksBackward)
    return keys_pipes(
        plan.structure.consumers, plan.structure.warp_roles, plan.columns_qk[0].width, plan.columns_v[0].width,
        plan.operands, plan.stages, tile=plan.tile_n,
    )  # fmt: skip


def queries_pipes_of(plan: Plan) -> Pipes:
    """The pipes of the kernel of dQ of a plan."""
    assert isinstance(plan.structure, BlocksBackward)
    return queries_pipes(
        plan.structure.consumers, plan.structure.warp_roles, plan.columns_qk[0].width, plan.columns_v[0].width,
        plan.operands, plan.launch("dq").stages, tile=plan.launch("dq").tile_m,
    )  # fmt: skip


def _hidden(apart: bool) -> str:
    return "" if apart else ", or it is hidden"


def _pairs(operands: Operands, *, apart: bool) -> tuple[Ring, ...]:
    """The ring through which P passes where S and dP of the same rows have a consumer each."""
    if not apart:
        return ()
    return (
        Ring(
            "p", 2, "the consumer of S", "the consumer of dP",
            guards="P of a step, in the order of registers: a warp reads what that of the other consumer wrote",
            full=Signal(WARPGROUP, "each warp of the consumer of S", "P of a step is written"),
            empty=Signal(WARPGROUP, "each warp of the consumer of dP", "P of a step is read"),
            stored=(("p", ROWS * ROWS * operands.p.bytes),),
            alternates=True,
        ),
    )  # fmt: skip


def _named(consumers: int, memory: str, *, tile: bool = False) -> tuple[NamedBarrier, ...]:
    """Named barriers; of all consumers, too, where each stores a ``tile`` into memory that the other one reads."""
    guards = f"threads of a consumer meet around gradients in the memory of {memory}"
    of_all = f"all consumers have read {memory}"
    return (
        NamedBarrier("group", 1, consumers, 32 * WARPGROUP, guards),
        *((NamedBarrier("tile", 1 + consumers, 1, 32 * WARPGROUP * consumers, of_all),) if tile else ()),
    )


def blocks_roles(consumers: int, producer: int, consumer: int) -> tuple[Role, ...]:
    """Roles of the warps of either kernel, with the registers of a thread of the ``producer`` and of a ``consumer``."""
    first = WARPGROUP * consumers
    return (Role("consumers", 0, first, consumer), Role("loader", first, 1, producer))
