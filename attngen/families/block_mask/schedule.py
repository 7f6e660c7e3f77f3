"""The kernel that makes a block mask out of lists of blocks.

Memory and launches bind: a warp makes a row in shared memory, where entries come in any order, and writes it once, so
that nothing is cleared ahead of it. It is plain CUDA, for any architecture, and sizes and strides are arguments: one
kernel serves all calls.
"""

from __future__ import annotations

from collections.abc import Iterator

from attngen.arch import Arch
from attngen.operations import BLOCK_MASK
from attngen.parts.rows import rows_plan
from attngen.plan import arguments, naming
from attngen.plan.allowances import SPILLS
from attngen.plan.model import Argument, Launch, Plan
from attngen.plan.schedule import Schedule
from attngen.plan.served import ANY
from attngen.schema.kernel_spec import KernelSpec

#: A warp has a row of the mask.
GRID = "rows"

#: Warps of a block, and so its rows; bytes of a row that shared memory holds. Not measured: eight such blocks are all
#: threads of a multiprocessor, in 128 KB.
WARPS, BYTES = 8, 2**11

_SIZES = ("rows", "capacity", "key_blocks")

#: Numbers by which the kernel divides.
_DIVISORS = ("heads", "query_blocks")


def _plan(spec: KernelSpec, arch: Arch) -> Plan:
    name = naming.operation_name(BLOCK_MASK, spec.arch)
    planned = rows_plan(spec, name, BLOCK_MASK, tile_m=WARPS, tile_n=BYTES, warps=WARPS)
    row = Launch(
        BLOCK_MASK, name, GRID, WARPS, BYTES, 1, WARPS, arguments=tuple(_arguments()), max_spills=SPILLS.bytes,
        products=0, pdl=arch.pdl,
    )  # fmt: skip
    return planned.with_launches(row)


def _arguments() -> Iterator[Argument]:
    for name in ("indices", "counts"):
        yield Argument(f"{name}_ptr", "pointer", "*i32", of=name, divisibility=4)
    yield Argument("out_ptr", "pointer", "*u8", of="out")
    for axis in ("b", "h", "q", "entry"):
        yield Argument(f"stride_indices_{axis}", "stride", "i32", of="indices", axis=axis)
    for axis in ("b", "h", "q"):
        yield Argument(f"stride_counts_{axis}", "stride", "i32", of="counts", axis=axis)
    yield from map(arguments.size, (*_SIZES, *_DIVISORS))
    yield from arguments.reciprocals(*_DIVISORS)


SCHEDULE = Schedule(
    name="block_mask",
    backend="cuda",
    direction=BLOCK_MASK,
    template="cuda/block_mask/kernel.cu.j2",
    view="attngen.families.block_mask.view:block_mask_view",
    supports=lambda arch: True,
    plan=_plan,
    layouts=("dense",),
    serves={"dtype": ANY},
)
