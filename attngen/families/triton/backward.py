"""The plan of a backward in Triton: a kernel by tiles of keys for dK and dV, one by tiles of queries for dQ.

Both recompute the logits. Each accumulates in registers what it writes, so that nothing is added atomically but the
gradients of a variant's own tensors, and dQ, dK and dV are the same on every run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from attngen.arch import Arch
from attngen.families.triton.rules import LABELS, TRITON, alignment_of, loads_of
from attngen.families.triton.tiles import Tile, completed, depth_sizes, family, gradient_columns, widest_block
from attngen.lang.constant_conditions import reads_products
from attngen.lang.ir import names
from attngen.lang.variant import Variant
from attngen.parts.backward_launches import statistics_arguments
from attngen.parts.columns import padded_width
from attngen.plan import arguments, budget, naming
from attngen.plan.allowances import SPILLS, SPLIT_SPILLS, WIDE_BACKWARD_SPILLS, Spills, may_wait
from attngen.plan.choices import (
    L2_BYTES,
    STAGES,
    WARPS,
    check_no_roles,
    check_sizes,
    is_beyond_256,
    iteration_of,
    refuse,
)
from attngen.plan.draft import axes_of, drafted, row_workspaces
from attngen.plan.model import Argument, Columns, Launch, Plan
from attngen.plan.operands import Operands, kept_bytes, operands_of
from attngen.plan.own_gradients import differentiable, differentiable_of
from attngen.plan.schedule import Schedule, plans_of
from attngen.plan.served import ANY
from attngen.plan.symbols import gradient_pointer
from attngen.plan.traits import gathers, is_light
from attngen.schema.kernel_spec import Backward, Gradient, KernelSpec

#: The same for the two kernels of a backward: (family, largest head_dim) → tile of "dkdv", tile of "dq"
#: (docs/notebook/triton_backward.md, "Tiles"; those of "plain" alone were measured).
_GRADIENTS: tuple[tuple[str, int, Tile, Tile], ...] = (
    # plain masks of dense sequences at the head dims themselves: benchmarked (docs/performance.md); the others avoid
    # spills
    ("plain", 64, Tile(128, 64, 2, 4), Tile(64, 64, 2, 4)),
    ("plain", 128, Tile(64, 64, 2, 4), Tile(128, 64, 3, 8)),
    ("wgmma", 64, Tile(64, 128, 3, 8), Tile(128, 64, 3, 8)),
    ("wgmma", 128, Tile(64, 128, 2, 8), Tile(128, 64, 2, 8)),
    ("wgmma", 256, Tile(32, 32, 2, 4), Tile(64, 32, 2, 4)),
    # a score or packed sequences leave fewer registers to the products
    ("scored", 64, Tile(64, 128, 3, 8), Tile(128, 64, 3, 8)),
    ("scored", 128, Tile(32, 128, 2, 8), Tile(128, 64, 2, 8)),
    ("scored", 192, Tile(32, 32, 2, 4), Tile(64, 32, 2, 4)),
    ("scored", 256, Tile(16, 32, 2, 4), Tile(64, 16, 2, 4)),
    # tiles that are listed, and not ranges, are visited in nested loops, which leaves fewer still
    ("listed", 64, Tile(64, 128, 2, 8), Tile(128, 64, 3, 8)),
    ("listed", 128, Tile(16, 128, 2, 8), Tile(128, 64, 2, 8)),
    ("listed", 192, Tile(16, 32, 2, 4), Tile(64, 32, 2, 4)),
    ("listed", 256, Tile(16, 32, 2, 4), Tile(64, 16, 2, 4)),
    # chosen such that ptxas neither spills nor makes products wait for each other
    ("dropped", 64, Tile(64, 32, 2, 4), Tile(64, 64, 2, 4)),
    ("dropped", 96, Tile(16, 32, 2, 4), Tile(64, 16, 2, 4)),
    ("dropped", 128, Tile(64, 32, 2, 4), Tile(128, 64, 2, 8)),
    ("dropped", 256, Tile(16, 32, 2, 4), Tile(64, 16, 2, 4)),
    ("gather", 64, Tile(32, 64, 2, 4), Tile(64, 32, 2, 4)),
    ("gather", 128, Tile(16, 64, 2, 4), Tile(64, 32, 2, 4)),
    ("gather", 256, Tile(16, 32, 2, 4), Tile(64, 16, 2, 4)),
    # both: no spills beyond 8 bytes with Triton 3.6 and 3.9
    ("gather_dropped", 64, Tile(32, 64, 2, 4), Tile(64, 32, 2, 4)),
    ("gather_dropped", 128, Tile(32, 64, 2, 8), Tile(64, 32, 2, 4)),
    ("gather_dropped", 256, Tile(32, 32, 2, 8), Tile(64, 32, 2, 8)),
    ("descriptor", 64, Tile(64, 64, 2, 4), Tile(64, 64, 2, 4)),
    ("descriptor", 128, Tile(64, 64, 2, 8), Tile(64, 64, 2, 4)),
    ("descriptor", 256, Tile(16, 32, 1, 4), Tile(64, 32, 1, 8)),
    ("pointer", 64, Tile(32, 64, 2, 4), Tile(64, 32, 2, 4)),
    ("pointer", 128, Tile(32, 64, 2, 8), Tile(64, 32, 2, 4)),
    ("pointer", 256, Tile(16, 64, 1, 8), Tile(64, 16, 1, 8)),
    ("unaligned", 64, Tile(32, 64, 2, 8), Tile(64, 32, 2, 8)),
    ("unaligned", 128, Tile(16, 64, 1, 8), Tile(64, 16, 1, 8)),
    ("unaligned", 256, Tile(16, 16, 1, 8), Tile(16, 16, 1, 8)),
    ("bf16x6", 64, Tile(64, 64, 1, 4), Tile(64, 64, 1, 4)),
    ("bf16x6", 96, Tile(32, 64, 2, 4), Tile(64, 32, 2, 4)),
    ("bf16x6", 128, Tile(32, 128, 1, 8), Tile(128, 32, 1, 8)),
    ("bf16x6", 192, Tile(32, 64, 1, 4), Tile(64, 32, 1, 4)),
    ("bf16x6", 256, Tile(16, 64, 1, 8), Tile(64, 16, 1, 8)),
    ("tf32x3", 96, Tile(16, 64, 2, 4), Tile(64, 16, 2, 4)),
    ("tf32x3", 128, Tile(16, 32, 2, 4), Tile(32, 16, 2, 4)),
    ("tf32x3", 192, Tile(16, 32, 1, 4), Tile(32, 16, 1, 4)),
    ("tf32x3", 256, Tile(16, 16, 1, 4), Tile(16, 16, 1, 4)),
    ("ieee", 64, Tile(32, 32, 1, 8), Tile(32, 32, 1, 8)),
    ("ieee", 128, Tile(16, 16, 1, 8), Tile(16, 16, 1, 8)),
    ("ieee", 256, Tile(16, 16, 1, 8), Tile(16, 16, 1, 8)),
    # three kernels, one for each gradient
    ("any", 512, Tile(32, 64, 1, 8), Tile(64, 32, 1, 8)),
)

#: The same for the two kernels of a backward: tile of "dkdv", tile of "dq". Not measured: each has fewer registers.
_SMALLER_GRADIENTS = (
    (Tile(32, 64, 2, 4), Tile(64, 32, 2, 4)),
    (Tile(64, 128, 2, 8), Tile(128, 64, 2, 8)),
    (Tile(32, 128, 2, 8), Tile(128, 32, 2, 8)),
    (Tile(16, 64, 2, 4), Tile(64, 16, 2, 4)),
    (Tile(32, 32, 1, 4), Tile(32, 32, 1, 4)),
    (Tile(16, 32, 1, 4), Tile(32, 16, 1, 4)),
    (Tile(16, 16, 1, 8), Tile(16, 16, 1, 8)),
    # 32 keys or queries to sum over: what tensors of bytes ask of Triton before 3.9 (compile/layouts.py)
    (Tile(32, 16, 1, 8), Tile(32, 32, 1, 8)),
)

#: Query rows of a block of ``preprocess``, and its warps for each byte of an element. Not measured.
_ROWS, _WARPS_PER_BYTE = 64, 2

#: Head dims of the tiles that were measured (docs/notebook/triton_backward.md, "Tiles").
_RACED = (64, 128)


@dataclass(frozen=True, slots=True)
class _Kind:
    """One of the kernels: its name, the field of the spec, the tiles that it visits, and the gradients it writes."""

    name: str
    field: str
    grid: str
    words: str
    tiles: str
    results: tuple[str, ...]

    @property
    def by_keys(self) -> bool:
        return self.grid == "keys"


_DKDV = _Kind("dkdv", "dkdv", "keys", "key_words", "kv_tiles", ("dk", "dv"))
_DQ = _Kind("dq", "dq", "queries", "query_words", "q_tiles", ("dq",))
#: Head dims beyond 256 leave registers for one of the gradients of 64 keys.
_DV, _DK = (_Kind(name, "dkdv", "keys", "key_words", "kv_tiles", (name,)) for name in ("dv", "dk"))


def _plan(spec: KernelSpec, arch: Arch) -> Plan:
    check_no_roles(spec)
    loads = loads_of(spec, arch)
    operands = operands_of(spec)
    element = operands.shared("q", "k", "v", "dout", "p", "ds")
    multiplied = arch.wgmma and element.mma is not None
    widest = widest_block(arch, element, fast_math=spec.fast_math)
    columns_qk, columns_v = (
        gradient_columns(head_dim, element, wgmma=multiplied, widest=widest)
        for head_dim in (spec.head_dim_qk, spec.head_dim_v)
    )
    alignment = alignment_of(spec, element.bytes)
    if spec.deterministic and differentiable_of(spec.variant):
        raise refuse(
            spec,
            "deterministic",
            "gradients of a variant's own tensors are added atomically, in no fixed order; allowed: false",
        )
    rows = family(
        arch,
        loads=loads,
        aligned=alignment == 16,
        element=element,
        fast_math=spec.fast_math,
        gathers=gathers(spec.variant),
        dropout=spec.variant.dropout,
    )
    by_keys = (_DV, _DK) if is_beyond_256(spec) else (_DKDV,)
    iterations = {kind: iteration_of(spec, "q" if kind.by_keys else "kv") for kind in (*by_keys, _DQ)}
    if rows == "wgmma":
        if iterations[by_keys[-1]] != "ranges" or "h" in names(spec.variant.mask):
            rows = "listed"
        elif spec.variant.score is not None or spec.layout == "varlen":
            rows = "scored"
        elif is_light(spec.variant) and spec.head_dim_qk == spec.head_dim_v and spec.head_dim_v in _RACED:
            rows = "plain"
    elif rows == "gather" and spec.variant.dropout:
        rows = "gather_dropped"
    widths = padded_width(columns_qk), padded_width(columns_v)
    given = spec.backward or Backward()
    tiles = {kind: _tile(spec, arch, kind, getattr(given, kind.field), rows, widths, operands) for kind in iterations}
    main = tiles[by_keys[-1]]
    planned = drafted(
        spec,
        label=LABELS[loads],
        width=f"w{main.warps}_{naming.gradient_label(*_numbers(tiles[_DQ]))}",
        tile_map="tile_map" in iterations.values(),
        alignment=alignment,
        columns_qk=columns_qk,
        columns_v=columns_v,
        backend="triton",
        schedule="triton_backward",
        loads=loads,
        q_operand="shared",
        tile_m=main.m,
        tile_n=main.n,
        stages=main.stages,
        num_warps=main.warps,
        max_registers=None,
        iteration=iterations[by_keys[-1]],
        main=by_keys[-1].name,
        mask_code="branch",
        softmax="exact_max" if spec.variant.has_lse else spec.variant.weights,
        l2_bytes=L2_BYTES,
        allow=(*spec.allow, "serialized_wgmma") if _may_wait(spec.variant, rows) else spec.allow,
    )
    launches = [_preprocess(planned)] if spec.variant.has_lse else []
    for kind, tile in tiles.items():
        launches += _gradient(planned, kind, tile, iterations[kind])
    return planned.with_launches(*launches, workspaces=tuple(row_workspaces()) if spec.variant.has_lse else ())


def _alternatives(spec: KernelSpec, first: Plan) -> Iterator[KernelSpec]:
    """Yield the spec of a backward with other tiles than those of its ``first`` plan, where it leaves them open."""
    del first
    given = spec.backward or Backward()
    for dkdv, dq in _SMALLER_GRADIENTS:
        tiles = Backward(_fixed(completed(given.dkdv, dkdv)), _fixed(completed(given.dq, dq)))
        yield replace(spec, backward=tiles)


def _tunable(spec: KernelSpec, first: Plan) -> Iterator[KernelSpec]:
    """Yield the spec of a backward with each tile, depth and number of warps of one of its kernels that may be the
    fastest, the other one being as it is planned."""
    moved, kept = ((32, 64, 128), (64, 128)) if first.dot_precision is None else ((16, 32, 64), (16, 32, 64, 128))
    given = spec.backward or Backward()
    for m, n, stages, warps in product(moved, kept, (1, 2, 3), (4, 8)):
        of_keys, of_queries = Gradient(m, n, stages, warps), Gradient(n, m, stages, warps)
        yield replace(spec, backward=replace(given, dkdv=of_keys))
        yield replace(spec, backward=replace(given, dq=of_queries))


def _fixed(tile: Tile) -> Gradient:
    return Gradient(tile.m, tile.n, tile.stages, tile.warps)


def _default_tile(kernel: str, family: str, head_dim: int) -> Tile:
    """Return the table's tile for ``dkdv`` or ``dq``, before its budget is checked."""
    row = next(row for row in _GRADIENTS if row[0] in (family, "any") and head_dim <= row[1])
    return row[2] if kernel == "dkdv" else row[3]


