"""The pipes of the Hopper backward by clusters: those of one block, which other blocks also use."""

from __future__ import annotations

from attngen.families.hopper_backward.pipes import STEP_BYTES, SUMS
from attngen.families.hopper_backward.structure import HopperBackward
from attngen.plan.model import Plan
from attngen.plan.operands import Operands
from attngen.plan.pipes import WARPGROUP, Event, NamedBarrier, Pipes, Ring, Role, Signal

#: Shared memory in its order: matrices first, which need the most alignment, and words last.
_ORDER = (
    "k", "v", "other_k", "q", "dout", "ds", "other_ds", "part", "lse", "delta", "step", "ds_step", "barriers",
    "sum_tile", "index",
)  # fmt: skip


def cluster_pipes(
    roles: HopperBackward, *, tile_m: int, stages: int, qk: int, v: int, operands: Operands, warps: int = WARPGROUP
) -> Pipes:
    """Return the pipes of a block of a cluster whose matrices have ``qk`` and ``v`` columns in shared memory.

    ``warps`` is the number of a warpgroup's warps, which a model may have fewer of.
    """
    blocks, keys = roles.key_blocks, roles.keys
    of_q, of_dout, of_rows = "the loader of Q", "the loader of dO", "the loader of rows"
    both = "the warpgroups of values and of keys, of both blocks"
    row_bytes = tile_m * 4

    def once(name: str, loader: str, readers: str, row_bytes: int) -> Ring:
        return Ring(
            name, 1, loader, readers,
            guards="loaded once: a block has one tile of keys",
            full=Signal(1, loader, "the keys have landed", bytes=True),
            stored=((name, keys * row_bytes),),
        )  # fmt: skip

    q = Ring(
        "q", roles.q_stages, f"{of_q} of both blocks, and {of_rows}", both,
        guards="a tile of Q, of which each block loads a half for both, its step, and log-sum-exp and D of its rows",
        full=Signal(2, f"{of_q}, and {of_rows}", "a step has landed", bytes=True),
        empty=Signal(2 * blocks, both, f"nobody reads a stage that {of_q} of either block writes"),
        stored=(
            ("q", tile_m * qk * operands.q.bytes), ("lse", row_bytes), ("delta", row_bytes), ("step", STEP_BYTES),
        ),
    )  # fmt: skip
    dout = Ring(
        "dout", stages, f"{of_dout} of both blocks", both,
        guards="a tile of dO, or half of one, half of it loaded by each block, until dP and dV are multiplied",
        full=Signal(1, of_dout, "a stage of dO has landed", bytes=True),
        empty=Signal(2 * blocks, both, f"nobody reads a stage that {of_dout} of either block writes"),
        stored=(("dout", tile_m * v // roles.parts_of(v) * operands.dout.bytes),),
    )  # fmt: skip
    p = Ring(
        "p", 2, "the warpgroup of values", "the warpgroup of keys",
        guards="P of a step, which dS overwrites: each warp writes where it has read",
        full=Signal(warps, "each warp of the warpgroup of values", "P of a step is written"),
        alternates=True,
    )  # fmt: skip
    ds = Ring(
        "ds", 2, "the warpgroup of keys", "the warpgroups of queries, of both blocks",
        guards="dS of a step, until both blocks have multiplied dQ: this one from here, the other from its copy",
        full=Signal(1, "the warpgroup of keys", "dS of a step is written, or there is no more"),
        empty=Signal(
            blocks + roles.reads_ds,
            "the warpgroup of queries of each block" + (", the warp of tensor gradients" if roles.reads_ds else ""),
            "P of another step may come",
        ),
        stored=(
            ("ds", tile_m * keys * operands.ds.bytes), *([("ds_step", STEP_BYTES)] if roles.reads_ds else []),
        ),
        alternates=True,
    )  # fmt: skip
    other_ds = Ring(
        "other_ds", 2, "the warpgroup of keys of the other block", "the warpgroup of queries",
        guards="a copy of dS of the other block; ds_empty of that block says when it may be overwritten",
        full=Signal(1, "the warpgroup of queries, before it waits", "dS of the other block has landed", bytes=True),
        stored=(("other_ds", tile_m * keys * operands.ds.bytes),),
        alternates=True,
    )  # fmt: skip
    # what the block with the other columns of the same keys sends: S and dP in turns, through the same memory
    twins = tuple(
        Ring(
            f"{name}_part", warps, f"the warpgroup of {who} of the twin block", f"the warpgroup of {who}",
            guards=f"{product} over the twin's columns, a stage for each warp; after it comes {other}",
            full=Signal(1, f"the warp of {who}, before it waits", f"{product} of the twin has landed", bytes=True),
            empty=Signal(1, f"the warp of {who} of the twin", f"{other} may be sent: the twin has read {product}"),
            stored=(("part", 16 * tile_m * 4),) if name == "s" else (),
        )
        for name, product, who, other in (
            ("s", "S", "values", "dP of the same step"), ("dp", "dP", "keys", "S of the next step"),
        )
    )  # fmt: skip
    turns = (
        Event("turn", Signal(1, "the warp of turns", "dQ of a step may be added: all earlier keys' is")),
        Event("added", Signal(warps, "each warp of the warpgroup of queries", "dQ of a step is added")),
    )
    return Pipes(
        (
            once("k", of_q, "the warpgroups of values and of queries", qk * operands.k.bytes),
            once("v", of_dout, "the warpgroup of keys", v * operands.v.bytes),
            once("other_k", of_dout, "the warpgroup of queries", roles.dq_columns * operands.k.bytes),
            q, dout, p, ds, other_ds, *(twins if roles.column_blocks > 1 else ()), *(turns if roles.ordered else ()),
        ),
        named=(
            NamedBarrier("group", 1, 2, 32 * WARPGROUP, "threads of a warpgroup meet around dS, dK and dV"),
        ),
        roles=roles.warp_roles,
        order=_ORDER,
        others=(("sum_tile", 4 * SUMS), *([("index", 4)] if roles.ordered else [])),
    )  # fmt: skip


def cluster_pipes_of(plan: Plan) -> Pipes:
    """Return the pipes of a planned backward by clusters."""
    assert isinstance(plan.structure, HopperBackward)
    return cluster_pipes(
        plan.structure, tile_m=plan.tile_m, stages=plan.stages, qk=plan.structure.columns_of(plan.columns_qk),
        v=plan.structure.columns_of(plan.columns_v), operands=plan.operands,
    )  # fmt: skip


def cluster_roles(
    producer: int, consumer: int, queries: int, *, ordered: bool, reads_ds: bool = False
) -> tuple[Role, ...]:
    """Roles of the warps of a block, with the registers of their threads: a warpgroup for each of values, keys and
    queries, then the loaders. The last warp keeps the order of dQ or ``reads_ds``, for gradients of tensors."""
    last = ["turns"] if ordered else ["tensor_adder"] if reads_ds else []
    first, loaders = 3 * WARPGROUP, ("query_loader", "dout_loader", "row_loader", *last)
    return (
        Role("values", 0, WARPGROUP, consumer),
        Role("keys", WARPGROUP, WARPGROUP, consumer),
        Role("queries", 2 * WARPGROUP, WARPGROUP, queries),
        *(Role(name, first + i, 1, producer) for i, name in enumerate(loaders)),
    )
