"""Choices that all schedules share, and the errors that refuse an illegal one with field and reason."""

from __future__ import annotations

from collections.abc import Sequence

from attngen.arch import ARCHES
from attngen.dtypes import CACHE_DTYPES, HEAD_DIM_STEP, HEAD_DIMS, KEY_VALUE_DTYPES, WIDE_HEAD_DIMS
from attngen.errors import PlanError
from attngen.lang.bands import Axis
from attngen.lang.ir import names
from attngen.lang.variant import Variant
from attngen.plan.operands import operands_of
from attngen.plan.traits import bands_of, has_short_bounds_of, reads_data, reads_data_per_key, reads_data_per_query
from attngen.schema.kernel_spec import Backward, KernelSpec

#: Rows or keys of a tile, warps and stages that a spec may name. Not measured.
TILE_SIZES = (16, 32, 64, 128, 256)
WARPS = (1, 2, 4, 8, 16)
STAGES = tuple(range(1, 9))

#: Bytes that the heads running side by side read again, which should stay in L2
#: (docs/notebook/hopper_forward.md, "How far ahead tiles are taken" and "One head after the other").
L2_BYTES = 32 * 2**20

#: Bytes of the same where all work items take equally long and need no balancing: so few that heads run one after the
#: other. Side by side, all blocks would read new heads from memory at the same moment
#: (docs/notebook/hopper_forward.md, "One head after the other").
ONE_HEAD = 4096

#: Intervals of keys up to which loops over ranges are faster than a tile map, whose partial tiles have bits and
#: whose rows go by their length (docs/notebook/softmax_and_masks.md, "Block diffusion by a tile map").
_FEW_INTERVALS = 3


def refuse(spec: KernelSpec, field: str, message: str) -> PlanError:
    """Return the error for a field of a spec."""
    return PlanError(message, location=spec.locate(field), field=field)


def check_no_roles(spec: KernelSpec) -> None:
    """Raise PlanError for choices of a backward that kernels by wgmma alone have."""
    for name in (spec.backward or Backward()).dkdv.of_roles:
        raise refuse(spec, f"backward.dkdv.{name}", "is for backward kernels by wgmma, which this is not; leave it out")


def is_beyond_256(spec: KernelSpec) -> bool:
    """Whether a spec has a head dim beyond those of most kernels."""
    return max(spec.head_dim_qk, spec.head_dim_v) > HEAD_DIMS[-1]


def reads_wide_cache(spec: KernelSpec) -> bool:
    """Whether a forward reads rows of 8 bits with a head dim beyond those of most kernels."""
    return is_beyond_256(spec) and spec.direction == "forward" and (spec.kv_dtype or spec.dtype) in CACHE_DTYPES


def takes_wide(spec: KernelSpec) -> bool:
    """Whether a kernel other than ``hopper_wide`` may have head dims beyond those of most kernels: the backward, or a
    forward over keys in 8 bits, on an arch that has ``hopper_wide``."""
    takes = (spec.direction == "backward" and spec.dtype in KEY_VALUE_DTYPES) or reads_wide_cache(spec)
    return ARCHES[spec.arch].wgmma and takes


def check_head_dims(spec: KernelSpec) -> None:
    """Raise PlanError for a head dimension that kernels are not made for: rows are whole chunks of 16 bytes."""
    given = operands_of(spec)
    step = max(HEAD_DIM_STEP, *(given.of(name).chunk_elements for name in ("q", "k", "v", "out")))
    wide = WIDE_HEAD_DIMS if takes_wide(spec) else ()
    allowed = [head_dim for head_dim in (*HEAD_DIMS, *wide) if head_dim % step == 0]
    for head_dim in (spec.head_dim_qk, spec.head_dim_v):
        if head_dim not in allowed:
            nearest = min(allowed, key=lambda d: (abs(d - head_dim), -d))
            raise refuse(
                spec,
                "head_dim",
                f"head_dim {head_dim} is not a multiple of {step} from {allowed[0]} to {allowed[-1]}; "
                f"nearest: {nearest}",
            )


def check_sizes(spec: KernelSpec, sizes: Sequence[tuple[str, int | None, Sequence[int]]]) -> None:
    """Raise PlanError for a number of the spec that is none of those allowed: field, number, allowed numbers."""
    for field, value, allowed in sizes:
        if value is not None and value not in allowed:
            nearest = min(allowed, key=lambda a: abs(a - value))
            raise refuse(spec, field, f"{value} is not one of {', '.join(map(str, allowed))}; nearest: {nearest}")


def iteration_of(spec: KernelSpec, over: Axis = "kv", *, by_bits: bool = False) -> str:
    """Choose the KV iteration of a kernel: ranges from bands, classification in the kernel, or a tile map.

    ``by_bits``: the kernel can read the mask of a partial tile as bits of a tile map. If the keys of a dense sequence
    form no ranges, or more than ``_FEW_INTERVALS``, that is faster than evaluating the mask, and a map of positions and
    scalars alone is made only once. The backward then takes a map wherever the forward does.
    """
    if spec.tile_map == "always":
        return "tile_map"
    mapped = spec.tile_map == "auto"
    if mapped and reads_data_per_query(spec.variant):
        return "tile_map"
    lasts = mapped and by_bits and spec.layout == "dense" and spec.pack_gqa is not True
    if lasts and over == "q" and iteration_of(spec, by_bits=True) == "tile_map":
        return "tile_map"
    bands = bands_of(spec, over)
    if bands.exact:
        many = over == "kv" and len(bands.visible) > _FEW_INTERVALS and not reads_data(spec.variant)
        return "tile_map" if lasts and many else "ranges"
    if mapped and (lasts or reads_data_per_key(spec.variant) or not has_short_bounds_of(spec)):
        return "tile_map"
    return "classified"


def map_axes(variant: Variant, *, ragged: bool) -> tuple[bool, bool]:
    """Whether the tile map of a mask differs between batch entries, and between heads."""
    used = names(variant.mask)
    return ragged or bool(used & {"b", "q_global", "kv_global"}), bool(used & {"h", "hk"})
