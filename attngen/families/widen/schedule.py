"""The kernel that widens a cache in 8 bits: used keys and values become dense ones in 16 bits, times their scales.

Memory binds. Head dims, strides and page sizes are arguments: one kernel of a dtype serves all calls.
"""

from __future__ import annotations

from collections.abc import Iterator

from attngen.arch import Arch
from attngen.dtypes import CHUNK_BYTES
from attngen.operations import WIDEN
from attngen.parts.rows import rows_plan
from attngen.plan import arguments, naming
from attngen.plan.allowances import SPILLS
from attngen.plan.model import Argument, Launch, Plan
from attngen.plan.schedule import Schedule
from attngen.plan.served import ANY
from attngen.schema.kernel_spec import KernelSpec

#: A block widens K or V of some tokens of a sequence.
GRID = "tokens"

#: Warps of a block, and its tokens. Not measured: eight such blocks are all threads of a multiprocessor.
_WARPS, _TOKENS = 8, 32

#: The least device that reads numbers of 8 bits. PTX ISA, "cvt": .f16x2.e4m3x2 needs sm_89.
_LEAST_CAPABILITY = 89

#: Tensors by address: of 8 bits, of the kernel's dtype, of float32, of 32-bit integers.
CACHES = ("k_cache", "v_cache")
WRITTEN = ("k", "v")
_SCALES = ("k_descale", "v_descale")
_INDICES = ("seqused_k", "page_table")

#: Numbers of a call, and those by which the kernel divides.
_SIZES = ("batch", "seqlen_k", "head_dim_qk", "head_dim_v", "tiles", "scales_of_pages")
_DIVISORS = ("kv_heads", "vectors_k", "vectors_v", "page_size")


def _plan(spec: KernelSpec, arch: Arch) -> Plan:
    name = naming.operation_name(WIDEN, spec.arch, spec.dtype)
    planned = rows_plan(spec, name, WIDEN, tile_m=1, tile_n=_TOKENS, warps=_WARPS)
    row = Launch(
        WIDEN, name, GRID, 1, _TOKENS, 1, _WARPS, arguments=tuple(_arguments(planned)), max_spills=SPILLS.bytes,
        products=0, pdl=arch.pdl,
    )  # fmt: skip
    return planned.with_launches(row)


def _arguments(plan: Plan) -> Iterator[Argument]:
    for name in CACHES:
        yield Argument(f"{name}_ptr", "pointer", "*u8", of=name, divisibility=CHUNK_BYTES // 2)
    for name in WRITTEN:
        yield Argument(f"{name}_ptr", "pointer", f"*{plan.operands.q.triton}", of=name, divisibility=CHUNK_BYTES)
    for name in _SCALES:
        yield Argument(f"{name}_ptr", "pointer", "*fp32", of=name, divisibility=4)
    for name in _INDICES:
        yield Argument(f"{name}_ptr", "pointer", "*i32", of=name, divisibility=4)
    for name in CACHES:
        for axis in ("page", "s", "h"):
            yield Argument(f"stride_{name}_{axis}", "stride", "i64", of=name, axis=axis)
    for name in _SCALES:
        for axis in ("b", "h", "s"):
            yield Argument(f"stride_{name}_{axis}", "stride", "i64", of=name, axis=axis)
    yield Argument("page_table_stride", "stride", "i64", of="page_table", axis="b")
    yield from map(arguments.size, (*_SIZES, *_DIVISORS))
    yield from arguments.reciprocals(*_DIVISORS)


SCHEDULE = Schedule(
    name="widen",
    backend="cuda",
    direction=WIDEN,
    template="cuda/widen/kernel.cu.j2",
    view="attngen.families.widen.view:widen_view",
    supports=lambda arch: arch.capability >= _LEAST_CAPABILITY,
    plan=_plan,
    layouts=("dense",),
    serves=dict.fromkeys(("dtype", "kv_dtype"), ANY),
)
