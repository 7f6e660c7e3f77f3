"""The kernel that selects the largest scores of each row, exactly, with ties to the lower index.

It reads a row once. A block has a row and keeps candidates in shared memory: scores above a threshold, which is a lower
bound of the k-th largest. Whenever the candidates might overflow, a radix select cuts them to the k largest, whose
least is the next threshold. So memory binds unless scores ascend along the row. It writes the places of scores in their
row, or the slots of a cache where a page table has these places.
"""

from __future__ import annotations

from attngen.arch import Arch
from attngen.operations import TOPK
from attngen.parts.rows import rows_plan
from attngen.plan import arguments, naming
from attngen.plan.allowances import SPILLS
from attngen.plan.model import Argument, Launch, Plan
from attngen.plan.schedule import Schedule
from attngen.plan.served import ANY
from attngen.schema.kernel_spec import KernelSpec

#: A block has one row of scores; ``tile_m`` of a launch is the most scores that it selects.
GRID = "rows"

#: Warps of a block; vectors of four scores that a thread loads at once; bins of a histogram
#: (docs/notebook/index_scores.md, "Index scores and selection").
WARPS, VECTORS, BINS = 16, 2, 2048

#: Scores that a block loads at once.
CHUNK = 32 * WARPS * VECTORS * 4

#: The launch of selections larger than the main one takes.
LARGE = "large"

#: Candidates of each launch, of 8 bytes. A selection leaves room for a chunk and a quarter. Three blocks of the main
#: launch fit a multiprocessor, and one of the large one.
CAPACITY = {TOPK: 2 * CHUNK, LARGE: 6 * CHUNK}
BLOCKS = {TOPK: 3, LARGE: 1}

#: Shared memory beside candidates: the histogram, sums of warps twice, and counters.
_COUNTERS = 8
SHARED = 4 * (BINS + 2 * WARPS + _COUNTERS)

#: PTX ISA, "redux.sync" needs sm_80.
LEAST_CAPABILITY = 80


def largest_k(launch: str) -> int:
    """The most scores that a launch selects."""
    return CAPACITY[launch] - CHUNK - CHUNK // 4


def _plan(spec: KernelSpec, arch: Arch) -> Plan:
    planned = rows_plan(
        spec, naming.operation_name(TOPK, spec.arch), TOPK, tile_m=largest_k(TOPK), tile_n=CHUNK, warps=WARPS
    )

    def launch(name: str) -> Launch:
        symbol = planned.name if name == TOPK else naming.launch_name(planned.name, name)
        return Launch(
            name, symbol, GRID, largest_k(name), CHUNK, 1, WARPS, arguments=ARGUMENTS, max_spills=SPILLS.bytes,
            products=0, shared_bytes=SHARED + 8 * CAPACITY[name], pdl=arch.pdl,
        )  # fmt: skip

    fitting = [name for name in (TOPK, LARGE) if SHARED + 8 * CAPACITY[name] <= arch.shared_memory]
    return planned.with_launches(*map(launch, fitting))


ARGUMENTS = (
    Argument("scores_ptr", "pointer", "*fp32", of="scores", divisibility=4),
    Argument("lengths_ptr", "pointer", "*i32", of="lengths", divisibility=4),
    Argument("page_table_ptr", "pointer", "*i32", of="page_table", divisibility=4),
    Argument("cu_seqlens_q_ptr", "pointer", "*i32", of="cu_seqlens_q", divisibility=4),
    Argument("out_ptr", "pointer", "*i32", of="out", divisibility=4),
    Argument("stride_scores", "stride", "i64", of="scores", axis="row"),
    Argument("page_table_stride", "stride", "i64", of="page_table", axis="b"),
    Argument("stride_out", "stride", "i64", of="out", axis="row"),
    *map(arguments.size, ("columns", "k", "batch", "queries", "page_size", "page_size_reciprocal")),
)

SCHEDULE = Schedule(
    name="topk",
    backend="cuda",
    direction=TOPK,
    template="cuda/topk/kernel.cu.j2",
    view="attngen.families.topk.view:topk_view",
    supports=lambda arch: arch.capability >= LEAST_CAPABILITY,
    plan=_plan,
    suits=lambda spec: spec.tile_n is None,
    layouts=("dense",),
    serves={"dtype": ANY},
)
