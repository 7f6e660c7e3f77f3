"""The Hopper forward of multi-head latent attention: values are the first 512 columns of keys, which are loaded once.

Two consumers hold half of the columns of O each, compute S of every other tile, and exchange P through shared memory.
Blocks share the keys of sequences, as in ``hopper_decode``, whether few queries come or whole prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from attngen.arch import Arch
from attngen.dtypes import (
    BESIDE_LATENT_ROWS,
    CACHE_DTYPES,
    KEY_VALUE_DIMS,
    KEY_VALUE_DTYPES,
    LATENT_ROWS,
    MERGED_ROWS,
    PAGE_BLOCK,
    row_of_keys,
)
from attngen.errors import PlanError
from attngen.families.decode.schedule import HopperDecode
from attngen.families.latent.pipes import CONSUMERS, KEYS, ROWS, TILES, mla_pipes
from attngen.manifest import GRID, MERGED, Argument, Workspace
from attngen.parts.boxes import BOX_BYTES
from attngen.parts.fields import DESCRIPTORS, LAZY, SHARED_KEYS
from attngen.parts.probabilities import PROBABILITIES
from attngen.parts.promises import keep_promises
from attngen.plan import arguments, naming
from attngen.plan.allowances import MLA_SPILLS, SPILLS, Spills
from attngen.plan.choices import L2_BYTES, iteration_of, refuse
from attngen.plan.draft import drafted
from attngen.plan.layouts import LAYOUTS
from attngen.plan.model import Columns, Launch, Plan
from attngen.plan.operands import Operands, operands_of
from attngen.plan.pipes import ROW_PADDING, WARPGROUP, Pipes
from attngen.plan.schedule import Schedule
from attngen.plan.served import ANY, only
from attngen.schema.kernel_spec import KernelSpec

#: Registers of a thread of the producer, and of a consumer. Not measured one against the other.
_REGISTERS = 56, 224
#: The same where loaders convert rows from 8 bits, and hold the next ones meanwhile: of loaders, of the scorer, of the
#: follower (docs/notebook/hopper_indexed.md, "Rows of 656 bytes").
WIDENING_REGISTERS = 136, 208, 160
#: Rows of a work item up to which products are transposed: with 64, most of them would be zeros. With 17 to 32 rows,
#: transposed products are 3 % slower (docs/notebook/hopper_mla.md, "Few rows transposed, pairs without clusters,
#: merging in the launch").
_FEW_ROWS = (16,)
#: Tiles of a block up to which equal work items stay whole: of 66 pairs of blocks and 128 items that is 3 % of the
#: time, and merging costs 30 us (docs/notebook/hopper_mla.md, "Few rows transposed, pairs without clusters, merging in
#: the launch").
_WHOLE_TILES = 512
#: Most blocks that have the rows of one work item, and the same where blocks copy keys for themselves, from L2 if they
#: are neighbours (docs/notebook/hopper_mla.md, "Partial results in 16 bits, and shares copied to be merged").
_PAIR, _FOUR = 2, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class HopperMla(HopperDecode):
    """Roles and memory of a kernel whose values are the head of its keys; ``consumers`` are warpgroups."""

    merged_rows: int  # of a block of the launch that merges partial results
    raise_above: str = ""  # literal: growth of the running max, in units of log2, at which a lazy row max follows
    few_heads: tuple[int, ...] = ()  # widths, ascending, of transposed products, whose columns are the rows of an item
    alike: bool = True  # each consumer computes S of every other tile; else one of them computes S of all tiles
    merges: bool = False  # blocks merge partial results of the items that they share; else a second launch does
    either: bool = False  # the host chooses for each call which of them merges

    @property
    def lists_sequences(self) -> bool:
        """No: all sequences are in its list of work."""
        return False


def _plan(spec: KernelSpec, arch: Arch) -> Plan:
    operands = operands_of(spec)
    row = row_of_keys(operands.k.name, spec.head_dim_qk)
    if refused := refusal(spec):
        raise refused
    if row is not None and spec.loads is not None:
        raise refuse(spec, "loads", f"rows of {operands.k.name} are read by address; found {spec.loads}; leave it out")
    few = _FEW_ROWS if row is None and spec.variant.score is None else ()
    return plan_latent(
        spec,
        _pipes(spec.head_dim_qk, spec.head_dim_v, operands),
        schedule="hopper_mla",
        label="mla",
        loads="descriptor" if row is None else "pointer",
        softmax="lazy",
        raise_above=PROBABILITIES[spec.dtype].raise_above,
        arguments_of=_arguments,
        products=(2 + 2 * len(few), 5 + 16 * len(few)) if row is None else (1, 2),
        structure_of=partial(HopperMla, few_heads=few, alike=row is None, merges=True),
        cluster=1,
        row_blocks=_FOUR if row is None else _PAIR,
        whole_tiles=_WHOLE_TILES,
    )


def plan_latent(
    spec: KernelSpec,
    pipes: Pipes,
    *,
    schedule: str,
    label: str,
    loads: str,
    softmax: str,
    raise_above: str,
    arguments_of: Callable[[Plan], tuple[Argument, ...]],
    products: tuple[int, int],
    widths: tuple[int, int] | None = None,
    structure_of: Callable[..., HopperMla] | None = None,
    spills: Spills = MLA_SPILLS,
    least_tiles: int = 2,
    cluster: int = _PAIR,
    row_blocks: int = _PAIR,
    whole_tiles: int = 64,
) -> Plan:
    """Plan a kernel of latent attention, or of wide heads, and the launch that merges its partial results.

    ``products``: how many S = Q K^T of a tile the source has, and how many O += P V. ``widths``: columns of q and k,
    and of v, with padding. ``least_tiles``: fewest tiles of a block, unless it has a whole work item.
    ``row_blocks``: most blocks that have the rows of an item. ``cluster``: 1 if these are no cluster. ``whole_tiles``:
    tiles of a block up to which equal items stay whole, if few blocks are then idle.
    """
    iteration = iteration_of(replace(spec, pack_gqa=True))
    element = operands_of(spec).shared("q", "p")
    width_qk, width_v = widths or (spec.head_dim_qk, spec.head_dim_v)
    structure = (structure_of or HopperMla)(
        persistent=True,
        shared=pipes.regions,
        warp_roles=pipes.roles,
        consumers=CONSUMERS,
        loaders=WARPGROUP,
        cluster=cluster,
        box_bytes=BOX_BYTES[0],
        least_tiles=least_tiles,
        cut_tiles=2,
        key_bytes=element.bytes,
        whole_tiles=whole_tiles,
        merged_rows=MERGED_ROWS,
        raise_above="0.0f" if spec.variant.max_logits else raise_above,  # 0: as the running max, which is a result
    )
    planned = drafted(
        spec,
        label=label,
        width=f"c{CONSUMERS}",
        tile_map=False,
        alignment=16,
        choices=("pagescales",) if spec.scale_block == PAGE_BLOCK else (),
        columns_qk=(Columns(0, width_qk, spec.head_dim_qk),),
        columns_v=(Columns(0, width_v, spec.head_dim_v),),
        backend="cuda",
        schedule=schedule,
        loads=loads,
        q_operand="shared",
        tile_m=ROWS,
        tile_n=KEYS,
        stages=TILES,
        num_warps=sum(role.warps for role in pipes.roles),
        max_registers=None,
        iteration="ranges" if iteration == "ranges" else "classified",
        mask_code="branch",
        softmax=softmax,
        l2_bytes=L2_BYTES,
        structure=structure,
        pack_gqa=True,
    )
    of_s, of_o = width_qk // element.mma_k, KEYS // element.mma_k
    forward = Launch(
        "forward", planned.name, GRID, ROWS, KEYS, TILES, planned.num_warps, planned.iteration, arguments_of(planned),
        persistent=True, cluster=cluster, row_warps=row_blocks, row_blocks=row_blocks, pdl=True,
        shared_bytes=structure.shared_bytes, products=products[0] * of_s + products[1] * of_o,
        max_spills=spills.bytes, merges=structure.merges,
    )  # fmt: skip
    partials = ("split_slots", "row_warps", ROWS * (width_v + ROW_PADDING))
    if structure.merges and not structure.either:
        return planned.with_launches(forward, workspaces=(Workspace("partials", "fp32", (partials,)),))
    merge = Launch(
        "merge", naming.launch_name(planned.name, "merge"), MERGED, ROWS, KEYS, 1,
        MERGED_ROWS * width_v // 4 // 32, planned.iteration, forward.arguments, row_warps=_PAIR,
        row_blocks=_PAIR, pdl=True, max_spills=SPILLS.bytes,
    )  # fmt: skip
    workspaces = Workspace("partials", "fp32", (partials,)), Workspace("begun", "i32", (("split_blocks", 2),))
    return planned.with_launches(forward, merge, workspaces=workspaces)


def _arguments(plan: Plan) -> tuple[Argument, ...]:
    """Arguments of the kernel: those of a split-KV forward without v, and the address of keys in pages."""
    if plan.latent_row is not None:
        return arguments_of_maps(plan, "", addressed=True)
    return arguments_of_maps(plan, "k", addressed=_prefetches(plan))


def arguments_of_maps(
    plan: Plan,
    mapped: str,
    *,
    addressed: bool = False,
    rows: str = "group",
    more_reciprocals: tuple[str, ...] = (),
) -> tuple[Argument, ...]:
    """Arguments of a kernel that loads the ``mapped`` operands by tensor maps.

    ``addressed``: it has the address of k, too. ``rows``: the size that tells the rows of a query.
    ``more_reciprocals``: sizes by which it divides in addition.
    """
    ragged = plan.ragged_queries
    query_rows = () if rows == "group" else (rows,)
    return (
        arguments.pointer(plan, "q"),
        *(arguments.tensor_map(plan, name, plan.tile_n, BOX_BYTES[0]) for name in mapped),
        *((arguments.pointer(plan, "k"),) if addressed else ()),
        arguments.pointer(plan, "out"),
        *arguments.results_of_rows(plan),
        *arguments.key_scales(plan),
        Argument("partials_ptr", "pointer", "*fp32", of="partials", divisibility=16),
        *begun_arguments(plan),
        Argument("counters_ptr", "pointer", "*u32", of="split_counters", divisibility=4),
        *arguments.lengths(plan),
        *arguments.tensor_pointers(plan.variant),
        *strides_of_q_and_k(plan, keys=addressed),
        *arguments.strides_of(plan, ("out",), promised=False),
        *arguments.tensor_shapes(plan.variant),
        *map(arguments.size, ("batch", "heads", "kv_heads", "group", *query_rows, "row_bits", "row_units")),
        *map(arguments.size, ("split_tiles", "max_splits")),
        *arguments.reciprocals("batch", rows, "row_units", "split_tiles"),
        arguments.size("max_seqlen_q" if ragged else "seqlen_q", "seqlen_q"),
        arguments.size("max_seqlen_k", "seqlen_k"),
        *map(arguments.size, ("total_q", "total_k")),
        *arguments.page_sizes(plan),
        *(arguments.reciprocals("page_size") if plan.key_access == "paged" else ()),
        *(arguments.reciprocals(*more_reciprocals) if more_reciprocals else ()),
        arguments.scale(),
        *arguments.scalar_arguments(plan),
        *arguments.presence(plan, ("lse", "seqused_k")),
    )


def begun_arguments(plan: Plan) -> tuple[Argument, ...]:
    """The list of items that workers begin, if a launch merges them, and how many blocks these workers are, if warps of
    that launch search the list."""
    if isinstance(plan.structure, HopperMla) and plan.structure.merges and not plan.structure.either:
        return ()
    searched = (arguments.size("split_blocks"),) if plan.latent_row else ()
    return (Argument("begun_ptr", "pointer", "*i32", of="begun", divisibility=8), *searched)


def _prefetches(plan: Plan) -> bool:
    """Whether loaders prefetch whole rows of a page to L2, before they copy the rows box by box."""
    return plan.key_access == "paged" and plan.head_dim_qk > plan.head_dim_v


def strides_of_q_and_k(plan: Plan, *, keys: bool = True) -> Iterator[Argument]:
    """Strides of q and, if asked for, k; rows of pages with their scales at the end have no stride of their own."""
    row = plan.latent_row
    for argument in arguments.strides_of(plan, ("q", "k") if keys else ("q",)):
        if argument.of == "q" or row is None or not row.scales_after_rows or argument.axis == "page":
            yield argument


def _pipes(head_dim_qk: int, head_dim_v: int, operands: Operands) -> Pipes:
    row = row_of_keys(operands.k.name, head_dim_qk)
    registers = _REGISTERS if row is None else WIDENING_REGISTERS
    return mla_pipes(
        qk=head_dim_qk, v=head_dim_v, element=operands.q.bytes, registers=registers, latent_row=row, merges=True,
    )  # fmt: skip


def mla_pipes_of(plan: Plan) -> Pipes:
    """Return the pipes of a planned kernel."""
    return _pipes(plan.head_dim_qk, plan.head_dim_v, plan.operands)


def refusal(spec: KernelSpec) -> PlanError | None:
    """Reason why the schedule cannot serve a spec, or None."""
    if (spec.head_dim_qk, spec.head_dim_v) not in KEY_VALUE_DIMS:
        allowed = " or ".join(f"{{qk: {qk}, v: {v}}}" for qk, v in KEY_VALUE_DIMS)
        return refuse(
            spec, "head_dim", f"with 'v: key' kernels have head_dim {allowed}, not "
            f"{{qk: {spec.head_dim_qk}, v: {spec.head_dim_v}}}"
        )  # fmt: skip
    if spec.kv_dtype in CACHE_DTYPES and spec.dtype != BESIDE_LATENT_ROWS:
        return refuse(spec, "dtype", f"with 'v: key' a cache in {spec.kv_dtype} stands beside {BESIDE_LATENT_ROWS}")
    return None


#: What kernels whose values are the head of their keys serve.
LATENT = SHARED_KEYS | LAZY | {
    "dtype": only(*KEY_VALUE_DTYPES, why=f"with 'v: key' kernels take {' and '.join(KEY_VALUE_DTYPES)}"),
    "kv_dtype": only(None, *LATENT_ROWS, *CACHE_DTYPES, why="with 'v: key' kernels read no other cache"),
    "scale_block": only(0, PAGE_BLOCK, why="with 'v: key' scales are of a head or a page"),
    "sink_in_lse": ANY,
}  # fmt: skip

SCHEDULE = Schedule(
    name="hopper_mla",
    backend="cuda",
    direction="forward",
    template="cuda/latent/kernel.cu.j2",
    view="attngen.families.latent.view:mla_view",
    supports=lambda arch: arch.wgmma,
    plan=_plan,
    keep_promises=keep_promises,
    pipes=mla_pipes_of,
    layouts=tuple(LAYOUTS),
    v_of_key=True,
    split_kv=True,
    serves=LATENT | DESCRIPTORS,
)
