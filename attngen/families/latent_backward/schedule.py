"""The Hopper backward of latent attention, whose values are the first columns of its keys.

dK holds the gradient of both, and its tile is too large to stay in a block's registers together with dQ. Two launches
take turns over chunks of query rows: ``dq`` recomputes P and dS tile by tile, keeps dQ in registers, and writes both
tiles to memory; ``dkv`` multiplies them with Q and dO over many rows at once, as one long matrix product, and adds the
sum to an accumulator in float32. Every product is computed once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from attngen.arch import Arch
from attngen.dtypes import CHUNK_COLUMNS, CHUNK_KEY_TILES, CHUNK_ROW_TILES, CHUNK_TILE, KEY_VALUE_DIMS
from attngen.errors import PlanError
from attngen.families.latent.pipes import BOX_COLUMNS
from attngen.families.latent_backward.indexed import (
    drafted_for_heads,
    postprocess_arguments,
    preprocess_arguments,
    refusal_beside_masks,
    serves,
    sums,
)
from attngen.families.latent_backward.pipes import CONSUMERS, HALF_ROWS, STAGES, dkv_pipes, dq_pipes
from attngen.manifest import CHUNK_KEYS, CHUNK_ROWS
from attngen.parts.backward_launches import launch_of, leading_launches
from attngen.parts.boxes import BOX_BYTES
from attngen.parts.promises import keep_promises
from attngen.plan import arguments
from attngen.plan.allowances import MLA_SPILLS
from attngen.plan.choices import refuse
from attngen.plan.draft import row_workspaces
from attngen.plan.model import Argument, Plan, Region, Role, Structure, Workspace
from attngen.plan.operands import operands_of
from attngen.plan.pipes import Pipes
from attngen.plan.schedule import Schedule
from attngen.schema.kernel_spec import KernelSpec

_ROWS = _KEYS = CHUNK_TILE  # of a tile of P
#: Parts of the columns of dQ, each of which is a product (docs/notebook/hopper_mla.md, "Backward").
_QUARTERS = 4
#: Rows of dK of a block that rounds them, and its warps. Not measured: eight such blocks are all threads of a
#: multiprocessor.
_ROUNDED_ROWS, _ROUND_WARPS = 16, 8
_WORD = 4
_SPAN_WORDS = 16  # ends of the ranges of tiles that some, or all, of a tile of rows see: four of each kind at most


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaBackward(Structure):
    """Memory of both launches: ``shared`` and ``warp_roles`` are those of ``dq``; ``consumers`` multiply in either."""

    box_bytes: int  # of a row of a box, over which it is swizzled
    row_tiles: int  # tiles of query rows of a part, over which a block of dkv sums
    key_tiles: int  # of a block of dkv
    half_rows: int  # of a stage of dkv
    boxes: int  # of columns of a block of dkv
    span_words: int  # of memory for the ranges of tiles of keys that a tile of rows sees
    dkv_shared: tuple[Region, ...]
    dkv_roles: tuple[Role, ...]

    @property
    def dkv_bytes(self) -> int:
        """Shared memory of a block of dkv."""
        return self.dkv_shared[-1].offset + self.dkv_shared[-1].bytes

    @property
    def dkv_warps(self) -> int:
        """Warps of a block of dkv."""
        return sum(role.warps for role in self.dkv_roles)

    def dkv_registers_of(self, role: str) -> int:
        """Registers of each thread of a role of dkv."""
        return next(one.registers for one in self.dkv_roles if one.name == role)


def _plan(spec: KernelSpec, arch: Arch) -> Plan:
    if refused := _refusal(spec):
        raise refused
    qk, v = spec.head_dim_qk, spec.head_dim_v
    packed = replace(spec, pack_gqa=True, split_kv=True)  # rows are heads of queries, of any number
    element = operands_of(spec).shared("q", "k", "dout", "p", "ds")
    pipes, of_dkv = pipes_of(qk, v, element.bytes)
    structure = MlaBackward(
        consumers=CONSUMERS,
        shared=pipes.regions,
        warp_roles=pipes.roles,
        box_bytes=BOX_BYTES[0],
        row_tiles=CHUNK_ROW_TILES,
        key_tiles=CHUNK_KEY_TILES,
        half_rows=HALF_ROWS,
        boxes=CHUNK_COLUMNS // BOX_COLUMNS,
        span_words=_SPAN_WORDS,
        dkv_shared=of_dkv.regions,
        dkv_roles=of_dkv.roles,
    )
    warps = sum(role.warps for role in pipes.roles)
    planned = drafted_for_heads(
        packed,
        structure,
        label="mla",
        schedule="mla_backward",
        main="dq",
        warps=warps,
        tile_m=_ROWS,
        tile_n=_KEYS,
        stages=1,
    )
    depth = element.mma_k
    of_dq = (qk + v) // depth + _QUARTERS * _KEYS // depth
    # of all tiles of keys of a consumer, or of one of them
    of_dk = 4 * CHUNK_KEY_TILES // CONSUMERS * HALF_ROWS // depth
    launches = (
        *leading_launches(planned, preprocess_arguments(planned)),
        launch_of(
            planned, "dq", CHUNK_ROWS, planned.num_warps, arguments=_dq_arguments(planned),
            shared_bytes=structure.shared_bytes, max_spills=MLA_SPILLS.bytes, products=of_dq,
        ),
        launch_of(
            planned, "dkv", CHUNK_KEYS, structure.dkv_warps, stages=STAGES,
            tile_m=_ROWS * CHUNK_ROW_TILES, tile_n=_KEYS * CHUNK_KEY_TILES,
            arguments=_dkv_arguments(planned), shared_bytes=structure.dkv_bytes,
            max_spills=MLA_SPILLS.bytes, products=of_dk,
        ),
        launch_of(planned, "postprocess", "key_rows", _ROUND_WARPS, tile_n=_ROUNDED_ROWS,
                  arguments=postprocess_arguments(planned)),
    )  # fmt: skip
    pair = 2 * _ROWS * _KEYS * element.bytes // _WORD  # words of P and dS of a tile
    rows = _ROWS * (qk + v) * element.bytes // _WORD  # and of Q and dO of a tile of rows
    workspaces = (
        *row_workspaces(),
        Workspace("dkv_sum", "fp32", ((qk, "key_rows"),), multiple=4),
        Workspace("products", "fp32", ((pair, "chunk_tiles", "chunk_key_tiles"),), multiple=32),
        Workspace("rows", "fp32", ((rows, "chunk_tiles"),), multiple=32),
        Workspace("ranges", "i32", ((_SPAN_WORDS, "chunk_tiles"),), multiple=32),
    )
    return planned.with_launches(*launches, workspaces=workspaces)


def pipes_of(qk: int, v: int, element: int) -> tuple[Pipes, Pipes]:
    """The pipes of ``dq`` and those of ``dkv``."""
    return dq_pipes(qk=qk, v=v, element=element), dkv_pipes(element=element)


def _dq_arguments(plan: Plan) -> tuple[Argument, ...]:
    """Arguments of the launch that computes dQ."""
    return (
        *(arguments.pointer(plan, name) for name in ("q", "k", "dout", "dq")), *_chunk_pointers(),
        arguments.row_pointer("lse_log2"), arguments.row_pointer("delta"),
        *arguments.lengths(plan),
        *arguments.tensor_pointers(plan.variant),
        *arguments.strides_of(plan, ("q", "k", "dout", "dq")),
        *arguments.tensor_shapes(plan.variant),
        *_sizes(plan),
        arguments.scale(),
        *arguments.scalar_arguments(plan),
        *arguments.presence(plan, ("seqused_k",)),
    )  # fmt: skip


def _dkv_arguments(plan: Plan) -> tuple[Argument, ...]:
    """Arguments of the launch that computes dK."""
    present = arguments.presence(plan, ("seqused_k",))
    return (*_chunk_pointers(), sums(), *arguments.lengths(plan), *_sizes(plan), *present)


def _chunk_pointers() -> Iterator[Argument]:
    """Memory that holds a chunk of query rows between the launches."""
    for name, form in (("products", "fp32"), ("rows", "fp32"), ("ranges", "i32")):
        yield Argument(f"{name}_ptr", "pointer", f"*{form}", of=name, divisibility=16)


def _sizes(plan: Plan) -> Iterator[Argument]:
    for name in ("batch", "heads", "kv_heads", "group", "first_part", "chunk_key_tiles"):
        yield arguments.size(name)
    yield arguments.size("max_seqlen_q" if plan.varlen else "seqlen_q", "seqlen_q")
    yield arguments.size("max_seqlen_k", "seqlen_k")
    yield arguments.size("total_q")
    yield arguments.size("total_k")


_WHAT = "a backward with 'v: key'"


def _refusal(spec: KernelSpec) -> PlanError | None:
    """Reason why the schedule cannot serve a spec, or None."""
    if (spec.head_dim_qk, spec.head_dim_v) not in KEY_VALUE_DIMS:
        allowed = " or ".join(f"{{qk: {qk}, v: {v}}}" for qk, v in KEY_VALUE_DIMS)
        return refuse(
            spec, "head_dim", f"with 'v: key' kernels have head_dim {allowed}, not "
            f"{{qk: {spec.head_dim_qk}, v: {spec.head_dim_v}}}"
        )  # fmt: skip
    return refusal_beside_masks(spec, _WHAT)


SCHEDULE = Schedule(
    name="mla_backward",
    backend="cuda",
    direction="backward",
    template="cuda/latent_backward/kernel.cu.j2",
    view="attngen.families.latent_backward.view:mla_backward_view",
    supports=lambda arch: arch.wgmma,
    plan=_plan,
    keep_promises=keep_promises,
    v_of_key=True,
    serves=serves(_WHAT),
)
