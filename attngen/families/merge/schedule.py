"""The kernel that merges results of one query over two sets of keys.

Memory and launches bind: a thread has 16 bytes of a row of the output, and finds the weights of both parts by itself.
It is plain CUDA, for any architecture, and sizes and strides are arguments: one kernel of a dtype serves all head dims.
"""

from __future__ import annotations

from collections.abc import Iterator

from attngen.arch import Arch
from attngen.dtypes import CHUNK_BYTES
from attngen.operations import MERGE
from attngen.parts.rows import rows_plan
from attngen.plan import arguments, naming
from attngen.plan.allowances import SPILLS
from attngen.plan.model import Argument, Launch, Plan
from attngen.plan.schedule import Schedule
from attngen.plan.served import ANY
from attngen.schema.kernel_spec import KernelSpec

#: A block has vectors of 16 bytes, one per thread.
GRID = "vectors"

#: Warps of a block. Not measured: eight such blocks are all threads of a multiprocessor.
_WARPS = 8

#: Tensors of both parts.
OUTS, LSES = ("out_0", "out_1"), ("lse_0", "lse_1")

#: Axes of rows: batch, then seqlen and heads in the order of the outputs.
AXES = ("outer", "middle", "inner")

#: Numbers by which the kernel divides: vectors of a row, and extents of axes.
_DIVISORS = ("vectors", "inner", "middle")


def _plan(spec: KernelSpec, arch: Arch) -> Plan:
    name = naming.operation_name(MERGE, spec.arch, spec.dtype)
    threads = 32 * _WARPS
    planned = rows_plan(spec, name, MERGE, tile_m=threads, tile_n=1, warps=_WARPS)
    row = Launch(
        MERGE, name, GRID, threads, 1, 1, _WARPS, arguments=tuple(_arguments(planned)), max_spills=SPILLS.bytes,
        products=0, pdl=arch.pdl,
    )  # fmt: skip
    return planned.with_launches(row)


def _arguments(plan: Plan) -> Iterator[Argument]:
    for name in (*OUTS, "out"):
        yield Argument(f"{name}_ptr", "pointer", f"*{plan.operands.q.triton}", of=name, divisibility=CHUNK_BYTES)
    for name in (*LSES, "lse"):
        yield arguments.row_pointer(name)
    for name in (*OUTS, *LSES, "lse"):
        for axis in AXES:
            yield Argument(f"stride_{name}_{axis}", "stride", "i32", of=name, axis=axis)
    yield from map(arguments.size, ("count", *_DIVISORS))
    yield from arguments.reciprocals(*_DIVISORS)


SCHEDULE = Schedule(
    name="merge",
    backend="cuda",
    direction=MERGE,
    template="cuda/merge/kernel.cu.j2",
    view="attngen.families.merge.view:merge_view",
    supports=lambda arch: True,
    plan=_plan,
    layouts=("dense",),
    serves={"dtype": ANY},
)