def _may_wait(variant: Variant, family: str) -> bool:
    """Whether ptxas may serialize the products, by the table of allowances."""
    traits = {
        "own_gradients": bool(differentiable_of(variant)),
        "constant_logits": not reads_products(variant),
        "parts": family == "bf16x6",
    }
    return may_wait("Triton backward kernels", [name for name, holds in traits.items() if holds])


def _numbers(tile: Tile) -> tuple[int, int, int, int]:
    return tile.m, tile.n, tile.stages, tile.warps


def _tile(
    spec: KernelSpec, arch: Arch, kind: _Kind, given: Gradient, family: str, widths: tuple[int, int], operands: Operands
) -> Tile:
    """Return the spec's tile of one kernel, completed from the table, and within the shared memory of the arch."""
    rows = depth_sizes(operands.ds)  # products sum over queries and over keys
    check_sizes(
        spec,
        (
            (f"backward.{kind.field}.tile.m", given.tile_m, rows),
            (f"backward.{kind.field}.tile.n", given.tile_n, rows),
            (f"backward.{kind.field}.stages", given.stages, STAGES),
            (f"backward.{kind.field}.warps", given.num_warps, WARPS),
        ),
    )
    table = _default_tile(kind.field, family, max(widths))
    tile = Tile(
        given.tile_m or table.m,
        given.tile_n or table.n,
        given.stages or table.stages,
        given.num_warps or table.warps,
    )
    while True:
        kept, moved = (tile.n, tile.m) if kind.by_keys else (tile.m, tile.n)
        needed = budget.gradient_memory(
            kept_rows=kept,
            moved_rows=moved,
            stages=tile.stages,
            width_qk=widths[0],
            width_v=widths[1],
            kept_bytes=kept_bytes(arch, operands.q, fast_math=spec.fast_math),
            operands=operands,
            by_keys=kind.by_keys,
        )
        if needed.total <= arch.shared_memory:
            return tile
        smaller = _smaller(kind, given, tile, rows[0])
        if smaller is None:
            raise refuse(
                spec,
                f"backward.{kind.field}",
                f"Shared memory {needed.total} B exceeds {arch.shared_memory} B on {arch.name}: {needed}",
            )
        tile = smaller


