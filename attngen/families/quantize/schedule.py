"""The kernel that quantizes queries, keys and values, with rotation and Hadamard transform on the way.

Memory binds, as long as a number costs few instructions and loads are always in flight: blocks are persistent, and load
rows while they work on those before. Head dims, strides and what a scale is of are arguments: one kernel of a dtype
serves all calls. A call launches it once, or twice where a scale is of more than a block sees: first to find the
largest magnitudes, then to round.
"""

from __future__ import annotations

from collections.abc import Iterator

from attngen.arch import Arch
from attngen.dtypes import CHUNK_BYTES
from attngen.operations import QUANTIZE
from attngen.parts.rows import rows_plan
from attngen.plan import arguments, naming
from attngen.plan.allowances import SPILLS
from attngen.plan.model import Argument, Launch, Plan
from attngen.plan.schedule import Schedule
from attngen.plan.served import ANY
from attngen.schema.kernel_spec import KernelSpec

#: A work item is some rows of a head, which a block of threads holds in registers.
GRID = "row_tiles"

#: The most warps of a block; a call chooses how many. Each thread has 128 registers, half of them for its numbers.
#: Not measured: all threads that a multiprocessor has with so many registers.
_WARPS = 16

#: The least device that rounds to 8 bits. PTX ISA, "cvt": .e4m3x2 needs sm_89.
_LEAST_CAPABILITY = 89

#: Tensors by address: of the kernel's dtype, of 8 bits, of float32, of other numbers.
_ELEMENTS = ("q", "k", "v")
_ROUNDED = ("q_out", "k_out", "v_out")
_SCALES = ("q_descale", "k_descale", "v_descale", "signs")
_UNTYPED = ("rotary_cos", "rotary_sin")

#: Numbers of a call. Those of v differ from those of q and k where its head_dim does.
_SIZES = (
    "batch", "seqlen_q", "seqlen_k", "units", "units_q", "units_k", "rows_qk", "rows_v", "far_row_qk", "far_row_v",
    "vectors_qk", "vectors_v", "slot_bits", "lane_bits_qk", "lane_bits_v", "scales_qk", "scales_v", "rounds",
    "hadamard", "positions", "rotary_half", "rotary_form", "rotary_step", "interleaved", "whole_vectors", "e5m2_out",
)  # fmt: skip

#: Numbers by which the kernel divides.
_DIVISORS = ("heads", "kv_heads", "group", "tiles_q", "tiles_k", "tiles_v", "lanes_qk", "lanes_v")


def planned(spec: KernelSpec, arch: Arch) -> Plan:
    """Common part of the plans of quantization kernels: everything but the launch."""
    name = naming.operation_name(QUANTIZE, spec.arch, spec.dtype)
    return rows_plan(spec, name, QUANTIZE, tile_m=32 * _WARPS, tile_n=1, warps=_WARPS)


def _plan(spec: KernelSpec, arch: Arch) -> Plan:
    plan = planned(spec, arch)
    row = Launch(
        QUANTIZE, plan.name, GRID, plan.tile_m, 1, 1, _WARPS, arguments=tuple(_arguments(plan)),
        max_spills=SPILLS.bytes, products=0, pdl=arch.pdl,
    )  # fmt: skip
    return plan.with_launches(row)


def mean_of_keys(plan: Plan) -> Argument:
    """The vector of each KV head that is subtracted from its keys, or a null pointer."""
    return Argument("k_mean_ptr", "pointer", f"*{plan.operands.k.triton}", of="k_mean", divisibility=CHUNK_BYTES)


def _arguments(plan: Plan) -> Iterator[Argument]:
    for name in _ELEMENTS:
        yield Argument(f"{name}_ptr", "pointer", f"*{plan.operands.of(name).triton}", of=name, divisibility=CHUNK_BYTES)
    for name in _ROUNDED:
        yield Argument(f"{name}_ptr", "pointer", "*u8", of=name, divisibility=CHUNK_BYTES)
    for name in _SCALES:
        yield Argument(f"{name}_ptr", "pointer", "*fp32", of=name, divisibility=4)
    yield mean_of_keys(plan)
    yield Argument("maxima_ptr", "pointer", "*u32", of="maxima", divisibility=4)
    for name in _UNTYPED:
        yield Argument(f"{name}_ptr", "pointer", "*void", of=name)
    yield Argument("rotary_offsets_ptr", "pointer", "*i32", of="rotary_offsets", divisibility=4)
    for name in (*_ELEMENTS, *_ROUNDED):
        for axis in ("b", "s", "h"):
            yield Argument(f"stride_{name}_{axis}", "stride", "i64", of=name, axis=axis)
    for name in _UNTYPED:
        yield Argument(f"stride_{name}", "stride", "i64", of=name, axis="s")
    for word in range(4):
        yield arguments.size(f"sign_bits_{word}", form="i64")
    yield from map(arguments.size, (*_SIZES, *_DIVISORS))
    yield from arguments.reciprocals(*_DIVISORS)
    yield arguments.size("norm", form="fp32")


SCHEDULE = Schedule(
    name="quantize",
    backend="cuda",
    direction=QUANTIZE,
    template="cuda/quantize/kernel.cu.j2",
    view="attngen.families.quantize.view:quantize_view",
    supports=lambda arch: arch.capability >= _LEAST_CAPABILITY,
    plan=_plan,
    suits=lambda spec: spec.loads != "descriptor",
    layouts=("dense",),
    serves=dict.fromkeys(("dtype", "loads"), ANY),
)
