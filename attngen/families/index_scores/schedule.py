"""The Hopper kernel that scores keys for an index: sums over heads of w relu(q k), in float32.

Keys are the rows of the products and (query, head) pairs their columns, so that a thread's accumulators hold all heads
of a query: the sum over heads stays in registers, but for two exchanges within four lanes. Queries and their weights
stay in place while keys stream past. With operands of 8 bits the tensor cores are the bottleneck: a product takes twice
as long as its relu and its sum.

Launches differ in the number of heads, which is a maximum, and in whether there are many or few queries. Those for few
queries have small tiles, so that several blocks on a multiprocessor read keys at the bandwidth of memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from attngen.arch import Arch
from attngen.dtypes import CHUNK_BYTES, SCALAR_TYPES, SWIZZLE_BYTES, dtype
from attngen.errors import PlanError
from attngen.lang.ir import names
from attngen.operations import INDEX_SCORES
from attngen.parts.fields import CLASSIFIED, DESCRIPTORS, MASKS
from attngen.plan import arguments, naming
from attngen.plan.allowances import SPILLS
from attngen.plan.choices import refuse
from attngen.plan.draft import named
from attngen.plan.layouts import LAYOUTS
from attngen.plan.model import Argument, Columns, Launch, Plan
from attngen.plan.schedule import Schedule
from attngen.plan.served import ANY, only
from attngen.plan.symbols import argument_name, divisor_name, extent_name, strides
from attngen.schema.kernel_spec import KernelSpec

#: A block has some queries of a sequence and a chunk of its keys.
GRID = "query_chunks"

#: Keys of a tile; columns of a product with many queries, and its warpgroups
#: (docs/notebook/index_scores.md, "Index scores and selection").
KEYS, COLUMNS, GROUPS = 64, 256, 2

#: Most tiles of keys in flight. Blocks with few queries have neighbours, whose tiles are in flight, too
#: (docs/notebook/index_scores.md, "Index scores and selection").
_STAGES, _FEW_STAGES = 8, 4

DTYPES = ("bf16", "fp16", "fp8_e4m3")
HEAD_DIMS = (64, 128)

#: Names that a mask may not read: all heads share it, and there is no softmax.
_WITHOUT_MEANING = ("h", "hk", "kv_heads", "softmax_scale")


@dataclass(frozen=True, slots=True)
class Reduction:
    """The reduction of products of queries and keys: their sums over heads, or their maxima over blocks of keys."""

    direction: str  # and the name of the schedule
    does: str
    heads: tuple[int, ...]  # of the launches, ascending
    few_columns: int  # of a product with few queries, at least
    few_blocks: int  # with so many columns, that a multiprocessor runs at once
    pointers: tuple[str, ...]  # tensors that are read and written by their addresses
    out: str  # axes of the scores, by which they have strides
    sizes: tuple[str, ...] = ()  # numbers of a call beside those of all
    column_bytes: int = 0  # of shared memory, for each column of a block

    @property
    def main_heads(self) -> int:
        """Heads of the launch that stands for all."""
        return self.heads[len(self.heads) // 2]


#: Sums over the heads of w relu(q k) (docs/notebook/index_scores.md, "Index scores and selection").
SUMS = Reduction(
    INDEX_SCORES,
    "sums over heads of w relu(q k), in float32",
    (32, 64, 128),
    64,
    4,
    ("weights", "k_scale", "out"),
    "bs",
)


@dataclass(frozen=True, slots=True)
class IndexTile:
    """The tile of a launch: heads and queries of a product, warpgroups, stages; and its bytes of shared memory."""

    heads: int
    queries: int  # of a warpgroup
    groups: int
    stages: int
    row_bytes: int
    reduction: Reduction

    @property
    def columns(self) -> int:
        """Columns of a product."""
        return self.heads * self.queries

    @property
    def shared_bytes(self) -> int:
        """Queries of all warpgroups, tiles of keys, and barriers: one for queries, two for each stage; and what warps
        exchange."""
        columns = self.groups * self.columns
        rows = columns + self.stages * KEYS
        return rows * self.row_bytes + 8 * (1 + 2 * self.stages) + columns * self.reduction.column_bytes

    @property
    def blocks(self) -> int:
        """Blocks that a multiprocessor runs at once."""
        return 1 if self.groups > 1 else self.reduction.few_blocks if self.columns == self.reduction.few_columns else 3

    @property
    def warps(self) -> int:
        """Warps of a block; with many queries the loader is a warpgroup, whose registers the others take."""
        return 4 * self.groups + (4 if self.groups > 1 else 1)


def tiles_of(reduction: Reduction, head_dim: int, element_bytes: int, shared_memory: int) -> dict[str, IndexTile]:
    """The tiles of a kernel by the names of their launches."""
    row = head_dim * element_bytes
    tiles = {}
    for heads in reduction.heads:
        of_columns = GROUPS * COLUMNS * (row + reduction.column_bytes)
        stages = min(_STAGES, (shared_memory - of_columns - 256) // (KEYS * row))
        few = max(reduction.few_columns // heads, 1)
        tiles[f"heads_{heads}"] = IndexTile(heads, COLUMNS // heads, GROUPS, stages, row, reduction)
        tiles[f"heads_{heads}_few"] = IndexTile(heads, few, 1, _FEW_STAGES, row, reduction)
    return tiles


def plan_scores(reduction: Reduction, spec: KernelSpec, arch: Arch) -> Plan:
    """Plan of a kernel with one of the reductions. Raises PlanError for a spec that it cannot serve."""
    if refused := _refusal(spec):
        raise refused
    element = dtype(spec.dtype)
    tiles = tiles_of(reduction, spec.head_dim_qk, element.bytes, arch.shared_memory)
    main = f"heads_{reduction.main_heads}"
    layout = [] if spec.layout == "dense" else [spec.layout]
    planned = named(
        spec,
        naming.operation_name(
            reduction.direction, spec.arch, spec.dtype, f"d{spec.head_dim_qk}", spec.variant.name, *layout
        ),
        alignment=CHUNK_BYTES,
        columns_qk=(Columns(0, spec.head_dim_qk, spec.head_dim_qk),),
        columns_v=(Columns(0, spec.head_dim_v, spec.head_dim_v),),
        backend="cuda",
        schedule=reduction.direction,
        loads="descriptor",
        q_operand="shared",
        tile_m=tiles[main].queries * tiles[main].groups,
        tile_n=KEYS,
        stages=tiles[main].stages,
        num_warps=tiles[main].warps,
        max_registers=None,
        iteration="classified",
        mask_code="branch",
        softmax="exact_max",
        l2_bytes=2**20,
        main=main,
    )
    products = spec.head_dim_qk // element.mma_k

    def launch(name: str, tile: IndexTile) -> Launch:
        return Launch(
            name, naming.launch_name(planned.name, name), GRID, tile.queries * tile.groups, KEYS, tile.stages,
            tile.warps, arguments=tuple(_arguments(planned, tile)), max_spills=SPILLS.bytes, products=products,
            shared_bytes=tile.shared_bytes, pdl=arch.pdl,
        )  # fmt: skip

    return planned.with_launches(*(launch(name, tile) for name, tile in tiles.items()))


def _arguments(plan: Plan, tile: IndexTile) -> Iterator[Argument]:
    paged, variant = plan.key_access == "paged", plan.variant
    swizzle = min(tile.row_bytes, SWIZZLE_BYTES)
    columns = swizzle // plan.operands.q.bytes
    yield Argument(
        "q_map", "descriptor", "tensor_map", of="q", box=(1, tile.queries, tile.heads, columns), swizzle=swizzle
    )
    yield Argument("k_map", "descriptor", "tensor_map", of="k", box=(1, KEYS, columns), swizzle=swizzle)
    reduction = tile.reduction
    for name in reduction.pointers:
        yield Argument(f"{name}_ptr", "pointer", "*fp32", of=name, divisibility=4)
    yield from arguments.lengths(plan)
    yield from arguments.tensor_pointers(variant)
    strided = {"weights": "bsh", "k_scale": ("page" if paged else "b", "s"), "out": reduction.out}
    for name in reduction.pointers:
        for axis in strided[name]:
            yield Argument(f"stride_{name}_{axis}", "stride", "i64", of=name, axis=axis)
    if paged:
        yield Argument("page_table_stride", "stride", "i64", of="page_table", axis="b")
    for tensor in variant.tensors:
        for place, name in enumerate(strides(tensor)[:-1]):
            yield Argument(name, "stride", "i64", of=f"tensor:{tensor.name}", axis=place)
        for place in range(len(tensor.shape)):
            yield Argument(extent_name(tensor, place), "size", "i32", of=f"extent:{tensor.name}:{place}")
    of_queries, of_chunks = ("max_seqlen_q", "least_tiles") if paged else ("seqlen_q", "chunk")
    yield from map(arguments.size, ("heads", of_queries, "max_seqlen_k", "total_q", "total_k", of_chunks))
    yield from map(arguments.size, ("chunks", "query_tiles", *reduction.sizes))
    if paged:
        yield from map(arguments.size, ("page_size", "num_pages", "box_rows", "page_size_reciprocal"))
        yield from map(arguments.size, ("batch", "hides_rest"))
    for scalar in variant.arguments:
        form = SCALAR_TYPES[scalar.dtype].triton
        yield Argument(argument_name(scalar.name), "size", form, of=f"scalar:{scalar.name}")
    for divisor in plan.divisors:
        for part in ("value", "reciprocal"):
            yield Argument(f"{divisor_name(divisor)}_{part}", "size", "i32", of=f"divisor:{divisor.text}:{part}")


def _refusal(spec: KernelSpec) -> PlanError | None:
    """Reason why the schedule cannot serve a spec, or None."""
    variant = spec.variant
    if spec.head_dim_qk != spec.head_dim_v or spec.head_dim_qk not in HEAD_DIMS:
        return refuse(spec, "head_dim", f"index scores take {' or '.join(map(str, HEAD_DIMS))}, and have no values")
    if used := sorted(names(variant.mask) & set(_WITHOUT_MEANING)):
        return refuse(
            spec, "variant", f"all heads share index scores, but the mask of '{variant.name}' reads {used[0]}"
        )
    return None


def schedule_of(reduction: Reduction) -> Schedule:
    """The schedule of a reduction."""
    return Schedule(
        name=reduction.direction,
        backend="cuda",
        direction=reduction.direction,
        template="cuda/index_scores/kernel.cu.j2",
        view="attngen.families.index_scores.view:index_scores_view",
        supports=lambda arch: arch.wgmma,
        plan=partial(plan_scores, reduction),
        layouts=tuple(layout for layout in LAYOUTS if layout != "varlen"),
        serves={
            "dtype": only(*DTYPES, why=f"index scores take {', '.join(DTYPES)}"),
            **MASKS, **DESCRIPTORS, **CLASSIFIED,
            "deterministic": ANY,
            **dict.fromkeys(("score", "sink"), only(None, why="index scores take a mask alone")),
            "dropout": only(False, why="index scores take a mask alone"),
        },
    )  # fmt: skip


SCHEDULE = schedule_of(SUMS)
