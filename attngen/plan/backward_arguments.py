"""The argument lists of the kernels of a Triton backward, in order."""

from __future__ import annotations

from collections.abc import Iterator

from attngen.lang.variant import Variant
from attngen.plan.arguments import (
    STRIDED,
    block_suffix,
    descriptor_argument,
    pointer_argument,
    scalar_arguments,
    tensor_pointers,
    tensor_shapes,
)
from attngen.plan.model import Argument, Columns, Plan
from attngen.plan.symbols import gradient_pointer

#: What each kernel keeps while it goes from tile to tile, and what it writes.
_KEPT = {"keys": ("k", "v"), "queries": ("q", "dout")}
_WRITTEN = {"keys": ("dk", "dv"), "queries": ("dq",)}


def preprocess_arguments(plan: Plan) -> tuple[Argument, ...]:
    """Return the arguments of the kernel that computes the sums of each query row."""
    return tuple(_preprocess(plan))


def dkdv_arguments(plan: Plan) -> tuple[Argument, ...]:
    """Return the arguments of the kernel that computes dK and dV."""
    return tuple(_gradient(plan, "keys"))


def dq_arguments(plan: Plan) -> tuple[Argument, ...]:
    """Return the arguments of the kernel that computes dQ, and the gradients of the variant's own tensors."""
    return tuple(_gradient(plan, "queries"))


def classifier_arguments(plan: Plan, *, by_keys: bool) -> tuple[Argument, ...]:
    """Return the arguments of the kernel that computes the tile map of either."""
    return tuple(_classifier(plan, "keys" if by_keys else "queries"))


def through_descriptor(plan: Plan, name: str, grid: str) -> bool:
    """Whether a kernel with this grid loads q, k, v or dout through a tensor descriptor: what it loads in its loops."""
    return plan.loads == "descriptor" and name not in _KEPT[grid]


def has_window(plan: Plan, grid: str) -> bool:
    """Whether what a kernel loads in its loops ends where a sequence ends, though the tensor goes on behind it.

    The queries of a dense tensor end where it ends, and what a descriptor gives behind that is 0 anyway.
    """
    return plan.varlen or grid == "queries"


def _preprocess(plan: Plan) -> Iterator[Argument]:
    yield pointer_argument(plan, "out")
    yield pointer_argument(plan, "dout")
    for name in ("lse", "dlse", "lse_log2", "delta"):
        yield _row_pointer(name)
    yield from _strides(plan, ("out", "dout"))
    for name in ("heads", "rows", "row_tiles"):
        yield Argument(name, "size", "i32", of=name)
    yield Argument("has_dlse", "present", "i32", of="dlse")


def _gradient(plan: Plan, grid: str) -> Iterator[Argument]:
    operands: dict[str, tuple[tuple[Columns, ...], int]] = {
        "q": (plan.columns_qk, plan.tile_m),
        "dout": (plan.columns_v, plan.tile_m),
        "k": (plan.columns_qk, plan.tile_n),
        "v": (plan.columns_v, plan.tile_n),
    }
    pointers = [name for name in operands if not through_descriptor(plan, name, grid)]
    for name, (columns, rows) in operands.items():
        if name in pointers:
            continue
        window = rows if has_window(plan, grid) else None
        for index, block in enumerate(columns):
            label = f"{name}_desc{block_suffix(columns, index)}"
            yield descriptor_argument(plan, name, label, rows, block, window=window)
    written = _WRITTEN[grid]
    for name in (*pointers, *written):
        yield pointer_argument(plan, name)
    yield _row_pointer("lse_log2")
    yield _row_pointer("delta")
    yield from _lengths(plan)
    if plan.driver == "tile_map":
        yield Argument("tile_map_ptr", "pointer", "*i32", of="tile_map", divisibility=4)
    yield from tensor_pointers(plan.variant)
    if grid == "queries":
        for tensor in differentiable(plan):
            yield Argument(gradient_pointer(tensor), "pointer", "*fp32", of=f"gradient:{tensor}", divisibility=4)
    yield from _strides(plan, (*pointers, *written))
    if plan.driver == "tile_map":
        yield from _map_strides(grid)
    yield from tensor_shapes(plan.variant)
    yield from _sizes(plan, grid)
    yield Argument("softmax_scale", "scale", "fp32")
    yield from scalar_arguments(plan.variant)
    yield Argument("has_seqused_k", "present", "i32", of="seqused_k")


def _classifier(plan: Plan, grid: str) -> Iterator[Argument]:
    yield Argument("tile_map_ptr", "pointer", "*i32", of="tile_map", divisibility=4)
    yield from _lengths(plan)
    yield from tensor_pointers(plan.variant)
    yield from _map_strides(grid)
    yield from tensor_shapes(plan.variant)
    yield from _sizes(plan, grid)
    yield Argument("map_heads", "size", "i32", of="map_heads")
    yield from scalar_arguments(plan.variant)
    yield Argument("has_seqused_k", "present", "i32", of="seqused_k")


def differentiable(plan: Plan) -> tuple[str, ...]:
    """Return the tensors whose gradients the kernels of a plan compute."""
    return differentiable_of(plan.variant)


def differentiable_of(variant: Variant) -> tuple[str, ...]:
    """Return the variant's tensors that get a gradient through the score; sinks get theirs behind the kernels."""
    read = variant.uses(variant.score)[1] if variant.score is not None else frozenset()
    return tuple(tensor.name for tensor in variant.tensors if tensor.grad and tensor.name in read)


def _row_pointer(name: str) -> Argument:
    return Argument(f"{name}_ptr", "pointer", "*fp32", of=name, divisibility=4)


def _lengths(plan: Plan) -> Iterator[Argument]:
    for name in ("cu_seqlens_q", "cu_seqlens_k") if plan.varlen else ():
        yield Argument(f"{name}_ptr", "pointer", "*i32", of=name, divisibility=4)
    yield Argument("seqused_k_ptr", "pointer", "*i32", of="seqused_k", divisibility=4)


def _strides(plan: Plan, names: tuple[str, ...]) -> Iterator[Argument]:
    elements = max(plan.alignment // plan.dtype.bytes, 1)
    for name in names:
        for axis in STRIDED[plan.layout]:
            yield Argument(
                f"stride_{name}_{axis}", "stride", "i64", of=name, axis=axis,
                divisibility=elements if elements > 1 else 0,
            )  # fmt: skip


def _map_strides(grid: str) -> Iterator[Argument]:
    for axis in ("b", "h", "kv" if grid == "keys" else "q"):
        yield Argument(f"stride_tile_map_{axis}", "stride", "i64", of="tile_map", axis=axis)


def _sizes(plan: Plan, grid: str) -> Iterator[Argument]:
    """Yield lengths and counts, as those of the forward; blocks are tiles of keys or of queries."""
    tiles = "kv_tiles" if grid == "keys" else "q_tiles"
    for name in (
        "batch", "heads", "kv_heads", "group", "section", tiles, "seqlen_q", "seqlen_k", "total_q", "total_k",
    ):  # fmt: skip
        yield Argument(f"max_{name}" if plan.varlen and name.startswith("seqlen") else name, "size", "i32", of=name)
    if plan.driver == "tile_map":
        yield Argument("words", "size", "i32", of="words")
