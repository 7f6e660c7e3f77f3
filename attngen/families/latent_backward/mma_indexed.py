"""The backward in which a call lists the keys of each query by index, of ordinary head dims, by mma.sync.

A block has 16 heads of a query. Its warps take tiles of 16 listed keys in turn, each with a ring of its own, whose rows
it gathers by cp.async. A warp keeps dQ of its keys in registers, and adds dK and dV of each tile to sums in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from attngen.arch import Arch
from attngen.errors import PlanError
from attngen.families.latent_backward.indexed import (
    WHAT,
    IndexedBackward,
    drafted_for_heads,
    refusal_beside_masks,
    serves,
    with_launches,
)
from attngen.parts.boxes import BOX_BYTES
from attngen.parts.fields import ONE_CACHE
from attngen.parts.promises import keep_promises
from attngen.plan.allowances import SPILLS
from attngen.plan.choices import refuse
from attngen.plan.model import Plan, Region
from attngen.plan.operands import operands_of
from attngen.plan.schedule import Schedule
from attngen.schema.kernel_spec import KernelSpec

#: Heads of a block: M of mma.m16n8k16; keys of a step.
_ROWS = _KEYS = 16
#: Warps of a block, and tiles of each in shared memory, the first number that fits; docs/notebook/hopper_indexed.md,
#: "Backward of ordinary head dims", has two stages and three, and as many warps of a multiprocessor, or twice as many.
_WARPS, _STAGES = 4, (3, 2)
_COLUMNS = 64  # head dims are multiples of them, over which rows are swizzled
#: Most columns of K and V together. Not measured: dQ stays in registers.
_MOST_COLUMNS = 512
_WORD = 4
#: Blocks of a multiprocessor, if their shared memory allows. Not measured one against the other.
_HALF = 2


def _plan(spec: KernelSpec, arch: Arch) -> Plan:
    if refused := _refusal(spec):
        raise refused
    qk, v = spec.head_dim_qk, spec.head_dim_v
    packed = replace(spec, pack_gqa=True, split_kv=True)  # rows are heads of one query
    element = operands_of(spec).shared("q", "k", "v", "dout", "p", "ds")
    room = arch.shared_memory
    options = [(stages, tuple(_regions(qk, v, element.bytes, stages))) for stages in _STAGES]
    fits = [(stages, regions) for stages, regions in options if _end(regions) <= room]
    if not fits:
        raise refuse(spec, "head_dim", f"Shared memory {_end(options[-1][1])} B exceeds {room} B on {arch.name}")
    stages, regions = next((one for one in fits if _HALF * (_end(one[1]) + 1024) <= room + 1024), fits[0])
    structure = IndexedBackward(consumers=_WARPS, shared=regions, box_bytes=BOX_BYTES[0])
    planned = drafted_for_heads(
        packed,
        structure,
        label="mmaindexed",
        schedule="mma_indexed_backward",
        main="dqkv",
        warps=_WARPS,
        tile_m=_ROWS,
        tile_n=_KEYS,
        stages=stages,
    )
    return with_launches(planned, structure, max_spills=SPILLS.bytes)


def _regions(qk: int, v: int, element: int, stages: int) -> Iterator[Region]:
    """Regions of shared memory, matrices first, which need the most alignment; dQ of warps is added up in that of K."""
    sizes = {
        "kv": max(_WARPS * stages * _KEYS * (qk + v) * element, _WARPS * _ROWS * qk * _WORD),
        "q": _ROWS * qk * element,
        "dout": _ROWS * v * element,
        "entries": _WARPS * stages * _KEYS * _WORD,
    }
    offset = 0
    for name, size in sizes.items():
        yield Region(name, offset, size)
        offset += size


def _end(regions: tuple[Region, ...]) -> int:
    return regions[-1].offset + regions[-1].bytes


def _refusal(spec: KernelSpec) -> PlanError | None:
    """Reason why the schedule cannot serve a spec, or None."""
    dims = spec.head_dim_qk, spec.head_dim_v
    if any(dim % _COLUMNS for dim in dims) or sum(dims) > _MOST_COLUMNS:
        return refuse(
            spec, "head_dim", f"a backward of keys by index has head dims of multiples of {_COLUMNS}, "
            f"{_MOST_COLUMNS} together at most, not {dims[0]} and {dims[1]}"
        )  # fmt: skip
    return refusal_beside_masks(spec, WHAT)


SCHEDULE = Schedule(
    name="mma_indexed_backward",
    backend="cuda",
    direction="backward",
    template="cuda/latent_backward/mma_indexed/kernel.cu.j2",
    view="attngen.families.latent_backward.indexed_view:indexed_backward_view",
    supports=lambda arch: not arch.tensor_memory,
    plan=_plan,
    keep_promises=keep_promises,
    listed_keys=True,
    serves=serves(WHAT) | {"keys": ONE_CACHE},
)
