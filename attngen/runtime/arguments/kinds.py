"""The kind of a ragged call, and its sizes: a server's calls repeat their kind, but never their sizes.

The kind is all that a call is beside lengths: variant, settings, dtypes, devices, alignment, strides, head counts, the
cache. What is checked, selected and packed once for a kind serves calls of any sizes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from attngen.lang.ir import MAX_SEQLEN
from attngen.lang.variant import Variant
from attngen.runtime.arguments.checked import Call, View
from attngen.runtime.arguments.given import TENSORS, Given
from attngen.runtime.arguments.keys import PLAIN, note

#: Places of the vectors of lengths and offsets, and of other tensors, in ``Given``.
_SEQUSED_K, _CU_Q, _CU_K, _TABLE, _OUT = map(
    TENSORS.index, ("seqused_k", "cu_seqlens_q", "cu_seqlens_k", "page_table", "out")
)
_DESCALES = range(3, _SEQUSED_K)
_NUMBERS = (int, float, bool)

#: Rows of all heads that any kernel counts: its blocks, and rows beyond the end of the last one, too.
_MOST_ROWS = 2**31 - 1 - 256

#: Extents that differ between calls of one kind.
_SIZES = frozenset({"b", "seqlen_q", "seqlen_k", "total_q", "total_k"})


class Sizes(NamedTuple):
    """Extents of the tensors of a ragged call, as given; -1 of what it does not have."""

    rows: int  # of q, along its first axis
    keys: int  # of k and v, along their first axis; -1 of a cache
    values: int
    max_seqlen_q: Any
    max_seqlen_k: Any
    seqused_k: int
    cu_seqlens_q: int
    cu_seqlens_k: int
    table: int
    table_width: int
    table_stride: int
    out: int
    scales: tuple[tuple[bool, int], ...]  # see ``note_scale``


class UnlikeError(Exception):
    """A tensor that calls of a kind do not have: checks look at it in each call."""


def note_vector(key: list[Any], vector: Any) -> tuple[int, int]:
    """Add the device of a vector of lengths or offsets to a key; return its address and its length."""
    if type(vector) not in PLAIN or vector.dtype is not torch.int32 or not vector.is_contiguous():
        raise UnlikeError
    (length,) = vector.shape
    address: int = vector.data_ptr()
    if address & 3 or not address or vector.is_neg():
        raise UnlikeError
    key.append(vector.get_device())
    return address, length


def note_rows(key: list[Any], tensor: Any) -> tuple[int, int]:
    """Add to a key all of a tensor but the extent of its first axis; return its address and this extent."""
    if type(tensor) not in PLAIN:
        raise UnlikeError
    rows, *rest = tensor.shape
    address: int = tensor.data_ptr()
    key += (
        tensor.dtype, *rest, tensor.stride(), tensor.get_device(), address & 15, tensor.is_neg(), rows > 1, not address,
        tensor.requires_grad and torch.is_grad_enabled(),
    )  # fmt: skip
    return address, rows


def note_table(key: list[Any], table: Any) -> tuple[int, int, int, int]:
    """Add the device of a page table to a key; return its address, rows, columns and the stride of rows."""
    if type(table) not in PLAIN or table.dtype is not torch.int32:
        raise UnlikeError
    rows, width = table.shape
    stride, step = table.stride()
    address: int = table.data_ptr()
    if address & 3 or not address or (width > 1 and step != 1) or table.is_neg():
        raise UnlikeError
    key.append(table.get_device())
    return address, rows, width, stride


def note_scale(key: list[Any], scale: Any, pages: int | None) -> tuple[int, tuple[bool, int] | None]:
    """Add to a key all of a scale but the number of sequences; return its address, and what there must be so many
    sequences as, or not: scales of pages are told from those of sequences by that. ``pages``: those of the cache; None
    without pages."""
    if type(scale) not in PLAIN:
        raise UnlikeError
    shape = scale.shape
    if len(shape) == 2 and shape[0] == pages:
        return note(key, scale), (False, shape[0])
    if len(shape) == 2:
        address, rows = note_rows(key, scale)
        return address, (True, rows)
    if len(shape) > 2 and pages is None:  # of blocks of tokens
        raise UnlikeError
    return note(key, scale), None


def kind_of(
    given: Given, addresses: list[int], shape: Any, strides: Any, *common: Any
) -> tuple[tuple[Any, ...], tuple[Any, ...]] | None:
    """Key of the kind of a ragged call on a GPU, and its ``Sizes`` as a plain tuple; None if it has no kind. Enters the
    addresses of the tensors beside q, k and v.

    ``shape``, ``strides``: of q. ``common``: what the key has of the call beside tensors and settings.
    """
    q, k, v, used, cu_q = given.q, given.k, given.v, given.seqused_k, given.cu_seqlens_q
    k_shape, v_shape = k.shape, v.shape
    key: list[Any] = [
        *common, given.form, given.layout, given.backend, given.package, given.num_splits, given.split_size,
        given.out_dtype,
        q.dtype, shape[1:], strides, q.get_device(), addresses[0] & 15, q.is_neg(),
        k.dtype, k.stride(), k.get_device(), addresses[1] & 15, k.is_neg(),
        v.dtype, v.stride(), v.get_device(), addresses[2] & 15, v.is_neg(), used is None, cu_q is None,
    ]  # fmt: skip
    keys = values = used_of = cu_q_of = cu_k_of = table_of = width = table_stride = rows_out = -1
    scales: tuple[tuple[bool, int], ...] = ()
    try:
        rows, pages = shape[0], None
        if given.form == "paged":
            key += (rows > 1, k_shape, v_shape, given.out is None)
            addresses[_TABLE], table_of, width, table_stride = note_table(key, given.page_table)
            if given.out is not None:
                addresses[_OUT], rows_out = note_rows(key, given.out)
            pages = k_shape[0]
        else:
            keys, values = k_shape[0], v_shape[0]
            key += (rows > 1, k_shape[1:], v_shape[1:], keys > 1, values > 1)
            addresses[_CU_K], cu_k_of = note_vector(key, given.cu_seqlens_k)
        if used is not None:
            addresses[_SEQUSED_K], used_of = note_vector(key, used)
        if cu_q is not None:
            addresses[_CU_Q], cu_q_of = note_vector(key, cu_q)
        for place in _DESCALES:
            scale = given[place]
            if scale is not None:
                key.append(place)
                addresses[place], of = note_scale(key, scale, pages)
                if of is not None:
                    scales += (of,)
    except (UnlikeError, ValueError, IndexError, RuntimeError):  # also tensors of another rank, and without memory
        return None
    if given.arguments:
        for name, value in given.arguments.items():
            key.append(name)
            if type(value) not in _NUMBERS and isinstance(value, Tensor):
                addresses.append(note(key, value))
    return tuple(key), (
        rows, keys, values, given.max_seqlen_q, given.max_seqlen_k, used_of, cu_q_of, cu_k_of, table_of, width,
        table_stride, rows_out, scales,
    )  # fmt: skip


def has_kinds(variant: Variant) -> bool:
    """Whether what a variant declares has the same shapes and bounds in calls of any sizes."""
    extents = {extent for tensor in variant.tensors for extent in tensor.shape}
    bounds = {bound for scalar in variant.scalars for bound in (scalar.min, scalar.max)}
    return _SIZES.isdisjoint({*extents, *bounds, *(scalar.name for scalar in variant.scalars)})


def resize(call: Call, given: tuple[Any, ...]) -> bool:
    """Give a call, bound for others of its kind, these ``Sizes``. False, and no change, if something about them needs a
    look: they may be wrong, or nothing may be left to compute."""
    sizes = Sizes._make(given)
    max_q, max_k = sizes.max_seqlen_q, sizes.max_seqlen_k
    if call.layout == "paged":
        batch, total_q = sizes.table, sizes.rows
        seqlen_k = total_k = sizes.table_width * call.page_size
        if call.order == "thd":
            if type(max_q) is not int or sizes.cu_seqlens_q != batch + 1:
                return False
        else:
            if total_q != batch or not (max_q is None or (type(max_q) is int and max_q == call.seqlen_q)):
                return False
            max_q = call.seqlen_q
            total_q *= max_q
        if sizes.seqused_k != batch or sizes.out not in (-1, sizes.rows):
            return False
    else:
        batch, total_q, total_k, seqlen_k = sizes.cu_seqlens_q - 1, sizes.rows, sizes.keys, max_k
        if type(max_q) is not int or type(max_k) is not int or sizes.values != total_k:
            return False
        if sizes.cu_seqlens_k != batch + 1 or sizes.seqused_k not in (-1, batch):
            return False
    if not (batch > 0 and 0 < max_q <= MAX_SEQLEN and 0 < seqlen_k <= MAX_SEQLEN):
        return False
    if not (0 < total_q <= MAX_SEQLEN and 0 < total_k <= MAX_SEQLEN):
        return False
    if batch * max_q * call.heads > _MOST_ROWS or any((count == batch) is not same for same, count in sizes.scales):
        return False
    call.batch, call.seqlen_q, call.seqlen_k, call.total_q, call.total_k = batch, max_q, seqlen_k, total_q, total_k
    call.extents = {
        **call.extents, "b": batch, "seqlen_q": max_q, "seqlen_k": seqlen_k, "total_q": total_q, "total_k": total_k,
    }  # fmt: skip
    call.q = _with_rows(call.q, total_q)
    if call.out is not None:
        call.out = _with_rows(call.out, total_q)
    if call.layout != "paged":
        call.k, call.v = _with_rows(call.k, total_k), _with_rows(call.v, total_k)
    return True


def _with_rows(view: View, rows: int) -> View:
    return view if view.shape[0] == rows else View(view.axes, (rows, *view.shape[1:]), view.strides)
