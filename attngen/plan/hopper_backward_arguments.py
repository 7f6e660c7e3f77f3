"""The argument lists of the kernels of a CUDA backward, in order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from attngen.plan.arguments import STRIDED, pointer_argument, scalar_arguments, tensor_pointers, tensor_shapes
from attngen.plan.cuda_arguments import tensor_map
from attngen.plan.model import Argument, Plan

if TYPE_CHECKING:
    from attngen.plan.schedules.hopper_backward import HopperBackward


def preprocess_arguments(plan: Plan) -> tuple[Argument, ...]:
    """Return the arguments of the kernel that computes the sums of each query row, and clears those of dQ."""
    return tuple(_preprocess(plan))


def dkdv_arguments(plan: Plan, roles: HopperBackward) -> tuple[Argument, ...]:
    """Return the arguments of the kernel of all products."""
    return tuple(_dkdv(plan, roles))


def dq_arguments(plan: Plan) -> tuple[Argument, ...]:
    """Return the arguments of the kernel that rounds the sums of dQ."""
    return tuple(_dq(plan))


def classifier_arguments(plan: Plan) -> tuple[Argument, ...]:
    """Return the arguments of the kernel that computes the tile map."""
    return tuple(_classifier(plan))


def _preprocess(plan: Plan) -> Iterator[Argument]:
    yield pointer_argument(plan, "out")
    yield pointer_argument(plan, "dout")
    for name in ("lse", "dlse", "lse_log2", "delta"):
        yield _row_pointer(name)
    yield _sums()
    yield from _strides(plan, ("out", "dout"))
    for name in ("heads", "rows", "row_tiles"):
        yield Argument(name, "size", "i32", of=name)
    yield Argument("sum_chunks", "size", "i64", of="dq_sum_chunks")
    yield Argument("has_dlse", "present", "i32", of="dlse")


def _dkdv(plan: Plan, roles: HopperBackward) -> Iterator[Argument]:
    window, keys, columns = plan.tile_m if plan.varlen else None, roles.keys, roles.box_columns
    yield tensor_map(plan, "q", plan.tile_m, columns, window=window)
    yield tensor_map(plan, "k", keys, columns, window=keys)
    yield tensor_map(plan, "v", keys, columns, window=keys)
    yield tensor_map(plan, "dout", plan.tile_m, columns, window=window)
    yield _sums()
    alone = roles.cluster == 1  # then it rounds dQ, too
    if alone:
        yield pointer_argument(plan, "dq")
    yield pointer_argument(plan, "dk")
    yield pointer_argument(plan, "dv")
    yield _row_pointer("lse_log2")
    yield _row_pointer("delta")
    yield from _lengths(plan)
    if plan.driver == "tile_map":
        yield Argument("tile_map_ptr", "pointer", "*i32", of="tile_map", divisibility=4)
    if alone or roles.ordered:  # otherwise the hardware hands out tiles
        yield Argument("tile_counter", "pointer", "*u32", of="tile_counter", divisibility=4)
    yield from tensor_pointers(plan.variant)
    yield from _strides(plan, ("dq", "dk", "dv") if alone else ("dk", "dv"))
    if plan.driver == "tile_map":
        yield from _map_strides()
    yield from tensor_shapes(plan.variant)
    yield from _sizes(plan, "kv_tiles")
    if not plan.varlen:
        yield Argument("q_tiles", "size", "i32", of="q_tiles")
    if plan.driver == "tile_map":
        yield Argument("words", "size", "i32", of="words")
    yield Argument("softmax_scale", "scale", "fp32")
    yield from scalar_arguments(plan.variant)
    yield Argument("has_seqused_k", "present", "i32", of="seqused_k")


def _dq(plan: Plan) -> Iterator[Argument]:
    yield _sums()
    yield pointer_argument(plan, "dq")
    if plan.varlen:
        yield Argument("cu_seqlens_q_ptr", "pointer", "*i32", of="cu_seqlens_q", divisibility=4)
    yield from tensor_pointers(plan.variant)
    yield from _strides(plan, ("dq",))
    yield from tensor_shapes(plan.variant)
    yield from _sizes(plan, "q_tiles")
    yield Argument("softmax_scale", "scale", "fp32")
    yield from scalar_arguments(plan.variant)


def _classifier(plan: Plan) -> Iterator[Argument]:
    yield Argument("tile_map_ptr", "pointer", "*i32", of="tile_map", divisibility=4)
    yield from _lengths(plan)
    yield from tensor_pointers(plan.variant)
    yield from _map_strides()
    yield from tensor_shapes(plan.variant)
    yield from _sizes(plan, "kv_tiles")
    yield Argument("words", "size", "i32", of="words")
    yield Argument("map_heads", "size", "i32", of="map_heads")
    yield from scalar_arguments(plan.variant)
    yield Argument("has_seqused_k", "present", "i32", of="seqused_k")


def _sums() -> Argument:
    return Argument("dq_sum_ptr", "pointer", "*fp32", of="dq_sum", divisibility=16)


def _row_pointer(name: str) -> Argument:
    return Argument(f"{name}_ptr", "pointer", "*fp32", of=name, divisibility=4)


def _lengths(plan: Plan) -> Iterator[Argument]:
    for name in ("cu_seqlens_q", "cu_seqlens_k") if plan.varlen else ():
        yield Argument(f"{name}_ptr", "pointer", "*i32", of=name, divisibility=4)
    yield Argument("seqused_k_ptr", "pointer", "*i32", of="seqused_k", divisibility=4)


def _strides(plan: Plan, names: tuple[str, ...]) -> Iterator[Argument]:
    for name in names:
        for axis in STRIDED[plan.layout]:
            yield Argument(
                f"stride_{name}_{axis}", "stride", "i64", of=name, axis=axis, divisibility=16 // plan.dtype.bytes
            )


def _map_strides() -> Iterator[Argument]:
    for axis in ("b", "h", "kv"):
        yield Argument(f"stride_tile_map_{axis}", "stride", "i64", of="tile_map", axis=axis)


def _sizes(plan: Plan, tiles: str) -> Iterator[Argument]:
    """Yield lengths and counts, as those of the forward; blocks are ``tiles``."""
    seqlen_q = "max_seqlen_q" if plan.varlen else "seqlen_q"
    for name in (
        "batch", "heads", "kv_heads", "group", "section", tiles, seqlen_q, "max_seqlen_k", "total_q", "total_k",
    ):  # fmt: skip
        yield Argument(name, "size", "i32", of=name)
