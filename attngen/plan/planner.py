"""Spec → Plan: every open choice is made here, and every illegal one is refused with its reason."""

from __future__ import annotations

from dataclasses import replace

from attngen.arch import ARCHES, Arch
from attngen.dtypes import dtype
from attngen.errors import PlanError
from attngen.lang.settle import settle
from attngen.plan import arguments, budget, naming
from attngen.plan.backward import backward_plan
from attngen.plan.catalogue import SCHEDULES, backends
from attngen.plan.choices import (
    SECTION_BYTES,
    STAGES,
    TILE_SIZES,
    WARPS,
    alignment_of,
    check_head_dims,
    check_sizes,
    driver_of,
    map_axes,
    refuse,
    triton_schedule,
)
from attngen.plan.cuda_arguments import cuda_arguments, cuda_classifier_arguments
from attngen.plan.hopper import hopper_tile, refusal, widths
from attngen.plan.hopper_backward import hopper_backward_plan
from attngen.plan.model import Argument, Classifier, Plan
from attngen.plan.tiles import Tile, columns, default_tile, family, padded_width
from attngen.plan.traits import gathers
from attngen.spec.expand import KernelSpec


def plan(spec: KernelSpec) -> Plan:
    """Return the plan of one kernel; PlanError names the field, the arithmetic and the nearest legal choice."""
    arch = ARCHES[spec.arch]
    spec = replace(spec, variant=settle(spec.variant))
    if spec.backend is None:
        return _fastest(spec, arch)
    return replace(_PLANNERS[spec.backend, spec.direction](spec, arch), backend_reason="the spec names it")


def _fastest(spec: KernelSpec, arch: Arch) -> Plan:
    """Return the plan of the fastest backend that can do all that a spec asks for, and why it is that one."""
    candidates = backends(arch, spec.direction)
    refusals: list[PlanError] = []
    for backend in candidates:
        try:
            _keep_promises(spec, backend)
            planned = _PLANNERS[backend, spec.direction](replace(spec, backend=backend), arch)
        except PlanError as error:
            refusals.append(error)
            continue
        others = [f"not {other}: {error.message}" for other, error in zip(candidates, refusals, strict=False)]
        return replace(planned, backend_reason="; ".join(others) or f"the fastest on {arch.name}")
    if len(refusals) == 1:
        raise refusals[0]
    reasons = (f"{backend}: {error.message}" for backend, error in zip(candidates, refusals, strict=True))
    raise PlanError("; ".join(reasons), location=refusals[0].location, field=refusals[0].field)


def _keep_promises(spec: KernelSpec, backend: str) -> None:
    """Refuse what a backend would accept, and do less exactly than another: a spec has to name it for that."""
    if (backend, spec.direction) == ("cuda", "forward") and not spec.fast_math:
        raise refuse(
            spec, "fast_math", "the argument of exp2 is fused all the same; say 'backend: cuda' to accept that"
        )


def _triton_plan(spec: KernelSpec, arch: Arch) -> Plan:
    """Return the plan of a Triton forward."""
    schedule = triton_schedule(spec, arch)
    element = dtype(spec.dtype)
    columns_qk, columns_v = columns(spec.head_dim_qk), columns(spec.head_dim_v)
    widths = padded_width(columns_qk), padded_width(columns_v)
    alignment = alignment_of(spec, schedule, element.bytes)
    rows = family(
        arch,
        loads=schedule.loads,
        aligned=alignment == 16,
        element_bytes=element.bytes,
        gathers=gathers(spec.variant),
        dropout=spec.variant.dropout,
    )
    tile = _tile(spec, arch, default_tile(rows, max(widths)), widths, element.bytes)
    driver = driver_of(spec)
    in_registers = schedule.loads == "descriptor" and not gathers(spec.variant)
    name = naming.kernel_name(
        direction=spec.direction,
        arch=spec.arch,
        schedule=schedule.label,
        dtype=spec.dtype,
        head_dim_qk=spec.head_dim_qk,
        head_dim_v=spec.head_dim_v,
        variant=spec.variant.name,
        layout=spec.layout,
        tile_m=tile.m,
        tile_n=tile.n,
        stages=tile.stages,
        width=f"w{tile.warps}",
        fast_math=spec.fast_math,
        aligned=alignment == 16,
        tile_map=driver == "tile_map",
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
        q_operand="registers" if in_registers else "shared",
        alignment=alignment,
        tile_m=tile.m,
        tile_n=tile.n,
        stages=tile.stages,
        num_warps=tile.warps,
        max_registers=tile.registers,
        driver=driver,
        # A branch keeps the pipeline running from tile to tile, but splits the arithmetic of a score from the softmax.
        mask_code="loop" if driver == "ranges" and spec.variant.score is not None else "branch",
        softmax=spec.softmax or "exact_max",
        fast_math=spec.fast_math,
        section_bytes=SECTION_BYTES,
        allow=spec.allow,
    )
    classifier = _classifier(draft, arguments.classifier_arguments(draft)) if driver == "tile_map" else None
    return draft.with_arguments(arguments.forward_arguments(draft), classifier)


