"""The arguments of a call whose keys lie in pages, checked and named. What tensors hold is not read, as everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attngen.errors import CallError, suggest
from attngen.lang.ir import MAX_SEQLEN
from attngen.lang.variant import Variant
from attngen.runtime.arguments.checked import PAGE_LAYOUTS, Call, View, view
from attngen.runtime.arguments.given import Given
from attngen.runtime.arguments.shapes import (
    check_alike,
    check_rank,
    check_written,
    common,
    finish,
    index_vector,
    length_of,
)

#: Rows of queries and heads of one KV head up to which keys are shared among blocks: those of an MMA of one warp.
FEW_ROWS = 16


@dataclass(frozen=True, slots=True)
class Paging:
    """Queries and keys of a paged call, as the caller passed them; ``cu_seqlens_q`` is None for queries of equal
    lengths. ``out``: where the result goes, None for a new tensor."""

    page_table: object
    cu_seqlens_q: object = None
    max_seqlen_q: object = None
    num_splits: object = None
    split_size: object = None
    out: object = None


def rows_view(shape: Sequence[int], strides: Sequence[int]) -> View | None:
    """Return the view of (batch, seqlen, heads, head_dim) as packed rows; None where rows have no one stride."""
    batch, rows, *last = tuple(shape)
    outer, step, *steps = tuple(strides)
    if batch > 1 and rows > 1 and outer != rows * step:
        return None
    return View(("s", "h", "d"), (batch * rows, *last), (outer if rows == 1 else step, *steps))


def as_rows(q: Tensor) -> Tensor:
    """Return q with rows at one stride, as kernels read them: (batch, seqlen_q, …) is copied where it has two."""
    if isinstance(q, torch.Tensor) and q.dim() == 4:
        batch, rows = q.shape[:2]
        if batch > 1 and rows > 1 and q.stride(0) != rows * q.stride(1):
            return q.contiguous()
    return q


def in_rows(given: Given) -> Given:
    """Return a call with keys in pages with q as ``as_rows`` returns it; any other call as it is."""
    q = given.q
    if given.form != "paged" or not isinstance(q, torch.Tensor) or q.dim() != 4 or q.shape[1] == 1:
        return given
    rows = as_rows(q)
    return given if rows is q else given._replace(q=rows)


def bind_paged(
    variant: Variant,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    paging: Paging | Given,
    *,
    page_layout: str = "NHD",
    **settings: Any,
) -> Call:
    """Check a call with keys in pages and resolve its extents. Raises CallError.

    q is (total_q, h, d) with ``cu_seqlens_q``, else (b, s, h, d); k and v are (pages, page_size, hk, d), or
    (pages, hk, page_size, d) with ``page_layout='HND'``. ``settings``: those of ``shapes.finish``.
    """
    if page_layout not in PAGE_LAYOUTS:
        raise CallError(
            f"page_layout must be one of {', '.join(PAGE_LAYOUTS)}, got {page_layout!r}"
            f"{suggest(str(page_layout), PAGE_LAYOUTS)}"
        )
    used = variant.packed_keys()
    if used is not None:
        raise CallError(
            f"{variant.name}: it reads '{used}', the place of keys in a packed tensor, which keys in pages do not have"
        )
    packed = paging.cu_seqlens_q is not None
    of_q = "total_q x heads x head_dim with cu_seqlens_q" if packed else "batch x seqlen_q x heads x head_dim"
    of_pages = "pages x " + ("page_size x kv_heads" if page_layout == "NHD" else "kv_heads x page_size") + " x head_dim"
    tensors = {"q": q, "k_pages": k, "v_pages": v}
    check_rank("q", q, 3 if packed else 4, of_q)
    check_rank("k_pages", k, 4, of_pages)
    check_rank("v_pages", v, 4, of_pages)
    check_alike(tensors)
    rows = view(q.shape, q.stride(), "thd") if packed else rows_view(q.shape, q.stride())
    if rows is None:
        raise CallError(f"q's rows must have one stride, got strides {q.stride()}; q.contiguous() helps")
    pages = {
        name: view(tensors[f"{name}_pages"].shape, tensors[f"{name}_pages"].stride(), page_layout) for name in "kv"
    }
    (num_pages, page_size), of_v = pages["k"].shape[:2], pages["v"].shape[:2]
    if of_v != (num_pages, page_size):
        raise CallError(f"k_pages has {num_pages} pages of {page_size} keys, but v_pages has {of_v[0]} of {of_v[1]}")
    call = common(variant, q, k, {"q": rows, **pages}, "paged", "thd" if packed else "bshd")
    call.page_layout, call.page_size, call.num_pages = page_layout, page_size, num_pages
    call.page_table = _page_table(paging.page_table, call.device)
    call.batch, max_pages = call.page_table.shape
    call.total_q = rows.shape[0]
    if packed:
        call.cu_seqlens_q = index_vector("cu_seqlens_q", paging.cu_seqlens_q, call.device)
        if call.cu_seqlens_q.shape[0] != call.batch + 1:
            raise CallError(
                f"cu_seqlens_q must have shape (batch + 1,) = ({call.batch + 1},), as page_table has {call.batch} "
                f"rows, got {tuple(call.cu_seqlens_q.shape)}"
            )
        if paging.max_seqlen_q is None:
            raise CallError("max_seqlen_q is needed with cu_seqlens_q: reading it there would wait for the GPU")
        call.seqlen_q = length_of("max_seqlen_q", paging.max_seqlen_q)
    else:
        if q.shape[0] != call.batch:
            raise CallError(f"q has batch {q.shape[0]}, but page_table has {call.batch} rows")
        call.seqlen_q = q.shape[1]
        if paging.max_seqlen_q is not None and length_of("max_seqlen_q", paging.max_seqlen_q) != call.seqlen_q:
            raise CallError(f"max_seqlen_q is {paging.max_seqlen_q}, but q has {call.seqlen_q} queries a sequence")
    if settings.get("seqused_k") is None:
        raise CallError("seqused_k is needed: the keys of each sequence, (batch,) int32")
    call.seqlen_k = call.total_k = min(max_pages * page_size if num_pages else 0, MAX_SEQLEN)
    call.num_splits, call.split_size = (_count(name, getattr(paging, name)) for name in ("num_splits", "split_size"))
    if call.num_splits and call.split_size:
        raise CallError("num_splits and split_size both say how keys are split; pass only one of them")
    call.out = given_out(paging.out, call, q)
    return finish(call, **settings)


def _page_table(value: object, device: torch.device) -> torch.Tensor:
    """Check a page table: int32 (batch, max_pages), rows contiguous, on the device of q."""
    if not isinstance(value, torch.Tensor):
        raise CallError(f"page_table must be a torch.Tensor, got {type(value).__name__}")
    if value.dtype != torch.int32 or value.dim() != 2:
        raise CallError(
            f"page_table must be int32 of shape (batch, max_pages), got {value.dtype} of shape {tuple(value.shape)}"
        )
    if value.device != device:
        raise CallError(f"page_table is on {value.device}, but q is on {device}")
    if value.shape[1] > 1 and value.stride(1) != 1:
        raise CallError(f"page_table's rows must be contiguous, got strides {value.stride()}")
    return value


def _count(name: str, value: object) -> int:
    """Return a number that a call may leave out, 0 if it does."""
    if value is None:
        return 0
    number = length_of(name, value)
    if not 0 < number <= MAX_SEQLEN:
        raise CallError(f"{name} must be from 1 to {MAX_SEQLEN}, got {number}")
    return number


def given_out(out: object, call: Call, q: torch.Tensor) -> View | None:
    """Return the view of a result that the caller allocated, of pages as packed rows; None if there is none."""
    if out is None:
        return None
    if not isinstance(out, torch.Tensor):
        raise CallError(f"out must be a torch.Tensor, got {type(out).__name__}")
    for label, given, wanted in (
        ("shape", tuple(out.shape), call.out_shape()),
        ("dtype", out.dtype, call.out_dtype),
        ("device", out.device, q.device),
    ):
        if given != wanted:
            raise CallError(f"out has {label} {given}, but the result has {wanted}")
    check_written("out", out)
    if out.shape[-1] > 1 and out.stride(-1) != 1:
        raise CallError(f"out's last dimension must be contiguous, got strides {out.stride()}")
    if call.order == "thd" or call.layout == "dense":
        return view(out.shape, out.stride(), call.order)
    rows = rows_view(out.shape, out.stride())
    if rows is None:
        raise CallError(f"out's rows must have one stride, got strides {out.stride()}")
    return rows
