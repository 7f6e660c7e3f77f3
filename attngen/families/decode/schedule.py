"""The Hopper split-KV forward: few query rows against many keys, which blocks split. Warps multiply by mma.sync."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from attngen.arch import Arch
from attngen.dtypes import BESIDE_CACHES, CACHE_DTYPES, PAGE_BLOCK, WIDE_HEAD_DIMS
from attngen.families.decode.pipes import (
    KEY_SCALES,
    LOADERS,
    decode_pipes,
    decode_pipes_of,
    memory,
    multiplied,
    slices_of,
)
from attngen.manifest import GRID, WorkLimits
from attngen.parts.boxes import BOX_BYTES, is_paged, widest_box, widths
from attngen.parts.fields import DESCRIPTORS, EXACT, SHARED_KEYS
from attngen.parts.promises import keep_promises
from attngen.plan import arguments
from attngen.plan.allowances import CACHE_SPILLS, SPILLS
from attngen.plan.choices import L2_BYTES, check_head_dims, is_beyond_256, iteration_of, reads_wide_cache, refuse
from attngen.plan.draft import drafted
from attngen.plan.layouts import LAYOUTS
from attngen.plan.model import Argument, Columns, Launch, Plan, Structure, Workspace
from attngen.plan.operands import operands_of
from attngen.plan.pipes import BARRIER_BYTES, ROW_PADDING, Pipes
from attngen.plan.schedule import Schedule
from attngen.plan.served import ANY, only
from attngen.schema.kernel_spec import KernelSpec

_DTYPES = (*BESIDE_CACHES, *CACHE_DTYPES)
#: Query rows of a warp: M of mma.m16n8k16.
_ROWS = 16
#: Keys of a step by the bytes of an element: K of mma.m16n8k16 in the second product, or twice that, so that a step has
#: as many bytes.
_KEYS = {2: 16, 1: 32}
#: Bytes of K and V of a block up to which equal work items stay whole (docs/notebook/hopper_decode.md, "Whole units").
_WHOLE_BYTES = 8 * 2**20
_CLUSTER = 8  # the most blocks of a cluster that every Hopper card takes

#: Warps of a block, the first number that shared memory has room for: eight (docs/notebook/hopper_decode.md, "A scratch
#: kernel"), or half as many. Not measured one against the other.
_WARPS = (8, 4)
#: Steps in shared memory for each warp, at least and at most: with fewer, fewer warps are taken; two are enough for
#: eight warps (docs/notebook/hopper_decode.md, "A scratch kernel"). Four were not measured.
_LEAST_STEPS, _MOST_STEPS = 2, 4
#: Most registers of Q and O of a thread; beyond, Q stays in shared memory. Not measured: a thread has 168
#: (docs/notebook/hopper_decode.md, "The schedule, second form").
_MOST_REGISTERS = 128
#: Both for cards without wgmma, whose loaders copy lane by lane: less shared memory means fewer warps, and more
#: registers for each. Not measured one against the other; docs/notebook/mma.md, "Split-KV", has their speed.
_MOST_REGISTERS_BY_LANES = 192
_WARPS_BY_LANES = (*_WARPS, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class HopperDecode(Structure, WorkLimits):
    """Roles and memory of a split-KV forward, and the limits by which its work is cut."""

    consumers: int  # warps that multiply
    loaders: int  # warps that copy
    cluster: int  # most blocks that can work together
    box_bytes: int  # of a row of one copy, over which it is swizzled
    key_bytes: int  # of an element of K
    slices: int = 1  # warps that have the same rows and keys, and a slice of the columns of Q, K, V and O each

    @property
    def lane_keys_apart(self) -> int:
        """Distance of the two keys that a lane holds of each 8 in a product: 4 for rows of 8 bits, to avoid bank
        conflicts, else 1."""
        return 4 if self.key_bytes == 1 else 1

    @property
    def lists_sequences(self) -> bool:
        """Whether its list of work can leave out longer sequences."""
        return True


def _plan(spec: KernelSpec, arch: Arch) -> Plan:
    return split_plan(spec, arch, schedule="hopper_decode", label="decode", loads="descriptor", cluster=_CLUSTER)


def split_plan(spec: KernelSpec, arch: Arch, *, schedule: str, label: str, loads: str, cluster: int) -> Plan:
    """The plan of a split-KV forward. ``loads``: its loaders copy by TMA ("descriptor"), or each lane by cp.async
    ("pointer")."""
    check_head_dims(spec)
    if spec.scale_block == 1 and not is_paged(spec):
        raise refuse(spec, "descale", "split-KV kernels take a scale of each key in pages alone; allowed: head")
    packed = replace(spec, pack_gqa=True)
    iteration = iteration_of(packed)
    operands = operands_of(spec)
    element = operands.shared("k", "v")
    keys = _KEYS[element.bytes]
    # a copy of a page may bring a single row, of 128 bytes then: it begins at a multiple of these in shared memory
    parts = BOX_BYTES[0] // BOX_BYTES[-1] if is_paged(spec) else 1
    dims = spec.head_dim_qk, spec.head_dim_v
    if is_beyond_256(spec):  # slices of as many columns, and of whole copies
        qk, v = (Columns(0, WIDE_HEAD_DIMS[-1], head_dim) for head_dim in dims)
    else:
        qk, v = (widths(head_dim, element, parts) for head_dim in dims)
    of_q, of_o, slices = multiplied(qk, element).width, multiplied(v, element).width, slices_of(v)
    by_lanes = loads == "pointer"
    most = _MOST_REGISTERS_BY_LANES if by_lanes else _MOST_REGISTERS
    q_operand = "shared" if (of_q // 4 + of_o // 2) // slices > most else "registers"
    sizes = {
        "element": element,
        "q_operand": q_operand,
        "keys": keys,
        "scaled_keys": spec.scale_block in KEY_SCALES,
        "listed": spec.variant.keys is not None,
        "slices": slices,
    }
    warps, pipes = _memory(spec, arch, qk, v, by_lanes, **sizes)
    stages = pipes.ring("kv").stages
    structure = HopperDecode(
        persistent=True,
        shared=pipes.regions,
        consumers=warps,
        loaders=LOADERS,
        cluster=cluster,
        box_bytes=widest_box(qk.width * element.bytes, v.width * element.bytes),
        least_tiles=8,
        cut_tiles=12,
        key_bytes=element.bytes,
        slices=slices,
        whole_tiles=_WHOLE_BYTES // (keys * (qk.width + v.width) * element.bytes),
    )
    planned = drafted(
        spec,
        label=label,
        width=f"w{warps}",
        tile_map=False,
        alignment=16,
        columns_qk=(qk,),
        columns_v=(v,),
        backend="cuda",
        schedule=schedule,
        loads=loads,
        q_operand=q_operand,
        tile_m=_ROWS,
        tile_n=keys,
        stages=stages,
        num_warps=warps + LOADERS,
        max_registers=None,
        # a tile map lists tiles for rows of single heads; here each tile between the first and the last one is visited
        iteration="ranges" if iteration == "ranges" else "classified",
        mask_code="branch",
        softmax="exact_max",
        l2_bytes=L2_BYTES,
        structure=structure,
        pack_gqa=True,
        choices=(KEY_SCALES[spec.scale_block],) if spec.scale_block in KEY_SCALES else (),
    )
    row_warps = max(warps // 2, 1) if slices == 1 else warps // slices
    forward = Launch(
        "forward", planned.name, GRID, _ROWS, keys, stages, planned.num_warps, planned.iteration,
        _arguments(planned, structure.box_bytes), persistent=True, cluster=cluster, row_warps=row_warps,
        pdl=arch.pdl, shared_bytes=structure.shared_bytes, products=0,
        max_spills=(CACHE_SPILLS if planned.descaled else SPILLS).bytes,
    )  # fmt: skip
    partials = ("split_slots", "row_warps", _ROWS * (of_o + ROW_PADDING))
    return planned.with_launches(
        forward,
        workspaces=(Workspace("partials", "fp32", (partials,)),),
    )


def _arguments(plan: Plan, box_bytes: int) -> tuple[Argument, ...]:
    """Return the arguments of the kernel."""
    ragged, by_address = plan.ragged_queries, plan.loads == "pointer"
    padded = ("query_rows",) if plan.variant.keys is not None else ()
    return (
        arguments.pointer(plan, "q"),
        *(
            arguments.pointer(plan, name) if by_address else arguments.tensor_map(plan, name, plan.tile_n, box_bytes)
            for name in "kv"
        ),
        arguments.pointer(plan, "out"),
        *arguments.results_of_rows(plan),
        *arguments.descales(plan),
        *arguments.partial_pointers(),
        *arguments.lengths(plan),
        *arguments.tensor_pointers(plan.variant),
        *arguments.strides_of(plan, ("q", "k", "v") if by_address else ("q",)),
        *arguments.strides_of(plan, ("out",), promised=False),
        *arguments.tensor_shapes(plan.variant),
        *map(arguments.size, ("batch", "heads", "kv_heads", "group", *padded, "row_bits", "row_units")),
        *map(arguments.size, ("split_tiles", "max_splits")),
        *arguments.reciprocals("batch", *(padded or ("group",)), "row_units", "split_tiles"),
        arguments.size("max_seqlen_q" if ragged else "seqlen_q", "seqlen_q"),
        arguments.size("max_seqlen_k", "seqlen_k"),
        *map(arguments.size, ("total_q", "total_k")),
        *(map(arguments.size, ("most_queries",)) if plan.lists_sequences else ()),
        *(map(arguments.size, ("beside",)) if plan.lists_sequences and plan.arch.pdl else ()),
        *arguments.page_sizes(plan),
        *(arguments.reciprocals("page_size") if plan.key_access == "paged" else ()),
        arguments.scale(),
        *arguments.scalar_arguments(plan),
        *arguments.presence(plan, ("lse", "seqused_k")),
    )


def _memory(spec: KernelSpec, arch: Arch, qk: Columns, v: Columns, by_lanes: bool, **given: Any) -> tuple[int, Pipes]:
    """Return the warps that multiply, and their pipes: as many warps as have enough stages."""
    given_warps = (spec.num_warps - LOADERS,) if by_lanes and spec.num_warps else None
    most_stages = spec.stages if by_lanes and spec.stages else _MOST_STEPS * _WARPS[0]
    slices: int = given["slices"]
    for warps in given_warps or (_WARPS_BY_LANES if by_lanes else _WARPS):
        sizes = memory(warps, qk, v, **given)
        bare = decode_pipes(warps=warps, stages=0, slices=slices, by_lanes=by_lanes, **sizes).regions[-1]
        room = arch.shared_memory - bare.offset - bare.bytes
        groups = warps // slices  # at most, of warps that go through keys together
        turns = max(groups, LOADERS)  # whose multiples keep a stage with one group and one loader
        stages = (
            min(
                room // (sizes["stage"] + sizes["scales"] + sizes["entries"] + 2 * BARRIER_BYTES),
                _MOST_STEPS * groups,
                most_stages,
            )
            // turns
            * turns
        )
        if stages >= _LEAST_STEPS * groups:
            break
    if most_stages < turns:
        raise refuse(
            spec, "stages", f"{groups} warps take stages in turn; allowed: multiples of {turns}, not {spec.stages}"
        )
    if stages < turns:
        needed = bare.offset + bare.bytes + LOADERS * sizes["stage"]
        raise refuse(spec, "head_dim", f"Shared memory {needed} B exceeds {arch.shared_memory} B on {arch.name}")
    return warps, decode_pipes(warps=warps, stages=stages, slices=slices, by_lanes=by_lanes, **sizes)


#: What all kernels serve whose blocks split the keys of a sequence.
SPLIT = SHARED_KEYS | EXACT | {
    "dtype": only(*_DTYPES, why=f"cuda kernels take {', '.join(_DTYPES)}"),
    "kv_dtype": ANY,
}  # fmt: skip

SCHEDULE = Schedule(
    name="hopper_decode",
    backend="cuda",
    direction="forward",
    template="cuda/decode/kernel.cu.j2",
    view="attngen.families.decode.view:decode_view",
    supports=lambda arch: arch.wgmma,
    suits=lambda spec: not is_beyond_256(spec) or reads_wide_cache(spec),
    plan=_plan,
    keep_promises=keep_promises,
    pipes=decode_pipes_of,
    layouts=tuple(LAYOUTS),
    split_kv=True,
    serves=SPLIT | DESCRIPTORS | {
        "scale_block": only(0, PAGE_BLOCK, 1, why="blocks of tokens have scales only in kernels without split keys"),
    },
)  # fmt: skip