def _cuda_plan(spec: KernelSpec, arch: Arch) -> Plan:
    """Return the plan of a Hopper kernel in CUDA, with warp roles or without."""
    if refused := refusal(spec, arch):
        raise refused
    if spec.softmax_scale is not None:
        raise refuse(spec, "softmax_scale", "the scale is an argument of the call; leave it out")
    specialized, unified = (row for row in SCHEDULES if (row.backend, row.direction) == ("cuda", "forward"))
    schedule = unified if spec.roles and spec.roles.producer == 0 else specialized
    check_head_dims(spec, schedule)
    driver = driver_of(spec)
    pack_gqa = spec.pack_gqa is True
    if pack_gqa and driver == "tile_map":
        raise refuse(
            spec,
            "pack_gqa",
            "a tile map lists the tiles of single heads; allowed: false, or true with tile_map: never",
        )
    if pack_gqa and spec.variant.dropout:
        raise refuse(
            spec, "pack_gqa", "random numbers serve rows of one head, and packed rows are of several; allowed: false"
        )
    tile = hopper_tile(spec, arch, driver)
    roles = tile.roles
    warpgroups = roles.consumers + roles.specialized
    usual = roles.schedule == ("pingpong" if roles.consumers > 1 and roles.specialized else "cooperative")
    name = naming.kernel_name(
        direction=spec.direction,
        arch=spec.arch,
        schedule=schedule.label,
        dtype=spec.dtype,
        head_dim_qk=spec.head_dim_qk,
        head_dim_v=spec.head_dim_v,
        variant=spec.variant.name,
        layout=spec.layout,
        tile_m=tile.tile_m,
        tile_n=tile.tile_n,
        stages=tile.stages,
        width=f"c{roles.consumers}" if roles.specialized else f"w{4 * warpgroups}",
        fast_math=spec.fast_math,
        aligned=True,
        tile_map=driver == "tile_map",
        choices=(
            *([] if usual else [roles.schedule]),
            *([] if roles.overlap else ["nooverlap"]),
            *([] if roles.softmax == "fixed_reference" else [roles.softmax.replace("_", "")]),
            *([] if roles.persistent or not roles.specialized else ["single"]),
            *([] if roles.longest_first else ["natural"]),
            *([] if roles.staged else ["direct"]),
            *(["pack"] if pack_gqa else []),
        ),
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
        columns_qk=(widths(spec.head_dim_qk),),
        columns_v=(widths(spec.head_dim_v),),
        layout=spec.layout,
        direction=spec.direction,
        backend="cuda",
        schedule=schedule.name,
        loads=schedule.loads,
        q_operand="shared",
        alignment=16,
        tile_m=tile.tile_m,
        tile_n=tile.tile_n,
        stages=tile.stages,
        num_warps=4 * warpgroups,
        max_registers=None,
        driver=driver,
        mask_code="branch",
        softmax=roles.softmax,
        fast_math=spec.fast_math,
        section_bytes=SECTION_BYTES,
        allow=spec.allow,
        hopper=roles,
        pack_gqa=pack_gqa,
    )
    classifier = _classifier(draft, cuda_classifier_arguments(draft)) if driver == "tile_map" else None
    return draft.with_arguments(cuda_arguments(draft), classifier)


_PLANNERS = {
    ("cuda", "forward"): _cuda_plan,
    ("triton", "forward"): _triton_plan,
    ("cuda", "backward"): hopper_backward_plan,
    ("triton", "backward"): backward_plan,
}


def _tile(spec: KernelSpec, arch: Arch, table: Tile, widths: tuple[int, int], element_bytes: int) -> Tile:
    """Return the spec's tile, completed from the table, and within the shared memory of the arch."""
    check_sizes(
        spec,
        (
            ("tile.m", spec.tile_m, TILE_SIZES),
            ("tile.n", spec.tile_n, TILE_SIZES),
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
            element_bytes=element_bytes,
        )
        if needed.total <= arch.shared_memory:
            return tile
        smaller = _smaller(spec, tile)
        if smaller is None:
            raise refuse(
                spec,
                "tile",
                f"Shared memory {needed.total} B exceeds {arch.shared_memory} B on {arch.name}: {needed}",
            )
        tile = smaller


def _smaller(spec: KernelSpec, tile: Tile) -> Tile | None:
    """Return the next smaller tile that keeps what the spec fixed, or None."""
    if spec.stages is None and tile.stages > 1:
        return Tile(tile.m, tile.n, tile.stages - 1, tile.warps)
    if spec.tile_n is None and tile.n > TILE_SIZES[0]:
        return Tile(tile.m, tile.n // 2, tile.stages, tile.warps)
    return None


def _classifier(draft: Plan, own: tuple[Argument, ...]) -> Classifier:
    """Return the plan of the kernel that computes the tile map."""
    batch, heads = map_axes(draft.variant, varlen=draft.varlen)
    return Classifier(name=naming.classifier_name(draft.name), arguments=own, batch=batch, heads=heads, num_warps=4)
