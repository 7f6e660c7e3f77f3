"""The argument list of a Triton forward kernel, in order: the one description that the template's signature, the
compiler's attributes and the runtime's packing all follow."""

from __future__ import annotations

from collections.abc import Iterator

from attngen.dtypes import dtype
from attngen.lang.variant import Variant
from attngen.plan.model import Argument, Columns, Plan
from attngen.plan.symbols import argument_name, extent_name, pointer_name, strides

#: Axes of q, k, v and out that have a stride; the last axis is contiguous.
STRIDED = {"dense": ("b", "s", "h"), "varlen": ("s", "h")}
_SCALAR_TYPES = {"int32": "i32", "int64": "i64", "fp32": "fp32", "bool": "i32"}


def forward_arguments(plan: Plan) -> tuple[Argument, ...]:
    """Return the arguments of the forward kernel of ``plan``."""
    return tuple(_forward(plan))


def classifier_arguments(plan: Plan) -> tuple[Argument, ...]:
    """Return the arguments of the kernel that computes the tile map."""
    return tuple(_classifier(plan))


def _forward(plan: Plan) -> Iterator[Argument]:
    tiles = {
        "q": (plan.columns_qk, plan.tile_m),
        "k": (plan.columns_qk, plan.tile_n),
        "v": (plan.columns_v, plan.tile_n),
    }
    pointers = [name for name in tiles if not has_descriptor(plan, name)]
    for name, (columns, rows) in tiles.items():
        if name in pointers:
            yield pointer_argument(plan, name)
            continue
        for index, block in enumerate(columns):
            yield descriptor_argument(plan, name, f"{name}_desc{block_suffix(columns, index)}", rows, block)
    yield pointer_argument(plan, "out")
    yield Argument("lse_ptr", "pointer", "*fp32", of="lse", divisibility=4)
    if plan.varlen:
        yield Argument("cu_seqlens_q_ptr", "pointer", "*i32", of="cu_seqlens_q", divisibility=4)
        yield Argument("cu_seqlens_k_ptr", "pointer", "*i32", of="cu_seqlens_k", divisibility=4)
    yield Argument("seqused_k_ptr", "pointer", "*i32", of="seqused_k", divisibility=4)
    if plan.driver == "tile_map":
        yield Argument("tile_map_ptr", "pointer", "*i32", of="tile_map", divisibility=4)
    yield from tensor_pointers(plan.variant)
    element_alignment = max(plan.alignment // plan.dtype.bytes, 1)
    for name in (*pointers, "out"):
        for axis in STRIDED[plan.layout]:
            divisibility = element_alignment if element_alignment > 1 else 0
            yield Argument(f"stride_{name}_{axis}", "stride", "i64", of=name, axis=axis, divisibility=divisibility)
    if plan.driver == "tile_map":
        for axis in ("b", "h", "q"):
            yield Argument(f"stride_tile_map_{axis}", "stride", "i64", of="tile_map", axis=axis)
    yield from tensor_shapes(plan.variant)
    yield from _sizes(plan)
    yield Argument("softmax_scale", "scale", "fp32")
    yield from scalar_arguments(plan.variant)
    yield Argument("write_lse", "present", "i32", of="lse")
    yield Argument("has_seqused_k", "present", "i32", of="seqused_k")


def _classifier(plan: Plan) -> Iterator[Argument]:
    yield Argument("tile_map_ptr", "pointer", "*i32", of="tile_map", divisibility=4)
    if plan.varlen:
        yield Argument("cu_seqlens_q_ptr", "pointer", "*i32", of="cu_seqlens_q", divisibility=4)
        yield Argument("cu_seqlens_k_ptr", "pointer", "*i32", of="cu_seqlens_k", divisibility=4)
    yield Argument("seqused_k_ptr", "pointer", "*i32", of="seqused_k", divisibility=4)
    yield from tensor_pointers(plan.variant)
    for axis in ("b", "h", "q"):
        yield Argument(f"stride_tile_map_{axis}", "stride", "i64", of="tile_map", axis=axis)
    yield from tensor_shapes(plan.variant)
    yield from _sizes(plan)
    yield Argument("map_heads", "size", "i32", of="map_heads")
    yield from scalar_arguments(plan.variant)
    yield Argument("has_seqused_k", "present", "i32", of="seqused_k")


def has_descriptor(plan: Plan, name: str) -> bool:
    """Whether q, k or v comes through a tensor descriptor."""
    return plan.loads == "descriptor" and (name != "q" or plan.q_operand == "registers")


def block_suffix(blocks: tuple[Columns, ...], index: int) -> str:
    """Return what distinguishes a column block in names: nothing where there is only one."""
    return f"_{index}" if len(blocks) > 1 else ""


def descriptor_argument(
    plan: Plan, of: str, name: str, rows: int, block: Columns, window: int | None = None
) -> Argument:
    """Return the tensor descriptor through which some rows of a column block come; see ``tensormap.windowed``."""
    box: tuple[int, ...] = (rows, 1, block.width) if plan.varlen else (1, rows, 1, block.width)
    if window is not None:
        box = (*box[:-3], 1, *box[-3:])
    shape = ",".join(map(str, box))
    return Argument(name, "descriptor", f"tensordesc<{plan.dtype.triton}[{shape}]>", of=of, box=box, window=window)


def pointer_argument(plan: Plan, of: str) -> Argument:
    """Return the address of a tensor of the plan's dtype."""
    divisibility = plan.alignment if plan.alignment > plan.dtype.bytes else 0
    return Argument(f"{of}_ptr", "pointer", f"*{plan.dtype.triton}", of=of, divisibility=divisibility)


def tensor_pointers(variant: Variant) -> Iterator[Argument]:
    """Yield the addresses of a variant's tensors."""
    for tensor in variant.tensors:
        yield Argument(
            pointer_name(tensor.name), "pointer", f"*{dtype(tensor.dtype).triton}", of=f"tensor:{tensor.name}"
        )


def tensor_shapes(variant: Variant) -> Iterator[Argument]:
    """Yield the strides, but for that of the last axis, and the extents of a variant's tensors."""
    for tensor in variant.tensors:
        of = f"tensor:{tensor.name}"
        for axis, name in enumerate(strides(tensor)[:-1]):
            yield Argument(name, "stride", "i64", of=of, axis=axis)
        for axis in range(len(tensor.shape)):
            yield Argument(extent_name(tensor, axis), "extent", "i32", of=of, axis=axis)


def _sizes(plan: Plan) -> Iterator[Argument]:
    """Yield lengths and counts; ``group`` is query heads per KV head, ``section`` the heads that run side by side."""
    for name in (
        "batch",
        "heads",
        "kv_heads",
        "group",
        "section",
        "q_tiles",
        "seqlen_q",
        "seqlen_k",
        "total_q",
        "total_k",
    ):
        yield Argument(f"max_{name}" if plan.varlen and name.startswith("seqlen") else name, "size", "i32", of=name)
    if plan.driver == "tile_map":
        yield Argument("words", "size", "i32", of="words")


def scalar_arguments(variant: Variant) -> Iterator[Argument]:
    """Yield the scalars that a variant takes at the call."""
    for scalar in variant.scalars:
        if scalar.const is None:
            yield Argument(argument_name(scalar.name), "scalar", _SCALAR_TYPES[scalar.dtype], of=scalar.name)
