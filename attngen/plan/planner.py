"""Spec → Plan: every open choice is made here, and every illegal one is refused with its reason."""

from __future__ import annotations

from attngen.arch import ARCHES, Arch
from attngen.dtypes import ATTENTION_DTYPES, dtype
from attngen.errors import PlanError
from attngen.lang.ir import names
from attngen.plan import arguments, budget, naming
from attngen.plan.catalogue import SCHEDULES, Schedule
from attngen.plan.cuda_arguments import cuda_arguments, cuda_classifier_arguments
from attngen.plan.hopper import hopper_tile, refusal, widths
from attngen.plan.model import Argument, Classifier, Plan
from attngen.plan.tiles import Tile, columns, default_tile, family, padded_width
from attngen.plan.traits import gathers, keys_of_tiles, reads_data_per_key
from attngen.spec.expand import KernelSpec

_TILE_SIZES = (16, 32, 64, 128, 256)
_WARPS = (1, 2, 4, 8, 16)
_MAX_STAGES = 8

#: K and V of the heads that run side by side should stay in L2; half of the H200's, measured best on it.
_SECTION_BYTES = 32 * 2**20


def plan(spec: KernelSpec) -> Plan:
    """Return the plan of one kernel; PlanError names the field, the arithmetic and the nearest legal choice."""
    arch = ARCHES[spec.arch]
    if spec.backend == "cuda":
        return _cuda_plan(spec, arch)
    schedule = _schedule(spec, arch)
    element = dtype(spec.dtype)
    columns_qk, columns_v = columns(spec.head_dim_qk), columns(spec.head_dim_v)
    widths = padded_width(columns_qk), padded_width(columns_v)
    alignment = _alignment(spec, schedule, element.bytes)
    rows = family(
        arch,
        loads=schedule.loads,
        aligned=alignment == 16,
        element_bytes=element.bytes,
        gathers=gathers(spec.variant),
    )
    tile = _tile(spec, arch, default_tile(rows, max(widths)), widths, element.bytes)
    driver = _driver(spec)
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
        section_bytes=_SECTION_BYTES,
        allow=spec.allow,
    )
    classifier = _classifier(draft, arguments.classifier_arguments(draft)) if driver == "tile_map" else None
    return draft.with_arguments(arguments.forward_arguments(draft), classifier)


def _cuda_plan(spec: KernelSpec, arch: Arch) -> Plan:
    """Return the plan of a Hopper kernel in CUDA, with warp roles or without."""
    if spec.direction != "forward":
        raise _refuse(spec, "passes", f"{spec.direction} kernels do not exist yet; allowed: forward")
    if refused := refusal(spec, arch):
        raise refused
    if spec.softmax_scale is not None:
        raise _refuse(spec, "softmax_scale", "the scale is an argument of the call; leave it out")
    specialized, unified = (row for row in SCHEDULES if row.backend == "cuda")
    schedule = unified if spec.roles and spec.roles.producer == 0 else specialized
    _check_head_dims(spec, schedule)
    driver = _driver(spec)
    pack_gqa = spec.pack_gqa is True
    if pack_gqa and driver == "tile_map":
        raise _refuse(
            spec,
            "pack_gqa",
            "a tile map lists the tiles of single heads; allowed: false, or true with tile_map: never",
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
        section_bytes=_SECTION_BYTES,
        allow=spec.allow,
        hopper=roles,
        pack_gqa=pack_gqa,
    )
    classifier = _classifier(draft, cuda_classifier_arguments(draft)) if driver == "tile_map" else None
    return draft.with_arguments(cuda_arguments(draft), classifier)


def _refuse(spec: KernelSpec, field: str, message: str) -> PlanError:
    return PlanError(message, location=spec.locate(field), field=field)


