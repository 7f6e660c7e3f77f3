"""Choices that plans of all schedules have in common, and how an illegal one is refused: with field and reason."""

from __future__ import annotations

from collections.abc import Sequence

from attngen.arch import Arch
from attngen.dtypes import ATTENTION_DTYPES, HEAD_DIM_STEP
from attngen.errors import PlanError
from attngen.lang.bands import Axis
from attngen.lang.ir import names
from attngen.lang.variant import Variant
from attngen.plan.catalogue import SCHEDULES, Schedule
from attngen.plan.traits import bands_of, reads_data_per_key
from attngen.spec.expand import KernelSpec

TILE_SIZES = (16, 32, 64, 128, 256)
WARPS = (1, 2, 4, 8, 16)
STAGES = tuple(range(1, 9))

#: What is read again by the heads that run side by side should stay in L2; half of the H200's, measured best on it.
SECTION_BYTES = 32 * 2**20


def refuse(spec: KernelSpec, field: str, message: str) -> PlanError:
    """Return the error for a field of a spec."""
    return PlanError(message, location=spec.locate(field), field=field)


def triton_schedule(spec: KernelSpec, arch: Arch) -> Schedule:
    """Return the schedule that serves the spec, the fastest first."""
    if spec.dtype not in ATTENTION_DTYPES:
        raise refuse(spec, "dtype", f"{spec.dtype} kernels do not exist yet; allowed: {', '.join(ATTENTION_DTYPES)}")
    if spec.softmax not in (None, "exact_max"):
        raise refuse(spec, "softmax", f"'{spec.softmax}' does not exist in Triton kernels; allowed: exact_max")
    if spec.roles:
        raise refuse(spec, "warps", "Triton kernels have no roles; give a count")
    if spec.softmax_scale is not None:
        raise refuse(spec, "softmax_scale", "the scale is an argument of the call; leave it out")
    if spec.persistent:
        raise refuse(spec, "persistent", "Triton kernels are not persistent; allowed: false")
    if spec.order == "natural":
        raise refuse(spec, "order", "Triton kernels begin with the longest tiles; allowed: longest_first")
    if spec.epilogue == "staged":
        raise refuse(spec, "epilogue", "Triton kernels store from registers; allowed: direct")
    if spec.pack_gqa:
        raise refuse(spec, "pack_gqa", "Triton kernels give each query head tiles of its own; allowed: false")
    reasons = []
    for schedule in (row for row in SCHEDULES if (row.backend, row.direction) == ("triton", spec.direction)):
        if spec.loads not in (None, schedule.loads):
            continue
        if schedule.needs_descriptors and spec.alignment not in (None, 16):
            reasons.append(f"{schedule.name}: descriptors need alignment 16, not {spec.alignment}")
        elif not schedule.supports(arch):
            reasons.append(f"{schedule.name}: {arch.name} has no tensor descriptors; use loads: pointer")
        else:
            check_head_dims(spec, schedule)
            return schedule
    raise refuse(spec, "loads", "; ".join(reasons))


def check_head_dims(spec: KernelSpec, schedule: Schedule) -> None:
    """Raise PlanError for a head dimension that the schedule does not have."""
    for head_dim in (spec.head_dim_qk, spec.head_dim_v):
        if head_dim not in schedule.head_dims:
            nearest = min(schedule.head_dims, key=lambda d: (abs(d - head_dim), -d))
            raise refuse(
                spec,
                "head_dim",
                f"{schedule.name}: head_dim {head_dim} is no multiple of {HEAD_DIM_STEP} from {schedule.head_dims[0]} "
                f"to {schedule.head_dims[-1]}; nearest: {nearest}",
            )


def alignment_of(spec: KernelSpec, schedule: Schedule, element_bytes: int) -> int:
    """Return the bytes that pointers and strides must be multiples of."""
    if spec.alignment not in (None, 16, element_bytes):
        raise refuse(spec, "alignment", f"{spec.alignment} is not allowed; allowed: 16, {element_bytes} (one element)")
    return spec.alignment or 16


def check_sizes(spec: KernelSpec, sizes: Sequence[tuple[str, int | None, Sequence[int]]]) -> None:
    """Raise PlanError for a number of the spec that is none of those allowed: field, number, allowed numbers."""
    for field, value, allowed in sizes:
        if value is not None and value not in allowed:
            nearest = min(allowed, key=lambda a: abs(a - value))
            raise refuse(spec, field, f"{value} is not one of {', '.join(map(str, allowed))}; nearest: {nearest}")


def driver_of(spec: KernelSpec, over: Axis = "kv") -> str:
    """Return how a kernel finds its tiles: ranges from bands, classification in the kernel, or a tile map."""
    if spec.tile_map == "always":
        return "tile_map"
    if bands_of(spec, over).exact:
        return "ranges"
    if spec.tile_map == "auto" and reads_data_per_key(spec.variant):
        return "tile_map"
    return "classified"


def map_axes(variant: Variant, *, varlen: bool) -> tuple[bool, bool]:
    """Return whether the tile map of a mask differs between batch entries, and between heads."""
    used = names(variant.mask)
    return varlen or bool(used & {"b", "q_global", "kv_global"}), bool(used & {"h", "hk"})
