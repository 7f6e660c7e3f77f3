"""The argument list of a CUDA forward kernel, in order: its signature and the runtime's packing both follow it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from attngen.plan.arguments import scalar_arguments, tensor_pointers, tensor_shapes
from attngen.plan.model import Argument, Plan

if TYPE_CHECKING:
    from attngen.plan.schedules.hopper_forward import HopperForward

_ROWS = 64


def cuda_arguments(plan: Plan, roles: HopperForward) -> tuple[Argument, ...]:
    """Return the arguments of the forward kernel of ``plan``."""
    return tuple(_forward(plan, roles))


def cuda_classifier_arguments(plan: Plan) -> tuple[Argument, ...]:
    """Return the arguments of the kernel that computes the tile map."""
    return tuple(_classifier(plan))


def _forward(plan: Plan, roles: HopperForward) -> Iterator[Argument]:
    columns = roles.box_columns
    yield tensor_map(plan, "q", plan.tile_m, columns, packed=plan.pack_gqa)
    yield tensor_map(plan, "k", plan.tile_n, columns)
    yield tensor_map(plan, "v", plan.tile_n, columns, window=plan.tile_n)
    if roles.staged and not plan.varlen:
        yield tensor_map(plan, "out", _ROWS, columns, packed=plan.pack_gqa)
    yield Argument("out_ptr", "pointer", f"*{plan.dtype.name}", of="out", divisibility=16)
    yield Argument("lse_ptr", "pointer", "*fp32", of="lse", divisibility=4)
    yield from _sequences(plan)
    if plan.driver == "tile_map":
        yield Argument("tile_map_ptr", "pointer", "*i32", of="tile_map", divisibility=4)
    if roles.persistent:
        yield Argument("tile_counter", "pointer", "*u32", of="tile_counter", divisibility=4)
    yield from tensor_pointers(plan.variant)
    for axis in ("s", "h") if plan.varlen else ("b", "s", "h"):
        yield Argument(f"stride_out_{axis}", "stride", "i64", of="out", axis=axis)
    if plan.driver == "tile_map":
        yield from _map_strides()
    yield from tensor_shapes(plan.variant)
    yield from _sizes(plan)
    if plan.driver == "tile_map":
        yield Argument("words", "size", "i32", of="words")
    yield Argument("softmax_scale", "scale", "fp32")
    yield from scalar_arguments(plan.variant)
    yield Argument("write_lse", "present", "i32", of="lse")
    yield Argument("has_seqused_k", "present", "i32", of="seqused_k")


def _classifier(plan: Plan) -> Iterator[Argument]:
    yield Argument("tile_map_ptr", "pointer", "*i32", of="tile_map", divisibility=4)
    yield from _sequences(plan)
    yield from tensor_pointers(plan.variant)
    yield from _map_strides()
    yield from tensor_shapes(plan.variant)
    yield from _sizes(plan)
    yield Argument("words", "size", "i32", of="words")
    yield Argument("map_heads", "size", "i32", of="map_heads")
    yield from scalar_arguments(plan.variant)
    yield Argument("has_seqused_k", "present", "i32", of="seqused_k")


def tensor_map(
    plan: Plan, of: str, rows: int, columns: int, *, window: int | None = None, packed: bool = False
) -> Argument:
    """Return a tensor map whose box is ``rows`` rows of the ``columns`` that one copy brings."""
    box = (rows, 1, columns) if window is None else (1, rows, 1, columns)
    if not plan.varlen:
        box = (1, *box)
    return Argument(
        f"{of}_map",
        "descriptor",
        "tensor_map",
        of=of,
        box=box,
        swizzle=columns * plan.dtype.bytes,
        window=window,
        packed=packed,
    )


def _sequences(plan: Plan) -> Iterator[Argument]:
    if plan.varlen:
        yield Argument("cu_seqlens_q_ptr", "pointer", "*i32", of="cu_seqlens_q", divisibility=4)
        yield Argument("cu_seqlens_k_ptr", "pointer", "*i32", of="cu_seqlens_k", divisibility=4)
    yield Argument("seqused_k_ptr", "pointer", "*i32", of="seqused_k", divisibility=4)


def _map_strides() -> Iterator[Argument]:
    for axis in ("b", "h", "q"):
        yield Argument(f"stride_tile_map_{axis}", "stride", "i64", of="tile_map", axis=axis)


def _sizes(plan: Plan) -> Iterator[Argument]:
    """Yield lengths and counts; a sequence may be shorter than ``max_seqlen_k``; ``group_bits`` is log2(group)."""
    seqlen_q = "max_seqlen_q" if plan.varlen else "seqlen_q"
    for name in (
        "batch",
        "heads",
        "kv_heads",
        "group",
        *(["group_bits"] if plan.pack_gqa else []),
        "section",
        "q_tiles",
        seqlen_q,
        "max_seqlen_k",
        "total_q",
        "total_k",
    ):
        yield Argument(name, "size", "i32", of=name)
