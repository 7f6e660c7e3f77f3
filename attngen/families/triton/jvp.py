"""The forward-mode derivative in Triton: output and tangent in one pass over the keys.

A kernel has two launches, of which a call runs one: that of tangents of q, k and v, of six products, and that of a
tangent of q alone, of four.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from attngen.arch import Arch
from attngen.families.triton.rules import LABELS, TRITON_FORWARD, alignment_of, loads_of
from attngen.families.triton.tiles import Tile, columns, completed, depth_sizes, family, widest_block
from attngen.operations import JVP
from attngen.parts.columns import padded_width
from attngen.plan import arguments, budget, naming
from attngen.plan.allowances import SPLIT_SPILLS, TANGENT_SPILLS, may_wait
from attngen.plan.choices import L2_BYTES, STAGES, TILE_SIZES, WARPS, check_sizes, iteration_of, refuse
from attngen.plan.draft import axes_of, drafted
from attngen.plan.model import Argument, Launch, Plan
from attngen.plan.operands import Operands, kept_bytes, operands_of
from attngen.plan.schedule import Schedule, plans_of
from attngen.plan.served import only
from attngen.plan.traits import gathers
from attngen.schema.kernel_spec import KernelSpec

#: The launches: name → tensors whose tangents it takes. The first one takes any of them, with zeros for absent ones.
TANGENTS: dict[str, tuple[str, ...]] = {JVP: ("q", "k", "v"), "jvp_q": ("q",)}

#: (family, largest head_dim) → tiles for tangents of q, k and v, and for those of q alone; first match wins. Those of
#: "wgmma" up to 128 were measured (docs/notebook/triton_jvp.md). The others follow from registers (two accumulators and
#: two tiles of logits) and from shared memory, where Q, K, V and their tangents lie.
_TABLE: tuple[tuple[str, int, Tile, Tile], ...] = (
    ("wgmma", 64, Tile(64, 64, 3, 4), Tile(64, 64, 3, 4)),
    ("wgmma", 128, Tile(128, 64, 2, 8), Tile(64, 64, 2, 4)),
    ("wgmma", 256, Tile(64, 32, 2, 8), Tile(64, 32, 2, 8)),
    ("gather", 64, Tile(128, 32, 2, 8), Tile(128, 32, 2, 8)),
    ("gather", 128, Tile(128, 32, 2, 8), Tile(128, 32, 2, 8)),
    ("gather", 256, Tile(64, 16, 2, 8), Tile(64, 16, 2, 8)),
    ("descriptor", 64, Tile(128, 64, 2, 8), Tile(128, 64, 2, 8)),
    ("descriptor", 128, Tile(64, 32, 2, 4), Tile(64, 32, 2, 4)),
    ("descriptor", 256, Tile(64, 16, 2, 8), Tile(64, 16, 2, 8)),
    ("pointer", 64, Tile(64, 64, 2, 4), Tile(64, 64, 2, 4)),
    ("pointer", 128, Tile(64, 32, 2, 4), Tile(64, 32, 2, 4)),
    ("pointer", 256, Tile(64, 16, 2, 8), Tile(64, 16, 2, 8)),
    ("unaligned", 64, Tile(64, 32, 2, 8), Tile(64, 32, 2, 8)),
    ("unaligned", 256, Tile(64, 16, 1, 8), Tile(64, 16, 1, 8)),
    ("bf16x6", 96, Tile(64, 32, 1, 8), Tile(64, 32, 1, 8)),
    ("bf16x6", 128, Tile(32, 16, 1, 8), Tile(32, 16, 1, 8)),
    ("bf16x6", 192, Tile(16, 16, 1, 8), Tile(16, 16, 1, 8)),
    ("tf32x3", 64, Tile(32, 32, 1, 4), Tile(32, 32, 1, 4)),
    ("tf32x3", 256, Tile(16, 16, 1, 4), Tile(16, 16, 1, 4)),
    ("ieee", 256, Tile(16, 16, 1, 8), Tile(16, 16, 1, 8)),
)

#: Fallbacks where the table's tile takes too many registers after all. Not measured.
_SMALLER = (
    Tile(128, 32, 3, 8), Tile(64, 32, 2, 8), Tile(64, 32, 2, 4), Tile(64, 16, 2, 8), Tile(32, 32, 2, 8),
    Tile(32, 32, 1, 8), Tile(32, 16, 1, 4), Tile(16, 16, 1, 4),
)  # fmt: skip


def _plan(spec: KernelSpec, arch: Arch) -> Plan:
    loads = loads_of(spec, arch)
    operands = operands_of(spec)
    element = operands.shared("q", "k", "v", "p", "dq", "dk", "dv", "dout")
    widest = widest_block(arch, element, fast_math=spec.fast_math)
    columns_qk, columns_v = (columns(head_dim, element, widest) for head_dim in (spec.head_dim_qk, spec.head_dim_v))
    alignment = alignment_of(spec, element.bytes)
    rows = family(
        arch,
        loads=loads,
        aligned=alignment == 16,
        element=element,
        fast_math=spec.fast_math,
        gathers=gathers(spec.variant),
    )
    widths = padded_width(columns_qk), padded_width(columns_v)
    defaults = _defaults(spec, rows, max(widths))
    tiles = [
        _tile(spec, arch, default, widths, operands, tangents)
        for default, tangents in zip(defaults, TANGENTS.values(), strict=True)
    ]
    iteration = iteration_of(spec)
    if iteration == "tile_map":
        tiles = [tiles[0]] * 2  # a map has one size of tiles
    tile, of_q = tiles
    traits = ("parts",) if rows == "bf16x6" else ()
    planned = drafted(
        spec,
        label=LABELS[loads],
        width=f"w{tile.warps}_{naming.gradient_label(of_q.m, of_q.n, of_q.stages, of_q.warps)}",
        tile_map=iteration == "tile_map",
        alignment=alignment,
        columns_qk=columns_qk,
        columns_v=columns_v,
        backend="triton",
        schedule="triton_jvp",
        loads=loads,
        q_operand="shared",
        tile_m=tile.m,
        tile_n=tile.n,
        stages=tile.stages,
        num_warps=tile.warps,
        max_registers=None,
        iteration=iteration,
        main=JVP,
        mask_code="loop" if iteration == "ranges" and spec.variant.score is not None else "branch",
        softmax="exact_max",
        l2_bytes=L2_BYTES,
        allow=(*spec.allow, "serialized_wgmma") if may_wait("Triton jvp kernels", traits) else spec.allow,
    )
    axes = axes_of(planned, JVP) if iteration == "tile_map" else None
    launches = []
    for (name, given), own in zip(TANGENTS.items(), tiles, strict=True):
        launch = Launch(
            name, planned.name if name == JVP else naming.launch_name(planned.name, "q"), "queries", own.m, own.n,
            own.stages, own.warps, iteration, tile_map=axes,
            max_spills=(SPLIT_SPILLS if traits else TANGENT_SPILLS).bytes,
        )  # fmt: skip
        launches.append(replace(launch, arguments=_arguments(planned.of_launch(launch), given)))
    if axes is not None:
        classifier = Launch(
            "classify", naming.classifier_name(planned.name), "query_words", tile.m, tile.n, 1, 4, "tile_map",
            arguments.classifier_signature(planned, "q_tiles"), tile_map=axes,
        )  # fmt: skip
        launches.insert(0, classifier)
    return planned.with_launches(*launches)


def _arguments(plan: Plan, tangents: tuple[str, ...]) -> tuple[Argument, ...]:
    """Return the arguments of a launch that takes these tangents: d and a name is the tangent of what has the name."""
    blocks = {"q": plan.columns_qk, "k": plan.columns_qk, "v": plan.columns_v}
    tiles = {name: blocks[name[-1]] for of in blocks for name in (of, *([f"d{of}"] if of in tangents else []))}
    pointers = [name for name in tiles if plan.loads == "pointer" or name.endswith("q")]
    operands: list[Argument] = []
    for name, of_columns in tiles.items():
        if name in pointers:
            operands.append(arguments.pointer(plan, name))
            continue
        for index, block in enumerate(of_columns):
            label = f"{name}_desc{arguments.block_suffix(of_columns, index)}"
            operands.append(arguments.descriptor(plan, name, label, plan.tile_n, block))
    results = ("out", "dout")
    operands += [arguments.pointer(plan, name) for name in results]
    operands += [arguments.row_pointer(name) for name in ("lse", "dlse")]
    return arguments.signature(
        plan, operands, tiles="q_tiles", strided=(*pointers, *results), present=("lse", "seqused_k")
    )


def _alternatives(spec: KernelSpec, first: Plan) -> Iterator[KernelSpec]:
    """Yield the spec with other tiles than that of its ``first`` plan, where it leaves them open."""
    rows = [tile for tile in _SMALLER if tile.m * tile.n < first.tile_m * first.tile_n]
    for tile in dict.fromkeys(completed(spec, tile) for tile in rows):
        yield replace(spec, tile_m=tile.m, tile_n=tile.n, stages=tile.stages, num_warps=tile.warps)


def _defaults(spec: KernelSpec, family: str, width: int) -> tuple[Tile, Tile]:
    """The table's tiles of both launches, before their budget is checked."""
    for name, largest, *tiles in _TABLE:
        if name == family and width <= largest:
            return tiles[0], tiles[1]
    largest = max(row[1] for row in _TABLE if row[0] == family)
    raise refuse(
        spec,
        "head_dim",
        f"forward-mode derivatives in fp32 by products of parts take head dims up to {largest}: beyond, nearly all "
        f"registers spill; allowed: head_dim: {largest}, or fast_math: false, or dtype: bf16",
    )


