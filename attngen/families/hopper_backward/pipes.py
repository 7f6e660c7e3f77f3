"""The pipes of the Hopper backward by single blocks."""

from __future__ import annotations

from attngen.families.hopper_backward.structure import KEYS_OF_CONSUMER, HopperBackward
from attngen.plan.model import Plan
from attngen.plan.operands import Operands
from attngen.plan.pipes import WARPGROUP, NamedBarrier, Pipes, Ring, Role, Signal

STEP_BYTES, SLOT_BYTES = 8, 8  # barriers follow, which need 8-byte alignment
WORK_BYTES, CUT_WORK_BYTES = 32, 44  # the latter where tiles of keys may be split
SUMS = 8  # steps whose place in the dQ accumulator is kept: more than are in flight
SUM_BYTES, CUT_SUM_BYTES, ORDERED_SUM_BYTES = 8, 12, 20
#: Bytes that identify the step of a tile of dS, where a warp reads it.
DS_STEP_BYTES = 48
#: The 64 x 32 block of the dQ accumulator that a warp rounds at once, and its record.
DQ_BLOCK_BYTES, DQ_BLOCK_TAKEN_BYTES = 64 * 32 * 4, 32

#: Shared memory in its order: matrices first, which need the most alignment.
_ORDER = (
    "k", "v", "q", "dout", "ds", "dq", "dq_block", "biases", "lse", "delta", "query_values", "distance_values",
    "tables", "work", "step", "ds_step", "barriers", "dq_block_taken", "sum_tile",
)  # fmt: skip


def backward_pipes(
    roles: HopperBackward, *, tile_m: int, stages: int, qk: int, v: int, operands: Operands, warps: int = WARPGROUP
) -> Pipes:
    """Return the pipes of a backward whose matrices have ``qk`` and ``v`` columns in shared memory.

    ``warps`` is the number of a consumer's warps, which a model may have fewer of.
    """
    consumers, keys = roles.consumers, KEYS_OF_CONSUMER * roles.consumers
    loader, each = "the loader", "each consumer"
    stored_k, stored_v = ("k", keys * qk * operands.k.bytes), ("v", keys * v * operands.v.bytes)
    kv = [
        Ring(
            "kv", 1, loader, each,
            guards="K and V of a work tile stay until all products of its steps are complete",
            full=Signal(1, loader, "K and V of a work tile have landed", bytes=True),
            empty=Signal(consumers, each, "consumers have multiplied the last step of a work tile"),
            stored=(stored_k, stored_v),
        )
    ]  # fmt: skip
    if roles.stores_apart:
        kv = [
            Ring(
                "k", 1, loader, each,
                guards="K of a work tile stays until dQ of its last step is complete",
                full=Signal(1, loader, "K of a work tile has landed", bytes=True),
                empty=Signal(consumers, each, "consumers have multiplied the last dQ of a work tile"),
                stored=(stored_k,),
            ),
            Ring(
                "v", 1, loader, each,
                guards="V of a work tile stays until dP of its last step is complete",
                full=Signal(1, loader, "V of a work tile has landed", bytes=True),
                empty=Signal(consumers, each, "consumers have multiplied the last dP of a work tile"),
                stored=(stored_v,),
            ),
        ]  # fmt: skip
    q = Ring(
        "q", roles.q_stages, loader, each,
        guards="a tile of Q, the step that it belongs to, and log-sum-exp and D of its rows; the end of a work tile "
        "takes a stage, too, which is released when "
        + ("all warps of a consumer have seen it" if roles.stores_apart else "both consumers have met"),
        full=Signal(2, f"{loader} twice, for Q and for the row statistics", "a step has landed", bytes=True),
        empty=Signal(consumers, each, "dK of a step is complete, or its end is seen by all"),
        stored=(
            ("q", tile_m * qk * operands.q.bytes), ("lse", tile_m * 4), ("delta", tile_m * 4),
            ("step", STEP_BYTES + SLOT_BYTES * roles.slots),
            *([("query_values", tile_m * 4 * roles.query_values)] if roles.query_values else []),
            *([("distance_values", (tile_m + keys) * 4 * roles.distance_values)] if roles.distance_values else []),
        ),
    )  # fmt: skip
    dout = Ring(
        "dout", stages, loader, each,
        guards="a tile of dO stays until its product is added to dV",
        full=Signal(1, loader, "a tile of dO has landed", bytes=True),
        empty=Signal(consumers, each, "dV of a step is complete"),
        stored=(("dout", tile_m * v * operands.dout.bytes),),
    )  # fmt: skip
    dv_bytes = KEYS_OF_CONSUMER * v * operands.dv.bytes
    dq = Ring(
        "dq", consumers, each, "the warp that adds",
        guards="dQ of a step, a stage for each consumer, until it is added to the dQ accumulator"
        + ("" if roles.stores_apart else "; dV leaves through the same memory"),
        full=Signal(warps, "each warp of the consumer", "dQ of a step is written, or there is no more"),
        empty=Signal(1, "the warp that adds", "dQ of a step has left"),
        stored=(
            ("dq", max(64 * roles.dq_columns * operands.accumulator.bytes, 0 if roles.stores_apart else dv_bytes)),
        ),
    )  # fmt: skip
    work = Ring(
        "work", 2, loader, each,
        guards="the record of a work tile stays until dK and dV are written; the first step implies that it is "
        "there",
        empty=Signal(consumers, each, "dK and dV of a work tile are written"),
        stored=(("work", CUT_WORK_BYTES if roles.cuts else WORK_BYTES),),
        alternates=True,
    )  # fmt: skip
    dq_block = Ring(
        "dq_block", 2, "the warp that rounds", "the warp that rounds",
        guards="a complete 64 x 32 block of the dQ accumulator, until the same warp has rounded it",
        full=Signal(1, "the warp that rounds", "a block of the dQ accumulator has landed", bytes=True)
        if roles.stages_dq
        else None,
        stored=(
            *([("dq_block", DQ_BLOCK_BYTES)] if roles.stages_dq else []), ("dq_block_taken", DQ_BLOCK_TAKEN_BYTES),
        ),
        alternates=True,
    )  # fmt: skip
    ds = Ring(
        "ds", 2, each, each,
        guards="dS of two steps in turn: both consumers' is there before either multiplies dQ; "
        + ("dK and dV leave" if roles.stores_apart else "dK leaves") + " through the same memory",
        full=Signal(warps * consumers, "each warp of both consumers", "dS of both is written")
        if roles.pingpong or roles.reads_ds
        else None,
        empty=Signal(1, "the warp of tensor gradients", "dS of a step is added to gradients of the variant's tensors")
        if roles.reads_ds
        else None,
        stored=(
            ("ds", tile_m * keys * operands.ds.bytes), *([("ds_step", DS_STEP_BYTES)] if roles.reads_ds else []),
        ),
        alternates=True,
    )  # fmt: skip
    biases = Ring(
        "biases", roles.bias_stages * consumers, loader, each,
        guards="the tiles of biases over a consumer's keys that belong to a step, the stages of one consumer between "
        "those of the other; each warp reads its own keys",
        full=Signal(1, loader, "the tiles of biases of a consumer have landed", bytes=True),
        empty=Signal(warps, "each warp of the consumer", "warps have read the biases of their keys"),
        stored=(("biases", roles.bias_bytes * tile_m * KEYS_OF_CONSUMER),),
    )  # fmt: skip
    tables = (("tables", consumers * roles.table_bytes),) if roles.table_bytes else ()
    sums = SUMS * (ORDERED_SUM_BYTES if roles.ordered else CUT_SUM_BYTES if roles.cuts else SUM_BYTES)
    return Pipes(
        (*kv, q, dout, dq, *([biases] if roles.biases else []), work, dq_block, ds),
        named=_named(roles),
        roles=roles.warp_roles,
        order=_ORDER,
        others=(*tables, ("sum_tile", sums)),  # read after dq_full, and written 8 steps later: more than are in flight
    )


