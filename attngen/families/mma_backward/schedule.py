"""The backward by mma.sync, for cards without wgmma: a kernel by tiles of keys computes dK and dV, and adds dQ up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from operator import itemgetter

from attngen.arch import ARCHES, Arch
from attngen.dtypes import dtype
from attngen.errors import PlanError
from attngen.families.mma_backward.structure import MmaBackward
from attngen.lang.runs import positions
from attngen.parts.backward_launches import (
    CUT_FIRST_SIZES,
    launch_of,
    leading_launches,
    statistics_arguments,
    tensor_gradient_arguments,
    tile_map_axes,
)
from attngen.parts.boxes import BOX_BYTES, widest_box, widths
from attngen.parts.fields import ADDRESSES, ATTENTION, FUSED
from attngen.plan import arguments
from attngen.plan.allowances import MMA_BACKWARD_SPILLS
from attngen.plan.choices import check_head_dims, check_no_roles, is_beyond_256, iteration_of, refuse
from attngen.plan.draft import drafted, row_workspaces
from attngen.plan.model import Argument, Launch, Plan, Region, Workspace
from attngen.plan.operands import operands_of
from attngen.plan.own_gradients import differentiable_of
from attngen.plan.schedule import Schedule, plans_of
from attngen.plan.served import ANY, only
from attngen.plan.times import first_seen_most, visible_queries
from attngen.plan.traits import bands_of, gathers, query_loads, reads_positions
from attngen.schema.kernel_spec import Backward, Gradient, KernelSpec

_DTYPES = ("bf16", "fp16")

#: Keys of S and dP of a warp, and query rows of dQ. Not measured: multiples of M and N of mma.m16n8k16.
_ROWS = 32

#: Query rows and columns of a product: M of mma.m16n8k16, and twice its N.
_DQ_ROWS = 16

#: Fewest queries of a step whose dQ is added during the next step, and how many columns wait for it where a warp has
#: 64, since more take too many registers (docs/notebook/mma.md, "Addresses, and what stands alone").
_LATE_QUERIES, _LATE_COLUMNS = 64, 32

#: Fewest query rows of S and dP of a warp. Not measured: a multiple of M and N of mma.m16n8k16.
_QUERIES = 16

#: Most columns of dK and dV with which kernels are faster if each partial step loads the values of keys again
#: (docs/notebook/mma.md, "Values of queries, and parts of tiles left out").
_NARROW_COLUMNS = 128

#: Fewest queries of a step whose values are loaded ahead. Not measured: kernels with fewer spill.
_VALUED_QUERIES = 64

#: Steps whose values of queries are in shared memory: this one and the next.
_VALUE_SLOTS = 2

#: Shared memory that the system takes of each block on a multiprocessor.
_RESERVED = 1024

#: Bytes of shared memory from which a card has room for the tiles of "large".
_LARGE = 163 * 1024

#: Bytes of Q, dO and the dQ accumulator of the heads that run side by side. Not measured one against the other: half of
#: the L2 of a Hopper card; docs/notebook/mma.md, "Heads side by side, and narrow masks", has more heads.
_L2_BYTES = 24 * 2**20

#: Least number of KV heads that run side by side, up to so many columns of dK and dV: if heads ran one after the other,
#: the long tiles of the last ones would end alone. Measured on an H200
#: (docs/notebook/mma.md, "Heads side by side, and narrow masks").
_LEAST_HEADS_IN_L2 = ((256, 8), (512, 1))

#: Warps of a block of ``postprocess``. Not measured.
_ROUND_WARPS = 4


@dataclass(frozen=True, slots=True)
class _BackwardTile:
    """Queries of a step, keys, stages of Q and dO, warps, and how many blocks a multiprocessor should run at once.

    ``beside_s``: dQ of the step before is added among the products of S alone, which takes fewer registers than among
    those of dP as well.
    """

    m: int
    n: int
    stages: int
    warps: int
    blocks: int
    beside_s: bool = False


#: (family, largest sum of the columns of dK and dV) -> tile, first match wins. The families are those of the forward,
#: "narrow": masks that show few queries to a key, so that they hide more of a larger tile; and "large window": of these
#: on large cards, those that read no tensor, so that a thread has registers for dK and dV of 64 keys. Measured
#: (docs/notebook/mma.md, "Backward", and "Heads side by side, and narrow masks"), but for "gather".
_TABLE: tuple[tuple[str, int, _BackwardTile], ...] = (
    ("gather", 128, _BackwardTile(64, 128, 2, 8, 1)),
    ("gather", 192, _BackwardTile(32, 128, 2, 8, 1)),
    ("gather", 256, _BackwardTile(32, 128, 1, 8, 1)),
    ("gather", 320, _BackwardTile(64, 64, 1, 8, 1)),
    ("narrow", 128, _BackwardTile(64, 64, 1, 4, 2)),
    ("large window", 256, _BackwardTile(64, 64, 1, 4, 2, beside_s=True)),
    ("large", 128, _BackwardTile(128, 128, 2, 8, 1)),
    ("large", 192, _BackwardTile(64, 128, 2, 8, 1)),
    ("large", 256, _BackwardTile(64, 128, 2, 8, 1)),
    ("large", 384, _BackwardTile(64, 64, 2, 8, 1)),
    ("large", 512, _BackwardTile(64, 64, 1, 8, 1)),
    ("any", 128, _BackwardTile(64, 64, 1, 4, 2)),
    ("any", 192, _BackwardTile(32, 128, 2, 8, 1)),
    ("any", 256, _BackwardTile(32, 128, 1, 8, 1)),
    ("any", 320, _BackwardTile(64, 64, 1, 8, 1)),
)


def _plan(spec: KernelSpec, arch: Arch) -> Plan:
    if refused := _refusal(spec, arch):
        raise refused
    check_head_dims(spec)
    check_no_roles(spec)
    operands = operands_of(spec)
    element = operands.shared("q", "k", "v", "dout", "p", "ds")
    qk, v = widths(spec.head_dim_qk, element), widths(spec.head_dim_v, element)
    multiplied_qk, multiplied_v = (-(-head_dim // 32) * 32 for head_dim in (spec.head_dim_qk, spec.head_dim_v))
    tile = _tile(spec, arch, qk.width, v.width)
    iteration = iteration_of(spec, "q")
    warp_dq = -(-multiplied_qk * tile.m // (_DQ_ROWS * _ROWS * tile.warps)) * _DQ_ROWS  # columns of dQ of a warp
    cuts = iteration == "ranges" and not spec.deterministic and first_seen_most(spec)
    late_columns = _late_columns(tile, warp_dq, multiplied_qk, ordered=spec.deterministic)
    structure = MmaBackward(
        blocks=tile.blocks,
        columns_qk=multiplied_qk,
        columns_v=multiplied_v,
        box_bytes=widest_box(qk.width * element.bytes, v.width * element.bytes),
        bounded_rows=max(qk.width, v.width) * element.bytes > BOX_BYTES[0],
        shares_p=_query_warps(tile) > 1,
        late_columns=late_columns,
        late_beside_s=late_columns if tile.beside_s else late_columns // 2,
        by_columns=0 < late_columns < warp_dq or (tile.m < _LATE_QUERIES and not spec.deterministic),
        centered=not spec.variant.dropout and not differentiable_of(spec.variant),
        ordered=spec.deterministic,
        cuts_first=cuts,
        query_values=_query_values(spec, tile),
        keys_once=_query_values(spec, tile) > 0 and qk.width + v.width > _NARROW_COLUMNS,
        shared=_regions(tile, qk.width, v.width, element.bytes, spec),
    )
    planned = drafted(
        spec,
        label="mma",
        width=f"w{tile.warps}",
        tile_map=iteration == "tile_map",
        alignment=16,
        choices=("deterministic",) if spec.deterministic else (),
        columns_qk=(qk,),
        columns_v=(v,),
        backend="cuda",
        schedule="mma_backward",
        loads="pointer",
        q_operand="shared",
        tile_m=tile.m,
        tile_n=tile.n,
        stages=tile.stages,
        num_warps=tile.warps,
        max_registers=None,
        iteration=iteration,
        mask_code="branch",
        softmax="exact_max",
        l2_bytes=_L2_BYTES,
        least_heads_in_l2=next(heads for most, heads in _LEAST_HEADS_IN_L2 if qk.width + v.width <= most),
        structure=structure,
        main="dqkv",
        sum_columns=multiplied_qk,
        ordered=spec.deterministic,
        visible=visible_queries(spec) if cuts else (),
    )
    sums: tuple[int | str, ...] = (tile.m * multiplied_qk, "sum_tiles")
    counters: list[tuple[int | str, ...]] = [("kv_units", "kv_tiles")] if spec.deterministic else []
    if cuts:
        counters.append(("cut_tiles",))
    workspaces = [*row_workspaces(), Workspace("dq_sum", "fp32", (sums, *counters), multiple=4)]
    if cuts:
        columns = sum(_columns_of_warps(columns, tile) for columns in (multiplied_qk, multiplied_v))
        workspaces.append(Workspace("partials", "fp32", ((tile.n * columns, "cut_parts"),), multiple=4))
    return planned.with_launches(*_launches(planned, structure), workspaces=tuple(workspaces))


def _launches(plan: Plan, structure: MmaBackward) -> Iterator[Launch]:
    """Yield the launches in their order."""
    yield from leading_launches(plan, _preprocess_arguments(plan))
    yield launch_of(
        plan, "dqkv", "keys", plan.num_warps, stages=plan.stages, iteration=plan.iteration,
        tile_map=tile_map_axes(plan), arguments=_dqkv_arguments(plan, structure), shared_bytes=structure.shared_bytes,
        max_spills=MMA_BACKWARD_SPILLS.bytes,
    )  # fmt: skip
    yield launch_of(plan, "postprocess", "queries", _ROUND_WARPS, arguments=_postprocess_arguments(plan))


def _preprocess_arguments(plan: Plan) -> tuple[Argument, ...]:
    """Return the arguments of the launch that computes the row statistics, and clears the dQ accumulator."""
    return statistics_arguments(plan, _sums(), arguments.size("sum_chunks", of="dq_sum_chunks", form="i64"))


def _dqkv_arguments(plan: Plan, structure: MmaBackward) -> tuple[Argument, ...]:
    """Return the arguments of the launch of all products. Blocks take tiles from a counter where their order counts."""
    operands = (
        *(arguments.pointer(plan, name) for name in ("q", "k", "v", "dout")), _sums(),
        *([_sums("partials")] if structure.cuts_first else []),
        *(arguments.pointer(plan, name) for name in ("dk", "dv")),
        arguments.row_pointer("lse_log2"), arguments.row_pointer("delta"),
    )  # fmt: skip
    return arguments.signature(
        plan, operands, tiles="kv_tiles", strided=("q", "k", "v", "dout", "dk", "dv"),
        counted=structure.ordered, own_gradients=tensor_gradient_arguments(plan),
        more_sizes=(*(() if plan.varlen else ("q_tiles",)), *(CUT_FIRST_SIZES if structure.cuts_first else ())),
        max_seqlen_k=True,
    )  # fmt: skip


def _postprocess_arguments(plan: Plan) -> tuple[Argument, ...]:
    """Return the arguments of the launch that scales and rounds the dQ accumulator."""
    return (
        _sums(), arguments.pointer(plan, "dq"),
        *(arguments.lengths(plan, "cu_seqlens_q")),
        *arguments.tensor_pointers(plan.variant),
        *arguments.strides_of(plan, ("dq",)),
        *arguments.tensor_shapes(plan.variant),
        *arguments.sizes(plan, "q_tiles", max_seqlen_k=True),
        arguments.scale(),
        *arguments.scalar_arguments(plan),
    )  # fmt: skip


def _sums(workspace: str = "dq_sum") -> Argument:
    return Argument(f"{workspace}_ptr", "pointer", "*fp32", of=workspace, divisibility=16)


def _late_columns(tile: _BackwardTile, warp_dq: int, columns: int, *, ordered: bool) -> int:
    """Columns of dQ of a warp that are added during the next step: none where dQ is added in a fixed order, or where
    warps differ in their columns."""
    alike = warp_dq * _ROWS * tile.warps == columns * tile.m
    if ordered or not alike or tile.m < _LATE_QUERIES:
        return 0
    return warp_dq if warp_dq <= 3 * _DQ_ROWS else _LATE_COLUMNS


def _columns_of_warps(columns: int, tile: _BackwardTile) -> int:
    """Columns of dK or dV that the warps of a tile's keys keep, each whole products of 16."""
    warps = _query_warps(tile)
    return -(-columns // (_DQ_ROWS * warps)) * _DQ_ROWS * warps


def _query_warps(tile: _BackwardTile) -> int:
    """Number of warps that have the same keys, and divide the queries of a step."""
    return _ROWS * tile.warps // tile.n


def _query_values(spec: KernelSpec, tile: _BackwardTile) -> int:
    """Number of values of a query that the mask reads, and that are loaded a step ahead. In steps of fewer queries that
    spills."""
    return query_loads(spec.variant) if iteration_of(spec, "q") == "ranges" and tile.m >= _VALUED_QUERIES else 0


def _regions(tile: _BackwardTile, width_qk: int, width_v: int, size: int, spec: KernelSpec) -> tuple[Region, ...]:
    """Return the regions of shared memory. Blocks that add dQ up in a fixed order take tiles from a counter."""
    keys, regions, at, values = tile.n, [], 0, _query_values(spec, tile)
    pairs = keys * tile.m * size
    for name, count in (
        ("k", keys * width_qk * size), ("v", keys * width_v * size), ("q", tile.stages * tile.m * width_qk * size),
        ("dout", tile.stages * tile.m * width_v * size), ("ds", pairs),
        ("p", pairs if _query_warps(tile) > 1 else 0), ("lse", tile.stages * tile.m * 4),
        ("delta", tile.stages * tile.m * 4), ("query_values", _VALUE_SLOTS * tile.m * 4 * values),
        ("index", 4 * spec.deterministic),
    ):  # fmt: skip
        if count:
            regions.append(Region(name, at, count))
        at += count
    return tuple(regions)


def _families(spec: KernelSpec, arch: Arch) -> set[str]:
    """Families of the table that serve a spec on a card."""
    large, narrow = arch.shared_memory >= _LARGE, _is_narrow(spec)
    member = {
        "large": large,
        "gather": gathers(spec.variant),
        "narrow": narrow,
        "large window": large and narrow and not query_loads(spec.variant),
    }
    return {"any", *(name for name, holds in member.items() if holds)}


def _is_narrow(spec: KernelSpec) -> bool:
    """Whether few queries see a tile of keys: those of a window, or of a document."""
    visible = bands_of(spec, "q").visible
    return (len(visible) == 1 and visible[0].hi is not None) or reads_positions(replace(spec.variant, score=None))


def _tile(spec: KernelSpec, arch: Arch, qk: int, v: int) -> _BackwardTile:
    """Return the tile of the table, within the shared memory of the arch."""
    families = _families(spec, arch)
    given = (spec.backward or Backward()).dkdv
    fixed = (given.tile_m, given.tile_n, given.stages)
    rows = [row for row in _TABLE if qk + v <= row[1]]
    table = next(tile for name, _, tile in rows if name in families)
    # the tile of a kernel for another card, which is verified on this one
    others = [(largest, tile) for _, largest, tile in rows if (tile.m, tile.n, tile.stages) == fixed]
    table = table if (table.m, table.n, table.stages) == fixed or not others else min(others, key=itemgetter(0))[1]
    for name, value, chosen in (
        ("tile.m", given.tile_m, table.m), ("tile.n", given.tile_n, table.n),
        ("stages", given.stages, table.stages),
    ):  # fmt: skip
        if value not in (None, chosen):
            raise refuse(spec, f"backward.dkdv.{name}", f"{value} is not allowed; allowed: {chosen}")
    regions = _regions(table, qk, v, operands_of(spec).q.bytes, spec)
    total = regions[-1].offset + regions[-1].bytes
    if total > arch.shared_memory:
        raise refuse(spec, "backward.dkdv", f"Shared memory {total} B exceeds {arch.shared_memory} B on {arch.name}")
    return replace(table, blocks=max(min(table.blocks, (arch.shared_memory + _RESERVED) // (total + _RESERVED)), 1))


def _alternatives(spec: KernelSpec, first: Plan) -> Iterator[KernelSpec]:
    """Yield the spec with tiles of fewer queries than those of its ``first`` plan, which need fewer registers."""
    given = spec.backward or Backward()
    if given.dkdv == Gradient():
        for tile in dict.fromkeys(tile for _, _, tile in _TABLE if tile.m < first.tile_m):
            yield replace(spec, backward=replace(given, dkdv=Gradient(tile.m, tile.n, tile.stages)))


def _refusal(spec: KernelSpec, arch: Arch) -> PlanError | None:
    """Reason why the schedule cannot serve a spec at all, or None."""
    if positions(spec.variant) is not None:
        return refuse(spec, "backward", "kernels by mma.sync take no tensor of row positions; allowed: triton")
    if spec.deterministic and differentiable_of(spec.variant):
        return refuse(
            spec,
            "deterministic",
            "gradients of a variant's own tensors (grad: true) are added up in no fixed order; allowed: false",
        )
    most = max(largest for family, largest, _ in _TABLE if family in _families(spec, arch))
    columns = [widths(head_dim, dtype(spec.dtype)).width for head_dim in (spec.head_dim_qk, spec.head_dim_v)]
    if sum(columns) > most:
        return refuse(
            spec, "head_dim", f"a backward by mma.sync has shared memory for {most} columns of K and V on {arch.name}, "
            f"not {columns[0]} + {columns[1]}; allowed: triton"
        )  # fmt: skip
    given = spec.backward or Backward()
    if given.dq != Gradient():
        return refuse(spec, "backward.dq", "in cuda the kernel by tiles of keys computes dQ, too; leave it out")
    if given.dkdv.num_warps is not None:
        return refuse(spec, "backward.dkdv.warps", "a warp has 16 keys: give tile.n, or leave it out")
    return None


def _keep_promises(spec: KernelSpec) -> None:
    """Refuse cards with wgmma, which Triton kernels multiply by."""
    if ARCHES[spec.arch].wgmma:
        raise refuse(
            spec, "loads", "cuda kernels that load by pointers multiply by mma.sync, not by wgmma; say "
            "'backward: {backend: cuda}' to accept that"
        )  # fmt: skip


SCHEDULE = Schedule(
    name="mma_backward",
    backend="cuda",
    direction="backward",
    template="cuda/mma_backward/kernel.cu.j2",
    view="attngen.families.mma_backward.view:mma_backward_view",
    supports=lambda arch: not arch.tensor_memory,
    suits=lambda spec: (not ARCHES[spec.arch].wgmma or spec.loads == "pointer") and not is_beyond_256(spec),
    plan=_plan,
    alternatives=plans_of(_alternatives, _plan),
    keep_promises=_keep_promises,
    serves={
        "dtype": only(*_DTYPES, why=f"a backward by mma.sync takes {' and '.join(_DTYPES)}"),
        **ATTENTION, **ADDRESSES, **FUSED,
        **dict.fromkeys(("tile_map", "dropout", "backward"), ANY),
    },
)  # fmt: skip