def _tile(
    spec: KernelSpec, arch: Arch, default: Tile, widths: tuple[int, int], operands: Operands, tangents: tuple[str, ...]
) -> Tile:
    """Return the spec's tile of one launch, completed from a default, and within the shared memory of the arch."""
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
    tile = completed(spec, default)
    while True:
        needed = budget.tangent_memory(
            tile_m=tile.m,
            tile_n=tile.n,
            stages=tile.stages,
            width_qk=widths[0],
            width_v=widths[1],
            kept_bytes=kept_bytes(arch, operands.q, fast_math=spec.fast_math),
            operands=operands,
            moves_keys="k" in tangents,
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
        return replace(tile, stages=tile.stages - 1)
    if spec.tile_n is None and tile.n > least:
        return replace(tile, n=tile.n // 2)
    if spec.tile_m is None and tile.m > TILE_SIZES[0]:
        return replace(tile, m=tile.m // 2)
    return None


SCHEDULE = Schedule(
    name="triton_jvp",
    backend="triton",
    direction=JVP,
    template="triton/jvp.py.j2",
    view="attngen.families.triton.jvp_view:jvp_view",
    supports=lambda arch: True,
    plan=_plan,
    alternatives=plans_of(_alternatives, _plan),
    explanation="attngen.families.triton.jvp_explanation:TangentExplanation",
    serves=TRITON_FORWARD
    | {
        "weights": only("softmax", why="forward-mode derivatives exist of softmax weights"),
        "dropout": only(False, why="dropout has no forward-mode derivative in a kernel"),
    },
)
