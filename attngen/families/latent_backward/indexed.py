"""The Hopper backward of latent attention in which a call lists the keys of each query by index.

A block has 64 heads of a query and goes through its list. It keeps dQ in registers, and adds dK of each tile to an
accumulator in float32: V is the first columns of K, so that dK holds the gradient of both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from attngen.arch import Arch
from attngen.dtypes import KEY_VALUE_DIMS, KEY_VALUE_DTYPES
from attngen.errors import PlanError
from attngen.families.latent.pipes import BOX_COLUMNS
from attngen.manifest import LISTS
from attngen.parts.backward_launches import launch_of, leading_launches, statistics_arguments
from attngen.parts.boxes import BOX_BYTES
from attngen.parts.fields import ADDRESSES, CLASSIFIED, MASKS, ONE_CACHE
from attngen.parts.promises import keep_promises
from attngen.plan import arguments
from attngen.plan.allowances import MLA_SPILLS
from attngen.plan.choices import L2_BYTES, iteration_of, refuse
from attngen.plan.draft import drafted, row_workspaces
from attngen.plan.model import Argument, Columns, Plan, Region, Structure, Workspace
from attngen.plan.operands import operands_of
from attngen.plan.own_gradients import differentiable_of
from attngen.plan.schedule import Schedule
from attngen.plan.served import ServedValues, only
from attngen.schema.kernel_spec import Backward, KernelSpec

#: Heads of a block: M of wgmma; keys of a step.
_ROWS = _KEYS = 64
#: Warpgroups, each with a third of the columns of dQ and dK (docs/notebook/hopper_indexed.md, "Backward of latent
#: attention").
_WARPGROUPS = 3
#: Rows of dK of a block that rounds them, and its warps. Not measured: eight such blocks are all threads of a
#: multiprocessor.
_ROUNDED_ROWS, _ROUND_WARPS = 16, 8
#: Tiles whose keys are in shared memory. Not measured: this one, and the next one.
_ENTRIES = 2
_WORD = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedBackward(Structure):
    """Memory of a backward of keys by index; ``consumers`` are warpgroups, all of which load, too."""

    box_bytes: int  # of a row of a box, over which it is swizzled


#: These kernels in words.
WHAT = "a backward of keys by index"


def _plan(spec: KernelSpec, arch: Arch) -> Plan:
    if refused := _refusal(spec):
        raise refused
    qk, v = spec.head_dim_qk, spec.head_dim_v
    packed = replace(spec, pack_gqa=True, split_kv=True)  # rows are heads of one query
    element = operands_of(spec).shared("q", "k", "dout", "p", "ds")
    structure = IndexedBackward(
        consumers=_WARPGROUPS, shared=tuple(_regions(qk, v, element.bytes)), box_bytes=BOX_BYTES[0]
    )
    planned = drafted_for_heads(
        packed,
        structure,
        label="indexed",
        schedule="indexed_backward",
        main="dqkv",
        warps=4 * _WARPGROUPS,
        tile_m=_ROWS,
        tile_n=_KEYS,
        stages=1,
    )
    return with_launches(planned, structure, max_spills=MLA_SPILLS.bytes, products=_products(qk, v, element.mma_k))


def drafted_for_heads(
    packed: KernelSpec,
    structure: Structure,
    *,
    label: str,
    schedule: str,
    main: str,
    warps: int,
    tile_m: int,
    tile_n: int,
    stages: int,
) -> Plan:
    """Plan of a backward whose rows are heads of one query, without its launches."""
    qk, v = packed.head_dim_qk, packed.head_dim_v
    return drafted(
        packed,
        label=label,
        width=f"w{warps}",
        tile_map=False,
        alignment=16,
        columns_qk=(Columns(0, qk, qk),),
        columns_v=(Columns(0, v, v),),
        backend="cuda",
        schedule=schedule,
        loads="pointer",
        q_operand="shared",
        tile_m=tile_m,
        tile_n=tile_n,
        stages=stages,
        num_warps=warps,
        max_registers=None,
        iteration="ranges" if iteration_of(packed) == "ranges" else "classified",
        mask_code="branch",
        softmax="exact_max",
        l2_bytes=L2_BYTES,
        structure=structure,
        pack_gqa=True,
        main=main,
        sum_columns=qk,
    )


def with_launches(planned: Plan, structure: IndexedBackward, **of_products: Any) -> Plan:
    """The plan with its three launches, and the memory that they share: row statistics, and the sums of dK and dV."""
    launches = (
        *leading_launches(planned, preprocess_arguments(planned)),
        launch_of(
            planned, "dqkv", LISTS, planned.num_warps, stages=planned.stages, arguments=_dqkv_arguments(planned),
            shared_bytes=structure.shared_bytes, **of_products,
        ),
        launch_of(planned, "postprocess", "key_rows", _ROUND_WARPS, tile_n=_ROUNDED_ROWS,
                  arguments=postprocess_arguments(planned)),
    )  # fmt: skip
    widths = (planned.head_dim_qk, *(() if planned.v_of_key else (planned.head_dim_v,)))
    added = Workspace("dkv_sum", "fp32", tuple((width, "key_rows") for width in widths), multiple=4)
    return planned.with_launches(*launches, workspaces=(*row_workspaces(), added))


def _products(qk: int, v: int, depth: int) -> int:
    """Products of the source: S and dP of two warpgroups, then dQ of three, and dK by boxes of columns."""
    boxes, of_v = qk // BOX_COLUMNS, v // BOX_COLUMNS
    return (qk + v) // depth + (_WARPGROUPS + boxes + of_v) * _KEYS // depth


def _regions(qk: int, v: int, element: int) -> Iterator[Region]:
    """Regions of shared memory, matrices first, which need the most alignment."""
    sizes = {
        "q": _ROWS * qk, "dout": _ROWS * v, "k": _KEYS * qk, "p": _ROWS * _KEYS, "ds": _ROWS * _KEYS,
    }  # fmt: skip
    offset = 0
    for name, elements in sizes.items():
        yield Region(name, offset, elements * element)
        offset += elements * element
    yield Region("entries", offset, _ENTRIES * _KEYS * _WORD)


def preprocess_arguments(plan: Plan) -> tuple[Argument, ...]:
    """Arguments of the launch that computes the row statistics, and clears the dK accumulator."""
    return statistics_arguments(plan, sums(), arguments.size("sum_chunks", of="dkv_sum_chunks", form="i64"))


def _dqkv_arguments(plan: Plan) -> tuple[Argument, ...]:
    """Arguments of the launch of all products."""
    keys = ("k",) if plan.v_of_key else ("k", "v")
    return (
        *(arguments.pointer(plan, name) for name in ("q", *keys, "dout", "dq")), sums(),
        arguments.row_pointer("lse_log2"), arguments.row_pointer("delta"),
        *arguments.lengths(plan),
        *arguments.tensor_pointers(plan.variant),
        *arguments.strides_of(plan, ("q", *keys, "dout", "dq")),
        *arguments.tensor_shapes(plan.variant),
        *map(arguments.size, ("batch", "heads", "kv_heads", "group", "key_rows")),
        arguments.size("max_seqlen_q" if plan.varlen else "seqlen_q", "seqlen_q"),
        arguments.size("max_seqlen_k", "seqlen_k"),
        *map(arguments.size, ("total_q", "total_k")),
        arguments.scale(),
        *arguments.scalar_arguments(plan),
        *arguments.presence(plan, ("seqused_k",)),
    )  # fmt: skip


def postprocess_arguments(plan: Plan) -> tuple[Argument, ...]:
    """Arguments of the launch that rounds dK and dV."""
    rounded = ("dk",) if plan.v_of_key else ("dk", "dv")
    return (
        sums(), *(arguments.pointer(plan, name) for name in rounded),
        *arguments.strides_of(plan, rounded),
        *map(arguments.size, ("kv_heads", "key_rows")),
        arguments.size("max_seqlen_k", "seqlen_k"),
    )  # fmt: skip


def sums() -> Argument:
    """The accumulator of dK, and of dV where that has one of its own."""
    return Argument("dkv_sum_ptr", "pointer", "*fp32", of="dkv_sum", divisibility=16)


def _refusal(spec: KernelSpec) -> PlanError | None:
    """Reason why the schedule cannot serve a spec, or None."""
    if (spec.head_dim_qk, spec.head_dim_v) not in KEY_VALUE_DIMS:
        allowed = " or ".join(f"{{qk: {qk}, v: {v}}}" for qk, v in KEY_VALUE_DIMS)
        return refuse(
            spec, "head_dim", f"with 'v: key' kernels have head_dim {allowed}, not "
            f"{{qk: {spec.head_dim_qk}, v: {spec.head_dim_v}}}"
        )  # fmt: skip
    return refusal_beside_masks(spec, WHAT)


def refusal_beside_masks(spec: KernelSpec, what: str) -> PlanError | None:
    """Reason why a backward of masks and sinks alone, in words ``what``, cannot serve a spec, or None."""
    if differentiable_of(spec.variant):
        return refuse(spec, "variant", f"{what} gives no gradients of tensors (grad: true)")
    return None


def serves(what: str) -> dict[str, ServedValues]:
    """Declaration of a backward of masks and sinks alone, in words ``what``."""
    return {
        "dtype": only(*KEY_VALUE_DTYPES, why=f"{what} takes {' and '.join(KEY_VALUE_DTYPES)}"),
        **MASKS, **ADDRESSES, **CLASSIFIED,
        "loads": only(None, "pointer", why=f"{what} copies keys by address"),
        "score": only(None, why=f"{what} takes masks and sinks, no score"),
        "dropout": only(False, why=f"{what} takes no dropout"),
        "deterministic": only(False, why=f"{what} adds dK up in no fixed order"),
        "backward": only(None, Backward(), why=f"{what} has one tile"),
    }  # fmt: skip


SCHEDULE = Schedule(
    name="indexed_backward",
    backend="cuda",
    direction="backward",
    template="cuda/latent_backward/indexed/kernel.cu.j2",
    view="attngen.families.latent_backward.indexed_view:indexed_backward_view",
    supports=lambda arch: arch.wgmma,
    plan=_plan,
    keep_promises=keep_promises,
    v_of_key=True,
    listed_keys=True,
    serves=serves(WHAT) | {"keys": ONE_CACHE},
)
