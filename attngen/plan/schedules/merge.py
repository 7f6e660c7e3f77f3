"""The kernel that merges results over two parts of the keys, in the place of the first.

Memory binds: each output is read once, and one is written. Sizes are arguments: one kernel of a dtype serves all calls.
"""

from __future__ import annotations

from attngen.arch import Arch
from attngen.dtypes import CHUNK_BYTES
from attngen.formats import MERGE
from attngen.plan import arguments, naming
from attngen.plan.allowances import SPILLS
from attngen.plan.model import Argument, Launch, Plan
from attngen.plan.schedule import Schedule
from attngen.plan.schedules.rows import rows_plan
from attngen.schema.expand import KernelSpec

#: A warp has a row of a head.
GRID = "rows"

_WARPS = 8

#: What a launch overwrites.
WRITTEN = ("out", "lse")


def _plan(spec: KernelSpec, arch: Arch) -> Plan:
    name = naming.merge_name(arch=spec.arch, dtype=spec.dtype)
    planned = rows_plan(spec, name, MERGE, tile_m=_WARPS, tile_n=1, warps=_WARPS)
    element = f"*{planned.operands.q.triton}"
    row = Launch(
        MERGE, name, GRID, _WARPS, 1, 1, _WARPS, max_spills=SPILLS.bytes, products=0, pdl=arch.pdl,
        arguments=(
            Argument("out_ptr", "pointer", element, of="out", divisibility=CHUNK_BYTES),
            Argument("lse_ptr", "pointer", "*fp32", of="lse", divisibility=4),
            Argument("more_ptr", "pointer", element, of="more", divisibility=CHUNK_BYTES),
            Argument("more_lse_ptr", "pointer", "*fp32", of="more_lse", divisibility=4),
            Argument("sinks_ptr", "pointer", "*fp32", of="sinks", divisibility=4),
            *map(arguments.size, ("rows", "heads", "vectors")),
        ),
    )  # fmt: skip
    return planned.with_launches(row)


SCHEDULE = Schedule(
    name="merge",
    backend="cuda",
    direction=MERGE,
    template="cuda/merge/kernel.cu.j2",
    view="attngen.render.views.helpers:merge_view",
    supports=lambda arch: True,
    plan=_plan,
    layouts=("dense",),
)