def _smaller(kind: _Kind, given: Gradient, tile: Tile, least: int) -> Tile | None:
    """Return the next smaller tile that keeps what the spec fixed, or None: fewer stages, then fewer rows, first of
    those that a block visits."""
    if given.stages is None and tile.stages > 1:
        return replace(tile, stages=tile.stages - 1)
    queries = {} if given.tile_m or tile.m <= least else {"m": tile.m // 2}
    keys = {} if given.tile_n or tile.n <= least else {"n": tile.n // 2}
    fewer = (queries or keys) if kind.by_keys else (keys or queries)
    return replace(tile, **fewer) if fewer else None


def _preprocess(planned: Plan) -> Launch:
    """Return the launch that computes the row statistics, which both others read."""
    return Launch(
        name="preprocess",
        symbol=naming.launch_name(planned.name, "preprocess"),
        grid="rows",
        tile_m=_ROWS,
        tile_n=planned.tile_n,
        stages=1,
        num_warps=_WARPS_PER_BYTE * planned.operands.shared("out", "dout").bytes,
        arguments=statistics_arguments(planned),
    )


def _gradient(planned: Plan, kind: _Kind, tile: Tile, iteration: str) -> list[Launch]:
    """Return one of the two kernels, after the one that computes its tile map if it needs one."""
    axes = axes_of(planned, kind.name) if iteration == "tile_map" else None
    launch = Launch(
        name=kind.name,
        symbol=naming.launch_name(planned.name, kind.name),
        grid=kind.grid,
        tile_m=tile.m,
        tile_n=tile.n,
        stages=tile.stages,
        num_warps=tile.warps,
        iteration=iteration,
        tile_map=axes,
        max_spills=_spills(planned).bytes,
    )
    own = planned.of_launch(launch)
    launches = [replace(launch, arguments=_arguments(own, kind))]
    if axes is not None:
        classifier = replace(
            launch,
            name=f"classify_{kind.name}",
            symbol=naming.launch_name(planned.name, f"classify_{kind.name}"),
            grid=kind.words,
            num_warps=4,
            stages=1,
            max_spills=None,
            arguments=arguments.classifier_signature(own, kind.tiles),
        )
        launches.insert(0, classifier)
    return launches


def _spills(planned: Plan) -> Spills:
    """Bytes that a thread may spill."""
    if planned.main == _DK.name:
        return WIDE_BACKWARD_SPILLS
    return SPLIT_SPILLS if planned.dot_precision == "bf16x6" else SPILLS


#: Operands that each kernel keeps from tile to tile.
_KEPT = {"keys": ("k", "v"), "queries": ("q", "dout")}


def results_of(launch: Launch) -> tuple[str, ...]:
    """Gradients that a launch writes."""
    return next((kind.results for kind in (_DKDV, _DV, _DK, _DQ) if kind.name == launch.name), ())


def through_descriptor(plan: Plan, name: str, grid: str) -> bool:
    """Whether a kernel with this grid loads q, k, v or dout through a tensor descriptor: what it loads in its loops."""
    return plan.loads == "descriptor" and name not in _KEPT[grid]


def has_window(plan: Plan, grid: str) -> bool:
    """Whether what a kernel loads in its loops ends where a sequence ends, though the tensor goes on after it.

    The queries of a dense tensor end where it ends, and what a descriptor gives after that is 0 anyway.
    """
    return plan.varlen or grid == "queries"


def _arguments(plan: Plan, kind: _Kind) -> tuple[Argument, ...]:
    """Return the arguments of one of the two kernels; that by queries gives gradients of own tensors, too."""
    tiles: dict[str, tuple[tuple[Columns, ...], int]] = {
        "q": (plan.columns_qk, plan.tile_m),
        "dout": (plan.columns_v, plan.tile_m),
        "k": (plan.columns_qk, plan.tile_n),
        "v": (plan.columns_v, plan.tile_n),
    }
    if kind is _DV:  # it needs no dP
        del tiles["v"]
    pointers = [name for name in tiles if not through_descriptor(plan, name, kind.grid)]
    operands: list[Argument] = []
    for name, (blocks, rows) in tiles.items():
        if name not in pointers:
            window = rows if has_window(plan, kind.grid) else None
            for index, block in enumerate(blocks):
                label = f"{name}_desc{arguments.block_suffix(blocks, index)}"
                operands.append(arguments.descriptor(plan, name, label, rows, block, window=window))
    strided = (*pointers, *kind.results)
    operands += [arguments.pointer(plan, name) for name in strided]
    if plan.variant.has_lse:
        operands += [arguments.row_pointer(name) for name in ("lse_log2", *(() if kind is _DV else ("delta",)))]
    own = () if kind.by_keys else differentiable(plan)
    return arguments.signature(
        plan, operands, tiles=kind.tiles, strided=strided,
        own_gradients=[
            Argument(gradient_pointer(name), "pointer", "*fp32", of=f"gradient:{name}", divisibility=4) for name in own
        ],
    )  # fmt: skip


SCHEDULE = Schedule(
    name="triton_backward",
    backend="triton",
    direction="backward",
    template="triton/backward.py.j2",
    view="attngen.families.triton.backward_view:backward_view",
    supports=lambda arch: True,
    plan=_plan,
    alternatives=plans_of(_alternatives, _plan),
    tunable=_tunable,
    explanation="attngen.parts.explained.backward:BackwardExplanation",
    serves=TRITON | {"backward": ANY},
)
