"""The Hopper backward of masks that are constant on blocks of 64 queries and keys: two kernels, whose consumers visit
the blocks that their own rows see. One computes dK and dV, the other dQ, so that nothing is added up in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from attngen.arch import Arch
from attngen.dtypes import dtype
from attngen.errors import PlanError
from attngen.families.hopper_backward.blocks_pipes import (
    ROWS,
    blocks_roles,
    keys_pipes,
    keys_pipes_of,
    queries_pipes,
)
from attngen.families.hopper_backward.blocks_structure import BlocksBackward
from attngen.families.hopper_backward.cluster import SCHEDULE as BY_CLUSTERS
from attngen.families.hopper_backward.kinds import is_wide, varies
from attngen.families.hopper_backward.schedule import SCHEDULE as BY_TILES
from attngen.families.hopper_backward.schedule import SERVES, alternatives, check_backward
from attngen.lang.biases import rooms
from attngen.parts.backward_launches import launch_of, preprocess_launch, statistics_arguments
from attngen.parts.boxes import widest_box, widths
from attngen.plan import arguments
from attngen.plan.allowances import SPILLS
from attngen.plan.choices import check_head_dims, is_beyond_256, iteration_of
from attngen.plan.draft import axes_of, classifier_warps, drafted, row_workspaces
from attngen.plan.model import Argument, Launch, Plan, Region
from attngen.plan.operands import operands_of
from attngen.plan.own_gradients import differentiable_of
from attngen.plan.pipes import Pipes
from attngen.plan.schedule import Schedule
from attngen.plan.traits import has_global_keys, has_global_queries, mask_block
from attngen.schema.kernel_spec import Backward, KernelSpec

_CONSUMERS = 2
#: Most columns of dK and dV together, and of dQ, for which a consumer has registers beside S and dP of 64 rows of its
#: own; beyond, S and dP of the same rows have a consumer each. Not measured: follows from registers.
_MOST_SUMS, _MOST_OF_DQ = 256, 192
#: Registers of a thread of the loader's warpgroup and of a consumer, and those where S and dP have a consumer each. Not
#: measured: with 232, ptxas makes products of dK and dV wait for each other at head dim 128; beyond, loaders of packed
#: sequences spill with 24.
_REGISTERS, _REGISTERS_APART = (24, 240), (40, 232)
#: Most steps in flight: as many as shared memory holds at head dim 128. Not measured against fewer.
_STAGES = 5
#: K and V, or Q and dO, of the heads that run side by side: about half of the L2. Not measured.
_L2_BYTES = 24 * 2**20


def suits(spec: KernelSpec) -> bool:
    """Whether a mask is constant on blocks of 64 queries and keys, and not on tiles that other kernels visit whole; it
    has no global tokens, whose rows would not be cut into parts; and the score has no biases, no gradients of tensors,
    and a derivative that all pairs share."""
    if is_beyond_256(spec) or spec.variant.dropout or differentiable_of(spec.variant):
        return False
    given, keys = (spec.backward or Backward()).dkdv, _tile(sum(_columns(spec)), _MOST_SUMS)
    fixed = given.tile_m not in (None, ROWS) or given.tile_n not in (None, keys) or given.stages is not None
    fixed = fixed or bool(given.of_roles)
    if fixed or iteration_of(spec, "q", by_bits=True) != "tile_map" or iteration_of(spec, "kv") != "tile_map":
        return False
    own = mask_block(spec.variant, (ROWS, ROWS)) == (ROWS, ROWS)
    tiles = (ROWS, _CONSUMERS * ROWS), (_CONSUMERS * ROWS, ROWS)
    whole = all(mask_block(spec.variant, tile) == tile for tile in tiles)
    uneven = has_global_queries(spec.variant) or has_global_keys(spec.variant)
    return own and not whole and not uneven and not varies(spec) and not rooms(spec.variant)


def _columns(spec: KernelSpec) -> tuple[int, int]:
    """Columns of Q and K, and of V, in shared memory."""
    return widths(spec.head_dim_qk, dtype(spec.dtype)).width, widths(spec.head_dim_v, dtype(spec.dtype)).width


def _tile(columns: int, most: int) -> int:
    """Rows of a work tile whose sums have so many columns: 64 of each consumer, or of both if those are more than
    ``most``."""
    return ROWS * _CONSUMERS if columns <= most else ROWS


def queries_plan(plan: Plan) -> Plan:
    """The plan of the kernel of dQ by itself: it goes along keys, as forward kernels do."""
    assert isinstance(plan.structure, BlocksBackward)
    own = replace(plan.structure, shared=plan.structure.of_queries)
    return replace(plan.of_launch(plan.launch("dq")), direction="forward", structure=own)


def _plan(spec: KernelSpec, arch: Arch, most_of_dq: int = _MOST_OF_DQ) -> Plan:
    """Return the plan, with S and dP apart beyond so many columns of dQ. Raises PlanError."""
    check_backward(spec)
    check_head_dims(spec)
    operands = operands_of(spec)
    element = operands.shared("q", "k", "v", "dout", "p", "ds")
    columns_qk, columns_v = (widths(head_dim, element, 1) for head_dim in (spec.head_dim_qk, spec.head_dim_v))
    keys = _tile(columns_qk.width + columns_v.width, _MOST_SUMS)
    queries = _tile(columns_qk.width, most_of_dq)
    roles = blocks_roles(_CONSUMERS, *(_REGISTERS_APART if keys == ROWS else _REGISTERS))
    (stages, by_keys), (of_queries, by_queries) = (
        _most_stages(arch, partial(pipes, _CONSUMERS, roles, columns_qk.width, columns_v.width, operands, tile=tile))
        for pipes, tile in ((keys_pipes, keys), (queries_pipes, queries))
    )
    structure = BlocksBackward(
        consumers=_CONSUMERS,
        warp_roles=roles,
        box_bytes=widest_box(columns_qk.width * element.bytes, columns_v.width * element.bytes),
        map_rows=ROWS,
        shared=by_keys,
        of_queries=by_queries,
    )
    planned = drafted(
        spec,
        label="wgmma",
        width=f"c{_CONSUMERS}",
        tile_map=True,
        alignment=16,
        choices=("blocks", *(("apart",) if most_of_dq < _MOST_OF_DQ else ())),
        columns_qk=(columns_qk,),
        columns_v=(columns_v,),
        backend="cuda",
        schedule="hopper_blocks",
        loads="descriptor",
        q_operand="shared",
        tile_m=ROWS,
        tile_n=keys,
        stages=stages,
        num_warps=4 * (_CONSUMERS + 1),
        max_registers=None,
        iteration="tile_map",
        mask_code="branch",
        softmax="exact_max",
        l2_bytes=_L2_BYTES,
        structure=structure,
        main="dkdv",
    )
    return planned.with_launches(
        *_launches(planned, structure, queries, of_queries), workspaces=tuple(row_workspaces())
    )


def _most_stages(arch: Arch, pipes: Callable[[int], Pipes]) -> tuple[int, tuple[Region, ...]]:
    """The most stages that a block has memory for, and what lies where; these are two at least."""
    for stages in range(_STAGES, 2, -1):
        regions = pipes(stages).regions
        if regions[-1].offset + regions[-1].bytes <= arch.shared_memory:
            return stages, regions
    return 2, pipes(2).regions


def _launches(plan: Plan, structure: BlocksBackward, queries: int, queries_stages: int) -> Iterator[Launch]:
    """Yield the launches in their order. A work tile of the kernel of dQ has so many ``queries``."""
    qk, v, depth = plan.columns_qk[0].width, plan.columns_v[0].width, plan.operands.shared("p", "ds").mma_k
    rows = ROWS // depth
    yield preprocess_launch(plan, statistics_arguments(plan), pdl=True)
    yield _classifier(plan, "dkdv", "key_map_rows", "kv_tiles", tile_m=ROWS, tile_n=ROWS)
    # products of a step stand before the loop, in it, and behind hidden steps if there are any; P and dS are multiplied
    # once
    of_keys, of_queries = ((2 if tile == ROWS else 3) * (qk + v) // depth for tile in (plan.tile_n, queries))
    yield launch_of(
        plan, "dkdv", "keys", plan.num_warps, stages=plan.stages, iteration="tile_map", tile_map=axes_of(plan, "dkdv"),
        persistent=True, pdl=True, arguments=_arguments(plan, ROWS, plan.tile_n, "kv_tiles", ("dk", "dv")),
        shared_bytes=structure.shared_bytes, max_spills=SPILLS.bytes, products=of_keys + 2 * rows,
    )  # fmt: skip
    by_queries = replace(plan, tile_m=queries, tile_n=ROWS)
    yield _classifier(by_queries, "dq", "query_map_rows", "q_tiles", tile_m=ROWS, tile_n=ROWS)
    yield launch_of(
        by_queries, "dq", "queries", plan.num_warps, stages=queries_stages, iteration="tile_map",
        tile_map=axes_of(plan, "dq"), persistent=True, pdl=True,
        arguments=_arguments(by_queries, queries, ROWS, "q_tiles", ("dq",)),
        shared_bytes=structure.queries_bytes, max_spills=SPILLS.bytes, products=of_queries + rows,
    )  # fmt: skip


def _classifier(plan: Plan, owner: str, grid: str, tiles: str, **tile: int) -> Launch:
    """The launch that makes the tile map of another one, a row for each consumer."""
    return launch_of(
        plan, f"classify_{owner}", grid, classifier_warps(plan), iteration="tile_map", tile_map=axes_of(plan, owner),
        arguments=arguments.classifier_signature(plan, tiles, max_seqlen_k=True), **tile,
    )  # fmt: skip


def _arguments(plan: Plan, queries: int, keys: int, tiles: str, written: tuple[str, ...]) -> tuple[Argument, ...]:
    """Return the arguments of one of the kernels of products, whose copies bring so many ``queries`` and ``keys``."""
    assert isinstance(plan.structure, BlocksBackward)
    boxes = partial(arguments.tensor_map, plan, box_bytes=plan.structure.box_bytes)
    window = queries if plan.varlen else None
    operands = (
        boxes("q", queries, window=window), boxes("k", keys, window=keys), boxes("v", keys, window=keys),
        boxes("dout", queries, window=window), *(arguments.pointer(plan, name) for name in written),
        arguments.row_pointer("lse_log2"), arguments.row_pointer("delta"),
    )  # fmt: skip
    return arguments.signature(plan, operands, tiles=tiles, strided=written, counted=True, max_seqlen_k=True)


def _alternatives(spec: KernelSpec, arch: Arch, first: Plan) -> Iterator[Plan]:
    """Yield other plans for a ``first`` plan that ptxas has refused: S and dP apart in both kernels if they are in one,
    then those by whole tiles of keys."""
    if first.tile_n < first.launch("dq").tile_m:
        yield _plan(spec, arch, most_of_dq=0)
    try:
        whole = (BY_CLUSTERS if is_wide(spec) else BY_TILES).plan(spec, arch)
    except PlanError:
        return
    yield whole
    yield from alternatives(spec, arch, whole)


SCHEDULE = Schedule(
    name="hopper_blocks",
    backend="cuda",
    direction="backward",
    template="cuda/hopper_backward/blocks/kernel.cu.j2",
    view="attngen.families.hopper_backward.blocks_view:blocks_view",
    supports=lambda arch: arch.wgmma,
    suits=suits,
    plan=_plan,
    alternatives=_alternatives,
    pipes=keys_pipes_of,
    explanation="attngen.families.hopper_backward.explain:BlocksExplanation",
    serves=SERVES,
)