def _schedule(spec: KernelSpec, arch: Arch) -> Schedule:
    """Return the schedule that serves the spec, the fastest first."""
    if spec.direction != "forward":
        raise _refuse(spec, "passes", f"{spec.direction} kernels do not exist yet; allowed: forward")
    if spec.dtype not in ATTENTION_DTYPES:
        raise _refuse(spec, "dtype", f"{spec.dtype} kernels do not exist yet; allowed: {', '.join(ATTENTION_DTYPES)}")
    if spec.softmax not in (None, "exact_max"):
        raise _refuse(spec, "softmax", f"'{spec.softmax}' does not exist in Triton kernels; allowed: exact_max")
    for field, value in (("warps", spec.roles), ("sinks", spec.sinks), ("dropout", spec.dropout)):
        if value:
            raise _refuse(spec, field, f"Triton kernels have no {field}; leave it out")
    if spec.softmax_scale is not None:
        raise _refuse(spec, "softmax_scale", "the scale is an argument of the call; leave it out")
    if spec.persistent:
        raise _refuse(spec, "persistent", "Triton kernels are not persistent; allowed: false")
    if spec.order == "natural":
        raise _refuse(spec, "order", "Triton kernels begin with the longest tiles; allowed: longest_first")
    if spec.epilogue == "staged":
        raise _refuse(spec, "epilogue", "Triton kernels store from registers; allowed: direct")
    if spec.pack_gqa:
        raise _refuse(spec, "pack_gqa", "Triton kernels give each query head tiles of its own; allowed: false")
    reasons = []
    for schedule in (row for row in SCHEDULES if row.backend == "triton"):
        if spec.loads not in (None, schedule.loads):
            continue
        if schedule.needs_descriptors and spec.alignment not in (None, 16):
            reasons.append(f"{schedule.name}: descriptors need alignment 16, not {spec.alignment}")
        elif not schedule.supports(arch):
            reasons.append(f"{schedule.name}: {arch.name} has no tensor descriptors; use loads: pointer")
        else:
            _check_head_dims(spec, schedule)
            return schedule
    raise _refuse(spec, "loads", "; ".join(reasons))


def _check_head_dims(spec: KernelSpec, schedule: Schedule) -> None:
    for head_dim in (spec.head_dim_qk, spec.head_dim_v):
        if head_dim not in schedule.head_dims:
            nearest = min(schedule.head_dims, key=lambda d: (abs(d - head_dim), -d))
            raise _refuse(
                spec,
                "head_dim",
                f"{schedule.name}: head_dim {head_dim} is no multiple of 16 from 16 to 256; nearest: {nearest}",
            )


def _alignment(spec: KernelSpec, schedule: Schedule, element_bytes: int) -> int:
    """Return the bytes that pointers and strides must be multiples of."""
    if spec.alignment not in (None, 16, element_bytes):
        raise _refuse(spec, "alignment", f"{spec.alignment} is not allowed; allowed: 16, {element_bytes} (one element)")
    return spec.alignment or 16


def _tile(spec: KernelSpec, arch: Arch, table: Tile, widths: tuple[int, int], element_bytes: int) -> Tile:
    """Return the spec's tile, completed from the table, and within the shared memory of the arch."""
    for field, value, allowed in (
        ("tile.m", spec.tile_m, _TILE_SIZES),
        ("tile.n", spec.tile_n, _TILE_SIZES),
        ("num_warps", spec.num_warps, _WARPS),
        ("pipeline.stages", spec.stages, tuple(range(1, _MAX_STAGES + 1))),
    ):
        if value is not None and value not in allowed:
            nearest = min(allowed, key=lambda a: abs(a - value))
            raise _refuse(spec, field, f"{value} is not one of {', '.join(map(str, allowed))}; nearest: {nearest}")
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
            raise _refuse(
                spec,
                "tile",
                f"Shared memory {needed.total} B exceeds {arch.shared_memory} B on {arch.name}: {needed}",
            )
        tile = smaller


def _smaller(spec: KernelSpec, tile: Tile) -> Tile | None:
    """Return the next smaller tile that keeps what the spec fixed, or None."""
    if spec.stages is None and tile.stages > 1:
        return Tile(tile.m, tile.n, tile.stages - 1, tile.warps)
    if spec.tile_n is None and tile.n > _TILE_SIZES[0]:
        return Tile(tile.m, tile.n // 2, tile.stages, tile.warps)
    return None


def _driver(spec: KernelSpec) -> str:
    """Return how the kernel finds its KV tiles: ranges from bands, classification in the kernel, or a tile map."""
    if spec.tile_map == "always":
        return "tile_map"
    if keys_of_tiles(spec).exact:
        return "ranges"
    if spec.tile_map == "auto" and reads_data_per_key(spec.variant):
        return "tile_map"
    return "classified"


def _classifier(draft: Plan, own: tuple[Argument, ...]) -> Classifier:
    """Return the plan of the kernel that computes the tile map."""
    used = names(draft.variant.mask)
    varlen_or_batch = draft.varlen or bool(used & {"b", "q_global", "kv_global"})
    return Classifier(
        name=naming.classifier_name(draft.name),
        arguments=own,
        batch=varlen_or_batch,
        heads=bool(used & {"h", "hk"}),
        num_warps=4,
    )
