"""The kind of a ragged call, and its sizes: a server's calls repeat their kind, but never their sizes.

The kind is all that a call is beside lengths: variant, settings, dtypes, devices, alignment, strides, head counts, the
cache. What is checked, selected and packed once for a kind serves calls of any sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from attngen.lang.ir import MAX_SEQLEN
from attngen.lang.variant import Variant
from attngen.runtime.arguments.checked import Call, View
from attngen.runtime.arguments.given import TENSORS, Given, kind_settings_of
from attngen.runtime.arguments.keys import NUMBERS, PLAIN, note
from attngen.runtime.arguments.seen import NONE_FREE, Free

#: Places of the vectors of lengths and offsets, and of other tensors, in ``Given``.
_Q, _K, _V, _SEQUSED_K, _CU_Q, _CU_K, _TABLE, _OUT = map(
    TENSORS.index, ("q", "k", "v", "seqused_k", "cu_seqlens_q", "cu_seqlens_k", "page_table", "out")
)
#: Those that hold int32.
INDEX_VECTORS = frozenset({_SEQUSED_K, _CU_Q, _CU_K, _TABLE})
_DESCALES = range(3, _SEQUSED_K)

#: Rows of all heads that any kernel counts: its blocks, and rows beyond the end of the last one, too.
_MOST_ROWS = 2**31 - 1 - 256

#: Extents that differ between calls of one kind.
_SIZES = frozenset({"b", "seqlen_q", "seqlen_k", "total_q", "total_k"})


class UnlikeError(Exception):
    """A tensor that calls of a kind do not have: checks look at it in each call."""


def vector_at(vector: Tensor, device: int) -> int:
    """Address of a vector of lengths or offsets, which has nothing but its length that calls differ in."""
    if type(vector) not in PLAIN or vector.dtype is not torch.int32 or vector.get_device() != device:
        raise UnlikeError
    address: int = vector.data_ptr()
    if len(vector.shape) != 1 or address & 3 or not address or not vector.is_contiguous():
        raise UnlikeError
    return address


def table_at(table: Tensor, device: int) -> int:
    """Address of a page table, which has nothing but its extents and the stride of rows that calls differ in."""
    if type(table) not in PLAIN or table.dtype is not torch.int32 or table.get_device() != device:
        raise UnlikeError
    _, width = table.shape
    address: int = table.data_ptr()
    if address & 3 or not address or (width > 1 and table.stride(1) != 1):
        raise UnlikeError
    return address


def note_rows(key: list[object], tensor: Tensor, device: int, axis: int = 0) -> int:
    """Add to a key all of a tensor but the extent of an axis, and what lies before it; return its address."""
    shape = tensor.shape
    address: int = tensor.data_ptr()
    if type(tensor) not in PLAIN or tensor.get_device() != device or tensor.is_neg() or not address:
        raise UnlikeError
    strides = tensor.stride()
    key += (
        tensor.dtype, shape[axis + 1 :], strides[axis:] if axis else strides, address & 15, shape[axis] > 1,
        tensor.requires_grad and torch.is_grad_enabled(),
    )  # fmt: skip
    return address


def note_scale(key: list[object], scale: Tensor, pages: int | None, device: int) -> int:
    """Add to a key all of a scale but the number of sequences; return its address. ``pages``: pages of the cache; None
    without pages."""
    if type(scale) not in PLAIN:
        raise UnlikeError
    shape = scale.shape
    if len(shape) == 2 and shape[0] != pages:
        return note_rows(key, scale, device)
    if len(shape) > 2 and pages is None:  # of blocks of tokens
        raise UnlikeError
    return note(key, scale)


def rows_of_scales_fit(scales: Iterable[Tensor | None], pages: int | None, batch: int) -> bool:
    """Whether the scales of a call, of which others of its kind have as many axes, are those of so many sequences: one
    of two axes has a row for each page or for each sequence, and the number of rows says which."""
    for scale in scales:
        if scale is not None and scale.dim() == 2:
            rows = scale.shape[0]
            if (rows == batch) is not (rows != pages):
                return False
    return True


def by_page(scales: tuple[Tensor | None, ...], pages: int | None) -> tuple[bool, ...]:
    """Whether each scale of a cache has a row for each of its ``pages``; else it has one for each sequence, or none.

    Checks of tensors whose rows may differ do not tell these apart.
    """
    return tuple([scale is not None and scale.dim() == 2 and scale.shape[0] == pages for scale in scales])


def kind_of(
    given: Given, addresses: list[int], shape: Sequence[int], strides: Sequence[int], common: tuple[object, ...]
) -> tuple[object, ...] | None:
    """Key of the kind of a ragged call on a GPU; None if it has none. Enters the addresses of tensors but q, k and v.

    ``shape``, ``strides``: of q. ``common``: what the key has of the call beside tensors and settings.
    """
    q, k, v, used, cu_q, out, arguments = (
        given.q, given.k, given.v, given.seqused_k, given.cu_seqlens_q, given.out, given.arguments
    )  # fmt: skip
    k_shape, v_shape, device = k.shape, v.shape, q.get_device()
    try:
        pages = None
        if k.get_device() != device or v.get_device() != device or q.is_neg() or k.is_neg() or v.is_neg():
            return None
        key: list[object] = [
            common, kind_settings_of(given), device, shape[0] > 1, q.dtype, shape[1:], strides, k.dtype, k.stride(),
            v.dtype, v.stride(), addresses[0] & 15, addresses[1] & 15, addresses[2] & 15,
            addresses[1] == addresses[2], used is None, cu_q is None, out is None,
        ]  # fmt: skip
        if given.form == "paged":
            key += (k_shape, v_shape)
            addresses[_TABLE], pages = table_at(given.page_table, device), k_shape[0]
        else:
            key += (k_shape[1:], v_shape[1:], k_shape[0] > 1, v_shape[0] > 1)
            addresses[_CU_K] = vector_at(given.cu_seqlens_k, device)
        if out is not None:
            addresses[_OUT] = note_rows(key, out, device)
        if used is not None:
            addresses[_SEQUSED_K] = vector_at(used, device)
        if cu_q is not None:
            addresses[_CU_Q] = vector_at(cu_q, device)
        for place in _DESCALES:
            scale = given[place]
            if scale is not None:
                key.append(place)
                addresses[place] = note_scale(key, scale, pages, device)
    except (UnlikeError, AttributeError, ValueError, IndexError, RuntimeError):  # also other ranks, and no memory
        return None
    if arguments:
        for name, value in arguments.items():
            key.append(name)
            if type(value) not in NUMBERS and isinstance(value, Tensor):
                addresses.append(note(key, value))
    return tuple(key)


def sizes_of(given: Given) -> tuple[object, ...]:
    """All that calls of a kind differ in beside addresses, as a key of numbers."""
    q, table = given.q, given.page_table
    sizes: tuple[object, ...]
    if table is not None:
        used: Tensor = given.seqused_k
        starts, out = given.cu_seqlens_q, given.out
        sizes = (
            given.max_seqlen_q, q.shape[0], *table.shape, table.stride(0), used.shape[0],
            -1 if starts is None else starts.shape[0], -1 if out is None else out.shape[0],
        )  # fmt: skip
    else:
        cu_q: Tensor = given.cu_seqlens_q
        cu_k: Tensor = given.cu_seqlens_k
        lengths = given.seqused_k
        sizes = (
            given.max_seqlen_q, given.max_seqlen_k, q.shape[0], given.k.shape[0], given.v.shape[0], cu_q.shape[0],
            cu_k.shape[0], -1 if lengths is None else lengths.shape[0],
        )  # fmt: skip
    k_scale, q_scale, v_scale = given.k_descale, given.q_descale, given.v_descale
    if k_scale is not None or q_scale is not None or v_scale is not None:
        sizes += tuple([None if scale is None else scale.shape for scale in (q_scale, k_scale, v_scale)])
    return sizes


def free_of(given: Given) -> dict[int, Free]:
    """Axes of each tensor, by its place in ``TENSORS``, that may differ between calls of one kind. Calls with a single
    row of q, k or v are kinds of their own, since the stride of a single row is arbitrary."""
    first: Free = (0,), ()
    rows = first if given.q.shape[0] > 1 else NONE_FREE
    free = dict.fromkeys((_SEQUSED_K, _CU_Q, _CU_K), first) | {_Q: rows, _OUT: rows, _TABLE: ((0, 1), (0,))}
    pages = None if given.page_table is None else given.k.shape[0]
    if pages is None:
        free |= {place: first for place, tensor in ((_K, given.k), (_V, given.v)) if tensor.shape[0] > 1}
    for place, scale in zip(_DESCALES, (given.q_descale, given.k_descale, given.v_descale), strict=True):
        if scale is not None and scale.dim() == 2 and scale.shape[0] not in (1, pages):
            free[place] = first
    return free


def has_kinds(variant: Variant) -> bool:
    """Whether what a variant declares has the same shapes and bounds in calls of any sizes."""
    extents = {extent for tensor in variant.tensors for extent in tensor.shape}
    bounds = {bound for scalar in variant.scalars for bound in (scalar.min, scalar.max)}
    return _SIZES.isdisjoint({*extents, *bounds, *(scalar.name for scalar in variant.scalars)})


def resize(call: Call, given: Given) -> bool:
    """Give a call the sizes of another one of its kind, but for its ``extents`` and the rows of its tensors. False, and
    no change, if something about them needs a look: they may be wrong, or nothing may be left to compute."""
    used, cu_q, table, out, max_q = (
        given.seqused_k, given.cu_seqlens_q, given.page_table, given.out, given.max_seqlen_q
    )  # fmt: skip
    total_q = rows = given.q.shape[0]
    if table is not None:
        batch, width = table.shape
        seqlen_k = total_k = width * call.page_size
        if cu_q is None:
            if rows != batch or not (max_q is None or (type(max_q) is int and max_q == call.seqlen_q)):
                return False
            max_q = call.seqlen_q
            total_q *= max_q
        elif type(max_q) is not int or cu_q.shape[0] != batch + 1:
            return False
    else:
        starts: Tensor = cu_q
        cu_k: Tensor = given.cu_seqlens_k
        batch, seqlen_k, total_k = starts.shape[0] - 1, given.max_seqlen_k, given.k.shape[0]
        if type(max_q) is not int or type(seqlen_k) is not int or given.v.shape[0] != total_k:
            return False
        if cu_k.shape[0] != batch + 1:
            return False
    if (used is not None and used.shape[0] != batch) or (out is not None and out.shape[0] != rows):
        return False
    if not _are_allowed(call, batch, max_q, seqlen_k, total_q, total_k):
        return False
    if given.k_descale is not None or given.q_descale is not None or given.v_descale is not None:
        pages = None if table is None else given.k.shape[0]
        if not rows_of_scales_fit((given.q_descale, given.k_descale, given.v_descale), pages, batch):
            return False
    call.batch, call.seqlen_q, call.seqlen_k, call.total_q, call.total_k = batch, max_q, seqlen_k, total_q, total_k
    return True


def resize_batch(call: Call, batch: int, rows: int, longest: int, width: int) -> bool:
    """As ``resize``, by the sizes of a paged batch of packed queries whose tensors were looked at: its sequences, rows
    of q, most queries of a sequence, and columns of the page table."""
    seqlen_k = width * call.page_size
    if not _are_allowed(call, batch, longest, seqlen_k, rows, seqlen_k):
        return False
    call.batch, call.seqlen_q, call.seqlen_k, call.total_q, call.total_k = batch, longest, seqlen_k, rows, seqlen_k
    return True


def _are_allowed(call: Call, batch: int, seqlen_q: int, seqlen_k: int, total_q: int, total_k: int) -> bool:
    """Whether kernels count so many rows, and there is something to compute."""
    if not (batch > 0 and 0 < seqlen_q <= MAX_SEQLEN and 0 < seqlen_k <= MAX_SEQLEN):
        return False
    return 0 < total_q <= MAX_SEQLEN and 0 < total_k <= MAX_SEQLEN and batch * seqlen_q * call.heads <= _MOST_ROWS


def resize_tensors(call: Call) -> None:
    """Give the tensors of a call the rows of its sizes."""
    call.q = _with_rows(call.q, call.total_q)
    if call.out is not None:
        call.out = _with_rows(call.out, call.total_q)
    if call.layout != "paged":
        call.k, call.v = _with_rows(call.k, call.total_k), _with_rows(call.v, call.total_k)


def extents_of(call: Call) -> dict[str, int]:
    """Extents by name of a call that was given other sizes."""
    return {
        **call.extents, "b": call.batch, "seqlen_q": call.seqlen_q, "seqlen_k": call.seqlen_k, "total_q": call.total_q,
        "total_k": call.total_k,
    }  # fmt: skip


def _with_rows(view: View, rows: int) -> View:
    return view if view.shape[0] == rows else View(view.axes, (rows, *view.shape[1:]), view.strides)
