"""The kernel that writes new keys and values into a cache, and rotates keys and queries on the way.

Memory and launches bind, so that widths of rows, how a cache lies and what is rotated are arguments: one kernel of a
dtype serves all head dims. It is plain CUDA, for any architecture.
"""

from __future__ import annotations

from collections.abc import Iterator

from attngen.arch import Arch
from attngen.dtypes import CHUNK_BYTES
from attngen.operations import APPEND
from attngen.parts.rows import rows_plan
from attngen.plan import arguments, naming
from attngen.plan.allowances import SPILLS
from attngen.plan.model import Argument, Launch, Plan
from attngen.plan.schedule import Schedule
from attngen.plan.served import ANY
from attngen.schema.kernel_spec import KernelSpec

#: A block copies vectors of 16 bytes, one per thread.
GRID = "vectors"

#: Warps of a block. Not measured: eight such blocks are all threads of a multiprocessor.
_WARPS = 8

#: Tensors by address: of the kernel's dtype, of 32-bit integers, and of a type that another argument names.
CACHES = ("k_cache", "v_cache")
ELEMENTS = ("k", "v", "q", "q_out", *CACHES)
_INDICES = ("cache_seqlens", "page_table", "batch_index", "cu_seqlens", "rotary_offsets")
_UNTYPED = ("slots", "rotary_cos", "rotary_sin")

#: The scales of a cache in fewer bits, which may be written, and the axes of their strides.
SCALES = ("k_descale", "v_descale")
_SCALE_AXES = ("b", "h", "s")

#: Axes whose strides, in elements, the kernel is given.
_STRIDES = {
    **dict.fromkeys(("k", "v", "q", "q_out"), ("b", "s", "h")),
    **dict.fromkeys(("k_cache", "v_cache"), ("page", "s", "h")),
    "slots": ("b", "s"),
}

#: Numbers of a call: sizes, and what its tensors hold.
_SIZES = (
    "tokens", "batch", "seqlen_new", "heads", "kv_heads", "head_dim_qk", "head_dim_v", "lane_bits", "pages",
    "page_size", "max_pages", "positions", "rotary_half", "rotary_form", "interleaved", "whole_vectors", "long_slots",
)  # fmt: skip


def _plan(spec: KernelSpec, arch: Arch) -> Plan:
    name = naming.operation_name(APPEND, spec.arch, naming.dtype_label(spec.dtype, spec.kv_dtype))
    threads = 32 * _WARPS
    planned = rows_plan(spec, name, APPEND, tile_m=threads, tile_n=1, warps=_WARPS)
    row = Launch(
        APPEND, name, GRID, threads, 1, 1, _WARPS, arguments=tuple(_arguments(planned)), max_spills=SPILLS.bytes,
        products=0, pdl=arch.pdl,
    )  # fmt: skip
    return planned.with_launches(row)


def _arguments(plan: Plan) -> Iterator[Argument]:
    given, cached = plan.operands.q, plan.operands.k
    for name in ELEMENTS:
        element = cached if name in CACHES else given
        # what a thread reads or writes of a row at once
        whole = CHUNK_BYTES // given.bytes * (given if plan.latent_row else element).bytes
        yield Argument(f"{name}_ptr", "pointer", f"*{element.triton}", of=name, divisibility=whole)
    for name in _INDICES:
        yield Argument(f"{name}_ptr", "pointer", "*i32", of=name, divisibility=4)
    for name in _UNTYPED:
        yield Argument(f"{name}_ptr", "pointer", "*void", of=name)
    for name, axes in _STRIDES.items():
        for axis in axes:
            yield Argument(f"stride_{name}_{axis}", "stride", "i64", of=name, axis=axis)
    yield Argument("page_table_stride", "stride", "i64", of="page_table", axis="b")
    for name in ("rotary_cos", "rotary_sin"):
        yield Argument(f"stride_{name}", "stride", "i64", of=name, axis="s")
    if plan.descaled:
        for name in SCALES:
            yield Argument(f"{name}_ptr", "pointer", "*fp32", of=name, divisibility=4)
        for name in SCALES:
            for axis in _SCALE_AXES:
                yield Argument(f"stride_{name}_{axis}", "stride", "i64", of=name, axis=axis)
        yield from map(arguments.size, ("scales_of_pages", "scales_of_rows"))
    yield from map(arguments.size, _SIZES)


SCHEDULE = Schedule(
    name="append",
    backend="cuda",
    direction=APPEND,
    template="cuda/append/kernel.cu.j2",
    view="attngen.families.append.view:append_view",
    supports=lambda arch: True,
    plan=_plan,
    layouts=("paged",),
    serves=dict.fromkeys(("dtype", "kv_dtype"), ANY),
)
