"""The kernel that selects the largest scores of short rows, such as those of blocks of keys: a warp has a row.

A warp holds the row in registers, and finds the k-th largest score by its bits, from the highest on: the next bit is
set if at least k scores are as large as it says then. Nothing goes through shared memory, and no warp waits for others.
It comes beside the kernel for rows of any length, with kernels that score blocks.
"""

from __future__ import annotations

from attngen.arch import Arch
from attngen.families.topk.schedule import ARGUMENTS, LEAST_CAPABILITY
from attngen.operations import TOPK
from attngen.parts.rows import rows_plan
from attngen.plan import arguments, naming
from attngen.plan.allowances import SPILLS
from attngen.plan.model import Launch, Plan
from attngen.plan.schedule import Schedule
from attngen.plan.served import ANY
from attngen.schema.helper_kernels import SHORT_ROWS
from attngen.schema.kernel_spec import KernelSpec

#: A warp has one row; ``tile_n`` of a launch is the most scores of a row.
GRID = "warp_rows"

#: Warps of a block. Not measured.
WARPS = 8

#: Scores that a lane holds, by launch; a score is compared 32 times at most. Not measured.
VALUES = {"topk_short": 8, "wide": 32, "widest": 64}

#: Scores of a row, at most: what asks for this kernel in place of the one for rows of any length.
COLUMNS = SHORT_ROWS
assert 32 * max(VALUES.values()) == COLUMNS


def _plan(spec: KernelSpec, arch: Arch) -> Plan:
    main = next(iter(VALUES))
    planned = rows_plan(
        spec,
        naming.operation_name(TOPK, spec.arch, "short"),
        main,
        tile_m=COLUMNS,
        tile_n=32 * VALUES[main],
        warps=WARPS,
    )

    def launch(name: str, values: int) -> Launch:
        symbol = planned.name if name == main else naming.launch_name(planned.name, name)
        return Launch(
            name, symbol, GRID, 32 * values, 32 * values, 1, WARPS, arguments=_ARGUMENTS,
            max_spills=SPILLS.bytes, products=0, shared_bytes=0, pdl=arch.pdl,
        )  # fmt: skip

    return planned.with_launches(*(launch(*each) for each in VALUES.items()))


_ARGUMENTS = (*ARGUMENTS, arguments.size("rows"))

SCHEDULE = Schedule(
    name="topk_short",
    backend="cuda",
    direction=TOPK,
    template="cuda/topk/warps/kernel.cu.j2",
    view="attngen.families.topk.view:warps_view",
    supports=lambda arch: arch.capability >= LEAST_CAPABILITY,
    plan=_plan,
    suits=lambda spec: spec.tile_n == COLUMNS,
    layouts=("dense",),
    serves=dict.fromkeys(("dtype", "tile_n"), ANY),
)
