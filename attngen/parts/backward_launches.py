"""First launches of the backward passes in CUDA, and their arguments."""

from __future__ import annotations

from collections.abc import Iterator

from attngen.dtypes import DType
from attngen.manifest import TileMapAxes
from attngen.plan import arguments, naming
from attngen.plan.draft import axes_of, classifier_warps
from attngen.plan.model import Argument, Launch, Plan
from attngen.plan.own_gradients import differentiable_of, stored_gradients
from attngen.plan.symbols import cleared_name, gradient_pointer, stored_name

#: The same where the first tiles of each KV head are split: the number of these, or the most where a tile map has it.
CUT_FIRST_SIZES = ("cut_rows", "parts", "sum_tiles")

#: Query rows of a block of ``preprocess``, at least, and its warps (docs/notebook/hopper_backward.md, "Rounding dQ, and
#: the small kernels").
_ROWS, _ROWS_WARPS = 16, 4


def launch_of(plan: Plan, name: str, grid: str, warps: int, **fields: object) -> Launch:
    """A launch of a backward with the plan's tile, in one stage unless ``fields`` say otherwise."""
    common = {"tile_m": plan.tile_m, "tile_n": plan.tile_n, "stages": 1}
    symbol = naming.launch_name(plan.name, name)
    return Launch(name=name, symbol=symbol, grid=grid, num_warps=warps, **{**common, **fields})  # type: ignore[arg-type]


def leading_launches(plan: Plan, preprocess_arguments: tuple[Argument, ...], *, pdl: bool = False) -> Iterator[Launch]:
    """Yield the launches before that of all products: row statistics, and the tile map if there is one; by programmatic
    dependent launch if ``pdl``."""
    yield preprocess_launch(plan, preprocess_arguments, pdl=pdl)
    if plan.iteration == "tile_map":
        own = arguments.classifier_signature(plan, "kv_tiles", max_seqlen_k=True)
        yield launch_of(
            plan, "classify_dqkv", "key_words", classifier_warps(plan), iteration="tile_map",
            tile_map=tile_map_axes(plan), arguments=own, pdl=pdl,
        )  # fmt: skip


def preprocess_launch(plan: Plan, own: tuple[Argument, ...], *, pdl: bool) -> Launch:
    """The launch of the row statistics, with its ``own`` arguments."""
    rows = max(_ROWS, 32 * _ROWS_WARPS // row_lanes(plan.head_dim_v, plan.operands.shared("out", "dout")))
    return launch_of(plan, "preprocess", "rows", _ROWS_WARPS, tile_m=rows, arguments=own, pdl=pdl)


def statistics_arguments(plan: Plan, *cleared: Argument) -> tuple[Argument, ...]:
    """Return the arguments of the launch that computes the row statistics; with a pointer to what it also clears, and a
    size of that, these are among them."""
    pointer, size = (cleared[:1], cleared[1:])
    return (
        arguments.pointer(plan, "out"), arguments.pointer(plan, "dout"),
        *map(arguments.row_pointer, ("lse", "dlse", "lse_log2", "delta")),
        *pointer,
        *arguments.strides_of(plan, ("out", "dout")),
        *map(arguments.size, ("heads", "rows", "row_tiles")),
        *size,
        Argument("has_dlse", "present", "i32", of="dlse"),
    )  # fmt: skip


def tile_map_axes(plan: Plan) -> TileMapAxes | None:
    """Axes of the tile map of the launch of all products; None without a map."""
    return axes_of(plan, "dqkv") if plan.iteration == "tile_map" else None


def row_lanes(head_dim: int, element: DType) -> int:
    """Lanes of a warp that read a row of ``head_dim`` columns, 16 bytes each at once; some may have none."""
    return min(1 << (head_dim // element.chunk_elements - 1).bit_length(), 32)


def tensor_gradient_arguments(plan: Plan, *, clears: bool = False) -> tuple[Argument, ...]:
    """Return the addresses of the gradients of the variant's tensors, whether those of biases are stored as tiles of dS
    are, and whether a kernel that ``clears`` what no step stores is to do so."""
    pointers = (
        Argument(gradient_pointer(name), "pointer", "*fp32", of=f"gradient:{name}", divisibility=16)
        for name in differentiable_of(plan.variant)
    )
    flags = (
        Argument(
            stored_name(each.load.tensor), "present", "i32", of=f"stored:{each.load.tensor}",
            axis=",".join(sorted(each.prefix)),
        )
        for each in stored_gradients(plan)
    )  # fmt: skip
    cleared = (
        Argument(cleared_name(each.load.tensor), "present", "i32", of=f"cleared:{each.load.tensor}")
        for each in (stored_gradients(plan) if clears else ())
    )
    return (*pointers, *flags, *cleared)
