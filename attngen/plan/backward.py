"""The plan of a backward in Triton: a kernel by tiles of keys for dK and dV, one by tiles of queries for dQ.

Both compute the logits anew. Each adds up in registers what it writes, so that nothing is added atomically but the
gradients of a variant's own tensors, and dQ, dK and dV are the same on every run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from attngen.arch import Arch
from attngen.dtypes import dtype
from attngen.lang.ir import names
from attngen.lang.settle import reads_products
from attngen.lang.variant import Variant
from attngen.plan import backward_arguments, budget, naming
from attngen.plan.choices import (
    SECTION_BYTES,
    STAGES,
    TILE_SIZES,
    WARPS,
    alignment_of,
    check_sizes,
    driver_of,
    map_axes,
    refuse,
    triton_schedule,
)
from attngen.plan.model import Part, Plan
from attngen.plan.tiles import Tile, default_gradient_tile, family, gradient_columns, padded_width
from attngen.plan.traits import gathers, is_light
from attngen.spec.expand import Backward, Gradient, KernelSpec

#: Query rows of a block that computes the sums of rows, and its warps by the bytes of an element.
_ROWS, _ROWS_WARPS = 64, {2: 4, 4: 8}

#: Head dims of the tiles that were raced.
_RACED = (64, 128)


@dataclass(frozen=True, slots=True)
class _Kind:
    """One of the two kernels: the field of the spec, what it visits, and what it keeps meanwhile."""

    name: str
    grid: str
    words: str

    @property
    def by_keys(self) -> bool:
        return self.grid == "keys"


_DKDV = _Kind("dkdv", "keys", "key_words")
_DQ = _Kind("dq", "queries", "query_words")


def backward_plan(spec: KernelSpec, arch: Arch) -> Plan:
    """Return the plan of a backward in Triton; PlanError names the field, the sum and the nearest legal choice."""
    schedule = triton_schedule(spec, arch)
    element = dtype(spec.dtype)
    multiplied = arch.wgmma and element.bytes == 2
    columns_qk, columns_v = (
        gradient_columns(head_dim, wgmma=multiplied) for head_dim in (spec.head_dim_qk, spec.head_dim_v)
    )
    alignment = alignment_of(spec, schedule, element.bytes)
    if spec.deterministic and backward_arguments.differentiable_of(spec.variant):
        raise refuse(
            spec,
            "deterministic",
            "gradients of a variant's own tensors are added atomically, in no fixed order; allowed: false",
        )
    rows = family(
        arch,
        loads=schedule.loads,
        aligned=alignment == 16,
        element_bytes=element.bytes,
        gathers=gathers(spec.variant),
        dropout=spec.variant.dropout,
    )
    drivers = {kind: driver_of(spec, "q" if kind.by_keys else "kv") for kind in (_DKDV, _DQ)}
    if rows == "wgmma":
        if drivers[_DKDV] != "ranges" or "h" in names(spec.variant.mask):
            rows = "listed"
        elif spec.variant.score is not None or spec.layout == "varlen":
            rows = "scored"
        elif is_light(spec.variant) and spec.head_dim_qk == spec.head_dim_v and spec.head_dim_v in _RACED:
            rows = "plain"
    elif rows == "gather" and spec.variant.dropout:
        rows = "gather_dropped"
    widths = padded_width(columns_qk), padded_width(columns_v)
    given = spec.backward or Backward()
    tiles = {
        kind: _tile(spec, arch, kind, getattr(given, kind.name), rows, widths, element.bytes) for kind in (_DKDV, _DQ)
    }
    main = tiles[_DKDV]
    name = naming.kernel_name(
        direction=spec.direction,
        arch=spec.arch,
        schedule=schedule.label,
        dtype=spec.dtype,
        head_dim_qk=spec.head_dim_qk,
        head_dim_v=spec.head_dim_v,
        variant=spec.variant.name,
        layout=spec.layout,
        tile_m=main.m,
        tile_n=main.n,
        stages=main.stages,
        width=f"w{main.warps}_{naming.gradient_label(*_numbers(tiles[_DQ]))}",
        fast_math=spec.fast_math,
        aligned=alignment == 16,
        tile_map="tile_map" in drivers.values(),
    )
    draft = Plan(
        name=name,
        package=spec.package,
        spec_file=spec.spec_file,
        variant=spec.variant,
        arch_name=spec.arch,
        dtype_name=spec.dtype,
        head_dim_qk=spec.head_dim_qk,
        head_dim_v=spec.head_dim_v,
        columns_qk=columns_qk,
        columns_v=columns_v,
        layout=spec.layout,
        direction=spec.direction,
        backend="triton",
        schedule=schedule.name,
        loads=schedule.loads,
        q_operand="shared",
        alignment=alignment,
        tile_m=main.m,
        tile_n=main.n,
        stages=main.stages,
        num_warps=main.warps,
        max_registers=None,
        driver=drivers[_DKDV],
        mask_code="branch",
        softmax="exact_max",
        fast_math=spec.fast_math,
        section_bytes=SECTION_BYTES,
        allow=(*spec.allow, "serialized_wgmma") if _serializes(spec.variant) else spec.allow,
    )
    parts = [_preprocess(draft)]
    for kind, tile in tiles.items():
        parts += _gradient(draft, kind, tile, drivers[kind])
    dkdv = next(part for part in parts if part.name == "dkdv")
    return replace(draft, parts=tuple(parts), arguments=dkdv.arguments)


def _serializes(variant: Variant) -> bool:
    """Whether ptxas is known to wait for products: before atomic additions in a loop, and where nothing reads S."""
    return bool(backward_arguments.differentiable_of(variant)) or not reads_products(variant)


def _numbers(tile: Tile) -> tuple[int, int, int, int]:
    return tile.m, tile.n, tile.stages, tile.warps


def _tile(
    spec: KernelSpec, arch: Arch, kind: _Kind, given: Gradient, family: str, widths: tuple[int, int], element: int
) -> Tile:
    """Return the spec's tile of one kernel, completed from the table, and within the shared memory of the arch."""
    check_sizes(
        spec,
        (
            (f"backward.{kind.name}.tile.m", given.tile_m, TILE_SIZES),
            (f"backward.{kind.name}.tile.n", given.tile_n, TILE_SIZES),
            (f"backward.{kind.name}.stages", given.stages, STAGES),
            (f"backward.{kind.name}.warps", given.num_warps, WARPS),
        ),
    )
    table = default_gradient_tile(kind.name, family, max(widths))
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
            element_bytes=element,
            names=("K", "V", "Q", "dO") if kind.by_keys else ("Q", "dO", "K", "V"),
        )
        if needed.total <= arch.shared_memory:
            return tile
        smaller = _smaller(kind, given, tile)
        if smaller is None:
            raise refuse(
                spec,
                f"backward.{kind.name}",
                f"Shared memory {needed.total} B exceeds {arch.shared_memory} B on {arch.name}: {needed}",
            )
        tile = smaller