def backward_pipes_of(plan: Plan) -> Pipes:
    """Return the pipes of a planned backward by single blocks."""
    assert isinstance(plan.structure, HopperBackward)
    return backward_pipes(
        plan.structure, tile_m=plan.tile_m, stages=plan.stages, qk=plan.columns_qk[0].width,
        v=plan.columns_v[0].width, operands=plan.operands,
    )  # fmt: skip


def _named(roles: HopperBackward) -> tuple[NamedBarrier, ...]:
    """Named barriers of all consumers, of the warps of each, and of ping-pong at the tensor cores."""
    threads, consumers = 32 * WARPGROUP, roles.consumers
    return (
        NamedBarrier("all", 1, 1, threads * consumers, "all consumers meet, around dS and their outputs"),
        NamedBarrier("group", 2, consumers, threads, "threads of a consumer meet around dK and dV"),
        *(
            [NamedBarrier("pingpong", 2 + consumers, consumers, threads * consumers, "turns at the tensor cores")]
            if roles.pingpong
            else []
        ),
    )


def backward_roles(consumers: int, producer: int, consumer: int, *, reads_ds: bool = False) -> tuple[Role, ...]:
    """Roles of the warps, with the registers of a thread of the producer and of a consumer: consumers first, then the
    producer's warps, of which the third idles unless it ``reads_ds``."""
    first = WARPGROUP * consumers
    return (
        Role("consumers", 0, first, consumer),
        Role("loader", first, 1, producer),
        Role("adder", first + 1, 1, producer),
        *([Role("tensor_adder", first + 2, 1, producer)] if reads_ds else []),
        Role("rounder", first + 3, 1, producer),
    )
