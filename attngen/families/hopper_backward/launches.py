"""Launches of a Hopper backward in CUDA, their arguments, and the memory that they share. Other CUDA backward kernels
begin with the same ones."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from attngen.families.hopper_backward.structure import KEYS_OF_CONSUMER, HopperBackward
from attngen.lang.biases import biases
from attngen.parts.backward_launches import (
    CUT_FIRST_SIZES,
    launch_of,
    leading_launches,
    statistics_arguments,
    tensor_gradient_arguments,
    tile_map_axes,
)
from attngen.plan import arguments
from attngen.plan.allowances import (
    MAPPED_BIAS_SPILLS,
    PINGPONG_SPILLS,
    READER_SPILLS,
    SPILLS,
    Spills,
)
from attngen.plan.draft import row_workspaces
from attngen.plan.model import Argument, Launch, Plan, Workspace

#: Size arguments of kernels that split the last tiles of keys: the number of whole tiles, the splits of each other
#: tile, the numbers of both that blocks take, and the states of dQ, after which the counters of splits stand.
_CUT_SIZES = ("uncut_tiles", "parts", "work_items", "sum_tiles")

#: Warps of a block of ``postprocess`` for each block of a cluster. Not measured.
_POSTPROCESS_WARPS = 4


def launches(plan: Plan, roles: HopperBackward) -> Iterator[Launch]:
    """Yield the launches in their order."""
    axes, cluster = tile_map_axes(plan), roles.cluster
    yield from leading_launches(plan, _preprocess_arguments(plan), pdl=cluster == 1)
    yield launch_of(
        plan, "dqkv", "keys", plan.num_warps, stages=plan.stages, iteration=plan.iteration, tile_map=axes,
        cluster=cluster, persistent=cluster == 1, pdl=cluster == 1, arguments=_dqkv_arguments(plan, roles),
        shared_bytes=roles.shared_bytes, max_spills=_spills(roles).bytes, products=_products(plan, roles),
    )  # fmt: skip
    if cluster > 1:  # a block alone rounds dQ itself
        yield launch_of(
            plan, "postprocess", "queries", _POSTPROCESS_WARPS * cluster, arguments=_postprocess_arguments(plan)
        )


def _spills(roles: HopperBackward) -> Spills:
    if roles.reads_ds:
        return READER_SPILLS
    if roles.pingpong and roles.slots and roles.biases:
        return MAPPED_BIAS_SPILLS
    return PINGPONG_SPILLS if roles.pingpong else SPILLS


def _preprocess_arguments(plan: Plan) -> tuple[Argument, ...]:
    """Return the arguments of the launch that computes the row statistics, and clears the dQ accumulator."""
    if first_stored(plan):
        return statistics_arguments(plan, _pointer("dq_state"), _chunks("state"))
    return statistics_arguments(plan, _pointer("dq_sum"), _chunks("sum"))


def _chunks(cleared: str) -> Argument:
    return arguments.size(f"{cleared}_chunks", of=f"dq_{cleared}_chunks", form="i64")


def _dqkv_arguments(plan: Plan, roles: HopperBackward) -> tuple[Argument, ...]:
    """Return the arguments of the launch of all products. Blocks without clusters take tiles from a counter, and
    round dQ, too; otherwise the hardware hands out tiles, if their order need not be known."""
    window, keys = plan.tile_m if plan.varlen else None, roles.keys
    boxes = partial(arguments.tensor_map, plan, box_bytes=roles.box_bytes)
    alone = roles.cluster == 1
    written = ("dq", "dk", "dv") if alone else ("dk", "dv")
    operands = (
        boxes("q", plan.tile_m, window=window), boxes("k", keys, window=keys), boxes("v", keys, window=keys),
        boxes("dout", plan.tile_m, window=window), _pointer("dq_sum"),
        *([_pointer("dq_state")] if first_stored(plan) else []),
        *([_pointer("partials")] if roles.cuts else []),
        *_bias_maps(plan, roles),
        *(arguments.pointer(plan, name) for name in written),
        arguments.row_pointer("lse_log2"), arguments.row_pointer("delta"),
    )  # fmt: skip
    return arguments.signature(
        plan, operands, tiles="kv_tiles", strided=written, counted=alone or roles.ordered,
        own_gradients=tensor_gradient_arguments(plan, clears=roles.clears),
        more_sizes=(*(() if plan.varlen else ("q_tiles",)), *_cut_sizes(roles)),
        max_seqlen_k=True,
    )  # fmt: skip


def _cut_sizes(roles: HopperBackward) -> tuple[str, ...]:
    if not roles.cuts:
        return ()
    return CUT_FIRST_SIZES if roles.cuts_first else _CUT_SIZES


def _bias_maps(plan: Plan, roles: HopperBackward) -> Iterator[Argument]:
    """Yield the tensor maps of biases whose tiles the loader brings, a box for each consumer."""
    read = {load.tensor for load in biases(plan.variant, roles.bias_bytes)} if roles.biases else frozenset()
    for tensor in plan.variant.tensors:
        if tensor.name in read:
            yield arguments.bias_map(tensor, plan.tile_m, KEYS_OF_CONSUMER)


def _postprocess_arguments(plan: Plan) -> tuple[Argument, ...]:
    """Return the arguments of the launch that scales and rounds the dQ accumulator."""
    return (
        _pointer("dq_sum"), arguments.pointer(plan, "dq"),
        *(arguments.lengths(plan, "cu_seqlens_q")),
        *arguments.tensor_pointers(plan.variant),
        *arguments.strides_of(plan, ("dq",)),
        *arguments.tensor_shapes(plan.variant),
        *arguments.sizes(plan, "q_tiles", max_seqlen_k=True),
        arguments.scale(),
        *arguments.scalar_arguments(plan),
    )  # fmt: skip


def first_stored(plan: Plan) -> bool:
    """Whether the first dQ of a tile of queries is stored, not added, so that nothing clears the dQ accumulator: blocks
    find out which is the first, in any order."""
    roles = plan.structure
    return isinstance(roles, HopperBackward) and roles.cluster == 1 and not roles.ordered


def _pointer(workspace: str) -> Argument:
    return Argument(f"{workspace}_ptr", "pointer", "*fp32", of=workspace, divisibility=16)


def workspaces(plan: Plan, roles: HopperBackward) -> Iterator[Workspace]:
    """Yield the memory that launches share: row statistics; the dQ accumulator by tiles of rows; and counters after it,
    or in memory of their own, which is all that is cleared then.

    There is a counter for each tile of keys, where the order is fixed; one for each KV head and one for all pieces,
    where the kernel that adds dQ up rounds it, too; one for each consumer of a tile of keys that is cut, whose parts'
    dK and dV have memory of their own; and a state of each tile of dQ, where the first addition is a store.
    """
    yield from row_workspaces()
    sums: tuple[int | str, ...] = (plan.tile_m * roles.sum_columns, "sum_tiles")
    counters: list[tuple[int | str, ...]] = []
    of_parts = [(roles.consumers, "cut_tiles")] if roles.cuts else []
    if roles.ordered:
        counters.append((roles.cluster, "kv_units", "kv_tiles"))  # blocks of a cluster add to columns of their own
    if roles.cluster == 1:
        counters += [("kv_units",), (1,)]
    if roles.cuts:
        columns = sum(block.width for block in (*plan.columns_qk, *plan.columns_v))
        yield Workspace("partials", "fp32", ((plan.tile_n * columns, "cut_parts"),), multiple=4)
    if first_stored(plan):
        yield Workspace("dq_sum", "fp32", (sums,), multiple=4)
        yield Workspace("dq_state", "fp32", (*counters, ("sum_tiles",), *of_parts), multiple=4)
    else:
        yield Workspace("dq_sum", "fp32", (sums, *counters), multiple=4)


def _products(plan: Plan, roles: HopperBackward) -> int:
    """Number of wgmma instructions of the kernel of all products.

    In the loop one of each product; before it S of the first step and, where steps do not overlap, its dP and dV. Where
    consumers take turns, all of the first step stand before the loop, but dQ, which that of the last one follows.
    """
    depth = plan.operands.shared("q", "k", "v", "dout", "p", "ds").mma_k
    qk, v = roles.columns_of(plan.columns_qk), roles.columns_of(plan.columns_v)
    s, dp, rows = qk // depth, v // depth, plan.tile_m // depth
    keys = plan.tile_n // depth
    loop = s + dp + 2 * rows + keys
    if roles.cluster > 1:  # each begins with one of its own
        parts = roles.parts_of(qk) + roles.parts_of(v)
        return s + dp + s + dp + rows * parts + keys * (roles.dq_columns // roles.dq_part)
    if roles.pingpong:
        # of a step that the consumer's keys do not see, dQ before it alone
        return 2 * loop + keys * roles.own_spans
    return loop + s if roles.overlap == "gradients" else loop + s + dp + rows
