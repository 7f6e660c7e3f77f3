"""The Triton forward, through tensor descriptors or pointers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from attngen.arch import Arch
from attngen.families.triton.rules import LABELS, TRITON_FORWARD, alignment_of, loads_of
from attngen.families.triton.tiles import Tile, columns, completed, depth_sizes, family, widest_block
from attngen.parts.columns import padded_width
from attngen.plan import arguments, budget
from attngen.plan.allowances import SPILLS, SPLIT_SPILLS, may_wait
from attngen.plan.choices import L2_BYTES, STAGES, TILE_SIZES, WARPS, check_sizes, iteration_of, refuse
from attngen.plan.draft import drafted, forward_launches
from attngen.plan.model import Argument, Plan
from attngen.plan.operands import Operands, kept_bytes, operands_of
from attngen.plan.schedule import Schedule, plans_of
from attngen.plan.traits import gathers
from attngen.schema.kernel_spec import KernelSpec

#: (family, largest head_dim) → tile, first match wins. The rows of "wgmma" were measured on an H200
#: (docs/notebook/triton_forward.md, "Tile, stages and warps"); the others follow from registers and shared memory, and
#: were not measured.
_TABLE: tuple[tuple[str, int, Tile], ...] = (
    ("wgmma", 64, Tile(64, 64, 3, 4, 128)),
    ("wgmma", 128, Tile(64, 64, 3, 4)),
    ("wgmma", 256, Tile(64, 32, 3, 4)),
    # random numbers take registers while they are made
    ("dropped", 128, Tile(64, 64, 3, 4)),
    ("dropped", 256, Tile(64, 32, 2, 8)),
    # every element of a tile loads a value of its own, whose addresses take two registers each
    ("gather", 64, Tile(64, 64, 3, 4)),
    ("gather", 128, Tile(64, 32, 2, 4)),
    ("gather", 256, Tile(64, 16, 2, 4)),
    ("descriptor", 128, Tile(64, 64, 3, 4)),
    ("descriptor", 256, Tile(64, 32, 2, 4)),
    ("pointer", 64, Tile(128, 64, 3, 4)),
    ("pointer", 128, Tile(64, 64, 3, 4)),
    ("pointer", 256, Tile(64, 32, 2, 4)),
    # loads of single elements, as strides may be anything
    ("unaligned", 64, Tile(64, 32, 2, 4)),
    ("unaligned", 128, Tile(64, 16, 2, 4)),
    ("unaligned", 256, Tile(64, 16, 2, 8)),
    # float32 in parts: benchmarked on an H200, as wgmma and as mma.sync (docs/notebook/triton_forward.md, "Float32")
    ("bf16x6", 96, Tile(64, 64, 2, 4)),
    ("bf16x6", 256, Tile(64, 32, 2, 4)),
    ("tf32x3", 64, Tile(64, 32, 2, 4)),
    ("tf32x3", 192, Tile(64, 16, 2, 4)),
    ("tf32x3", 256, Tile(32, 16, 1, 4)),
    # no tensor cores: products are FMAs on registers
    ("ieee", 128, Tile(32, 32, 1, 8)),
    ("ieee", 256, Tile(32, 16, 1, 8)),
)

#: Fallbacks where the table's tile takes too many registers after all: tiles with fewer keys, more warps, and at
#: last such small ones that products are not of warpgroups, which ptxas neither serializes nor splits. Not measured.
_SMALLER = (
    Tile(64, 64, 2, 4), Tile(64, 32, 2, 4), Tile(64, 64, 2, 8), Tile(64, 16, 2, 4), Tile(64, 32, 1, 8),
    Tile(32, 32, 2, 4), Tile(16, 16, 1, 4),
)  # fmt: skip


def _plan(spec: KernelSpec, arch: Arch) -> Plan:
    loads = loads_of(spec, arch)
    operands = operands_of(spec)
    element = operands.shared("q", "k", "v", "p")
    widest = widest_block(arch, element, fast_math=spec.fast_math)
    columns_qk, columns_v = (columns(head_dim, element, widest) for head_dim in (spec.head_dim_qk, spec.head_dim_v))
    widths = padded_width(columns_qk), padded_width(columns_v)
    alignment = alignment_of(spec, element.bytes)
    rows = family(
        arch,
        loads=loads,
        aligned=alignment == 16,
        element=element,
        fast_math=spec.fast_math,
        gathers=gathers(spec.variant),
        dropout=spec.variant.dropout,
    )
    tile = _tile(spec, arch, _default_tile(rows, max(widths)), widths, operands)
    iteration = iteration_of(spec)
    traits = ("parts",) if rows == "bf16x6" else ()
    # in parts Q has no room there, but where wgmma leaves its other operand in shared memory
    in_registers = loads == "descriptor" and not gathers(spec.variant) and rows != "tf32x3"
    planned = drafted(
        spec,
        label=LABELS[loads],
        width=f"w{tile.warps}",
        tile_map=iteration == "tile_map",
        alignment=alignment,
        columns_qk=columns_qk,
        columns_v=columns_v,
        backend="triton",
        schedule="triton_forward",
        loads=loads,
        q_operand="registers" if in_registers else "shared",
        tile_m=tile.m,
        tile_n=tile.n,
        stages=tile.stages,
        num_warps=tile.warps,
        max_registers=tile.registers,
        iteration=iteration,
        # A branch keeps the pipeline running from tile to tile, but splits the arithmetic of a score from the softmax.
        mask_code="loop" if iteration == "ranges" and spec.variant.score is not None else "branch",
        softmax="exact_max" if spec.variant.has_lse else spec.variant.weights,
        l2_bytes=L2_BYTES,
        allow=(*spec.allow, "serialized_wgmma") if may_wait("Triton forward kernels", traits) else spec.allow,
    )
    return forward_launches(
        planned,
        _arguments(planned),
        lambda: arguments.classifier_signature(planned, "q_tiles"),
        max_spills=(SPLIT_SPILLS if traits else SPILLS).bytes,
    )


def _arguments(plan: Plan) -> tuple[Argument, ...]:
    """Return the arguments of the kernel."""
    tiles = {
        "q": (plan.columns_qk, plan.tile_m),
        "k": (plan.columns_qk, plan.tile_n),
        "v": (plan.columns_v, plan.tile_n),
    }
    pointers = [name for name in tiles if not has_descriptor(plan, name)]
    operands: list[Argument] = []
    for name, (blocks, rows) in tiles.items():
        if name in pointers:
            operands.append(arguments.pointer(plan, name))
            continue
        for index, block in enumerate(blocks):
            label = f"{name}_desc{arguments.block_suffix(blocks, index)}"
            operands.append(arguments.descriptor(plan, name, label, rows, block))
    own = ("lse",) if plan.variant.has_lse else ()
    operands += [arguments.pointer(plan, "out"), *arguments.results_of_rows(plan)]
    return arguments.signature(plan, operands, tiles="q_tiles", strided=(*pointers, "out"), present=(*own, "seqused_k"))


def has_descriptor(plan: Plan, name: str) -> bool:
    """Whether q, k or v comes through a tensor descriptor."""
    return plan.loads == "descriptor" and (name != "q" or plan.q_operand == "registers")


def _alternatives(spec: KernelSpec, first: Plan) -> Iterator[KernelSpec]:
    """Yield the spec of a forward with other tiles than that of its ``first`` plan, where it leaves them open."""
    rows = [tile for tile in _SMALLER if tile.m * tile.n <= first.tile_m * first.tile_n]
    for tile in dict.fromkeys(completed(spec, tile) for tile in rows):
        yield replace(spec, tile_m=tile.m, tile_n=tile.n, stages=tile.stages, num_warps=tile.warps)


def _tunable(spec: KernelSpec, first: Plan) -> Iterator[KernelSpec]:
    """Yield the spec of a forward with each tile, depth and number of warps that may be the fastest."""
    rows, keys = ((64, 128), (32, 64, 128)) if first.dot_precision is None else ((32, 64, 128), (16, 32, 64))
    for m, n, stages, warps in product(rows, keys, (2, 3, 4), (4, 8)):
        yield replace(spec, tile_m=m, tile_n=n, stages=stages, num_warps=warps)


def _default_tile(family: str, head_dim: int) -> Tile:
    """Return the table's tile for a kernel, before its budget is checked."""
    return next(tile for name, largest, tile in _TABLE if name == family and head_dim <= largest)