def _smaller(kind: _Kind, given: Gradient, tile: Tile) -> Tile | None:
    """Return the next smaller tile that keeps what the spec fixed, or None: fewer stages, then fewer rows a step."""
    if given.stages is None and tile.stages > 1:
        return replace(tile, stages=tile.stages - 1)
    if kind.by_keys and given.tile_m is None and tile.m > TILE_SIZES[0]:
        return replace(tile, m=tile.m // 2)
    if not kind.by_keys and given.tile_n is None and tile.n > TILE_SIZES[0]:
        return replace(tile, n=tile.n // 2)
    return None


def _preprocess(draft: Plan) -> Part:
    """Return the kernel that computes what both others need of each query row."""
    return Part(
        name="preprocess",
        symbol=naming.part_name(draft.name, "preprocess"),
        grid="rows",
        tile_m=_ROWS,
        tile_n=draft.tile_n,
        stages=1,
        num_warps=_ROWS_WARPS[draft.dtype.bytes],
        driver="ranges",
        arguments=backward_arguments.preprocess_arguments(draft),
    )


def _gradient(draft: Plan, kind: _Kind, tile: Tile, driver: str) -> list[Part]:
    """Return one of the two kernels, after the one that computes its tile map if it needs one."""
    axes = map_axes(draft.variant, varlen=draft.varlen) if driver == "tile_map" else None
    part = Part(
        name=kind.name,
        symbol=naming.part_name(draft.name, kind.name),
        grid=kind.grid,
        tile_m=tile.m,
        tile_n=tile.n,
        stages=tile.stages,
        num_warps=tile.warps,
        driver=driver,
        tile_map=axes,
    )
    own = draft.of_part(part)
    listed = backward_arguments.dkdv_arguments if kind.by_keys else backward_arguments.dq_arguments
    parts = [replace(part, arguments=listed(own))]
    if axes is not None:
        classifier = replace(
            part,
            name=f"classify_{kind.name}",
            symbol=naming.part_name(draft.name, f"classify_{kind.name}"),
            grid=kind.words,
            num_warps=4,
            stages=1,
            arguments=backward_arguments.classifier_arguments(own, by_keys=kind.by_keys),
        )
        parts.insert(0, classifier)
    return parts