def _tile(spec: KernelSpec, arch: Arch, table: Tile, widths: tuple[int, int], operands: Operands) -> Tile:
    """Return the spec's tile, completed from the table, and within the shared memory of the arch."""
    keys = depth_sizes(operands.p)
    check_sizes(
        spec,
        (
            ("tile.m", spec.tile_m, TILE_SIZES),
            ("tile.n", spec.tile_n, keys),
            ("num_warps", spec.num_warps, WARPS),
            ("pipeline.stages", spec.stages, STAGES),
        ),
    )
    fixed = (spec.tile_m, spec.tile_n, spec.stages, spec.num_warps)
    tile = Tile(
        spec.tile_m or table.m,
        spec.tile_n or table.n,
        spec.stages or table.stages,
        spec.num_warps or table.warps,
        table.registers if fixed == (None, None, None, None) else None,
    )
    while True:
        needed = budget.shared_memory(
            tile_m=tile.m,
            tile_n=tile.n,
            stages=tile.stages,
            width_qk=widths[0],
            width_v=widths[1],
            kept_bytes=kept_bytes(arch, operands.q, fast_math=spec.fast_math),
            operands=operands,
        )
        if needed.total <= arch.shared_memory:
            return tile
        smaller = _smaller(spec, tile, keys[0])
        if smaller is None:
            raise refuse(
                spec,
                "tile",
                f"Shared memory {needed.total} B exceeds {arch.shared_memory} B on {arch.name}: {needed}",
            )
        tile = smaller


def _smaller(spec: KernelSpec, tile: Tile, least: int) -> Tile | None:
    """Return the next smaller tile, of ``least`` keys, that keeps what the spec fixed, or None."""
    if spec.stages is None and tile.stages > 1:
        return Tile(tile.m, tile.n, tile.stages - 1, tile.warps)
    if spec.tile_n is None and tile.n > least:
        return Tile(tile.m, tile.n // 2, tile.stages, tile.warps)
    if spec.tile_m is None and tile.m > TILE_SIZES[0]:
        return Tile(tile.m // 2, tile.n, tile.stages, tile.warps)
    return None


SCHEDULE = Schedule(
    name="triton_forward",
    backend="triton",
    direction="forward",
    template="triton/forward.py.j2",
    view="attngen.families.triton.forward_view:triton_view",
    supports=lambda arch: True,
    plan=_plan,
    alternatives=plans_of(_alternatives, _plan),
    tunable=_tunable,
    serves=TRITON_FORWARD,
)
