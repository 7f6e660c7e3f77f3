"""Appending keys and values to a cache, with rotary embedding of keys and queries on the way.

In plain torch, on any device: a few operations that read no number back, so that nothing waits for a GPU and a CUDA
graph can hold them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attngen.errors import CallError, suggest
from attngen.runtime import debug as debugging
from attngen.runtime import dispatch
from attngen.runtime.arguments import PAGE_LAYOUTS, check_rank, index_vector

_ROTARY_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def append_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor | None = None,
    *,
    page_table: Tensor | None = None,
    slots: Tensor | None = None,
    batch_index: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    page_layout: str = "NHD",
    q: Tensor | None = None,
    q_out: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
    rotary_offsets: Tensor | None = None,
) -> Tensor | None:
    """Write new keys and values behind those of a cache, in place, and return the rotated queries, if there are any.

    k is (batch, seqlen_new, kv_heads, head_dim), v the same with its own head_dim; or (total_new, kv_heads, head_dim)
    with ``cu_seqlens`` (batch + 1,) int32, of which rows behind the last sequence are not written. ``cache_seqlens``
    (batch,) int32 counts the keys that each sequence had before: new token j of sequence b is at position
    cache_seqlens[b] + j. It is not changed.

    Where a token goes:

    - with ``page_table`` (batch, max_pages) int32, to its place in the pages of its sequence;
    - with ``slots`` (batch, seqlen_new) or (total_new,), int32 or int64, to row ``slot % page_size`` of page
      ``slot // page_size``; a negative slot is not written;
    - with neither, to its row of a dense cache, entry b, or ``batch_index[b]`` (batch,) int32.

    k_cache and v_cache are (pages, page_size, kv_heads, head_dim), of a dense cache (entries, rows, kv_heads,
    head_dim); with ``page_layout='HND'`` the two axes in the middle stand the other way round.

    ``rotary_cos`` and ``rotary_sin`` (positions, rotary_dim / 2) rotate the first ``rotary_dim`` numbers of each key
    and of each query: pairs are number i and i + rotary_dim / 2, or with ``rotary_interleaved`` 2 i and 2 i + 1. A
    token takes the row of its position, or ``rotary_offsets[b]`` + j with ``rotary_offsets`` (batch,) int32. The
    arithmetic is float32, or float64 for float64. ``q`` is laid out as k, with any number of heads; the rotated
    queries go to ``q_out``, which may be q itself; left out, they are a new tensor.

    Positions beyond the cache or the page table, pages that the cache does not have, and positions beyond
    ``rotary_cos`` raise CallError on the CPU and under ``attngen.debug()``. On a GPU nothing is read back: tokens that
    have no place are not written. Two tokens must not have one place. There is no derivative.
    """
    tokens = _bind(
        k, v, k_cache, v_cache, cache_seqlens, page_table, slots, batch_index, cu_seqlens, page_layout, q, q_out,
        rotary_cos, rotary_sin, rotary_interleaved, rotary_offsets,
    )  # fmt: skip
    if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in (k, v, q)):
        raise CallError("append_kv has no derivative; torch.no_grad() tells that no gradient is wanted")
    if not tokens.batch or not tokens.index.shape[0]:
        return q if q is None or q_out is None else q_out.copy_(q)
    with torch.no_grad():
        place = _place(tokens, cache_seqlens, page_table, slots, batch_index)
        positions = None
        if rotary_cos is not None:
            start = cache_seqlens if rotary_offsets is None else rotary_offsets
            assert start is not None
            positions = start[tokens.sequence].long() + tokens.index
        if debugging.active() or (k.device.type == "cpu" and not dispatch.is_traced(k)):
            _check_contents(tokens, place, positions, rotary_cos, cu_seqlens, page_table)
        new_k, new_q = k.reshape(-1, *k.shape[-2:]), q
        if rotary_cos is not None and rotary_sin is not None and positions is not None:
            row = positions.clamp(0, max(rotary_cos.shape[0] - 1, 0))
            cos, sin = (table.index_select(0, row) for table in (rotary_cos, rotary_sin))
            new_k = _rotated(new_k, cos, sin, rotary_interleaved)
            if q is not None:
                new_q = _rotated(q.reshape(-1, *q.shape[-2:]), cos, sin, rotary_interleaved).view(q.shape)
        _write(k_cache, new_k, place, page_layout)
        _write(v_cache, v.reshape(-1, *v.shape[-2:]), place, page_layout)
        return new_q if q_out is None or new_q is None else q_out.copy_(new_q)


@dataclass(frozen=True, slots=True)
class _Tokens:
    """New tokens, and where they are to go: of each its sequence, its number in it, and whether it belongs to one."""

    sequence: Tensor
    index: Tensor
    belongs: Tensor
    batch: int
    entries: int  # pages of the cache, or sequences of a dense one
    rows: int  # of each


@dataclass(frozen=True, slots=True)
class _Place:
    """Page or entry, and row in it, of each token that is ``written``; ``wanted``: it was to be."""

    entry: Tensor
    row: Tensor
    wanted: Tensor
    written: Tensor


def _place(
    tokens: _Tokens, seqlens: Tensor | None, table: Tensor | None, slots: Tensor | None, batch_index: Tensor | None
) -> _Place:
    """Return where each token goes."""
    wanted, rows = tokens.belongs, max(tokens.rows, 1)
    if slots is not None:
        slot = slots.reshape(-1).long()
        wanted = wanted & (slot >= 0)
        entry, row = slot // rows, slot % rows
        known = slot < tokens.entries * tokens.rows
    else:
        assert seqlens is not None
        position = seqlens[tokens.sequence].long() + tokens.index
        known = position >= 0
        if table is not None:
            page, row = position // rows, position % rows
            known = known & (page < table.shape[1])
            entry = (
                table.flatten() if table.shape[1] == 0 else table[tokens.sequence, page.clamp(0, table.shape[1] - 1)]
            )
            entry = torch.zeros_like(page) if table.shape[1] == 0 else entry.long()
        else:
            entry = tokens.sequence if batch_index is None else batch_index[tokens.sequence].long()
            row = position
            known = known & (position < tokens.rows)
        known = known & (entry >= 0) & (entry < tokens.entries)
    return _Place(entry, row, wanted, wanted & known)


def _write(cache: Tensor, values: Tensor, place: _Place, page_layout: str) -> None:
    """Write the tokens that have a place. Those that have none write again what the first of the others does, so that
    nothing has to be counted; if there is no other, what stands in the first row."""
    cache = cache.transpose(1, 2) if page_layout == "HND" else cache
    if not cache.numel() or not values.numel():
        return
    written = place.written
    first = written.to(torch.uint8).argmax(keepdim=True)
    some = written.index_select(0, first)
    entry, row = (
        torch.where(written, places, torch.where(some, places.index_select(0, first), 0))
        for places in (place.entry, place.row)
    )
    otherwise = torch.where(some[:, None, None], values.index_select(0, first), cache[0, 0])
    cache.index_put_((entry, row), torch.where(written[:, None, None], values, otherwise))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Return (tokens, heads, head_dim) with its first numbers rotated, each token by its row of ``cos`` and ``sin``."""
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    half = cos.shape[-1]
    cos, sin = (table[:, None, :].to(compute) for table in (cos, sin))
    turned = x[..., : 2 * half].to(compute)
    pairs = turned.unflatten(-1, (half, 2)) if interleaved else turned.unflatten(-1, (2, half)).transpose(-1, -2)
    a, b = pairs.unbind(-1)
    rotated = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1 if interleaved else -2).flatten(-2)
    return torch.cat((rotated.to(x.dtype), x[..., 2 * half :]), dim=-1)


# --- checks -------------------------------------------------------------------------------------------------


def _bind(
    k: Any, v: Any, k_cache: Any, v_cache: Any, seqlens: Any, table: Any, slots: Any, batch_index: Any,
    cu_seqlens: Any, page_layout: Any, q: Any, q_out: Any, cos: Any, sin: Any, interleaved: Any, offsets: Any,
) -> _Tokens:  # fmt: skip
    """Check shapes, dtypes and devices, and return the new tokens. Raises CallError."""
    if page_layout not in PAGE_LAYOUTS:
        raise CallError(
            f"page_layout must be one of {', '.join(PAGE_LAYOUTS)}, got {page_layout!r}"
            f"{suggest(str(page_layout), PAGE_LAYOUTS)}"
        )
    packed = cu_seqlens is not None
    form = "total_new x heads x head_dim with cu_seqlens" if packed else "batch x seqlen_new x heads x head_dim"
    rank = 3 if packed else 4
    for name, tensor in (("k", k), ("v", v), *((("q", q),) if q is not None else ())):
        check_rank(name, tensor, rank, form)
        if tensor.shape[:-2] != k.shape[:-2]:
            raise CallError(f"k has shape {tuple(k.shape)}, but {name} has {tuple(tensor.shape)}: other tokens")
    if v.shape[-2] != k.shape[-2]:
        raise CallError(f"k has {k.shape[-2]} heads, but v has {v.shape[-2]}")
    entries, rows = _check_caches(k, v, k_cache, v_cache, page_layout)
    if table is not None and slots is not None:
        raise CallError("page_table and slots say the same in two ways; give one of them")
    if batch_index is not None and (table is not None or slots is not None):
        raise CallError("batch_index is for a dense cache; leave it out, or page_table and slots")
    batch = (index_vector("cu_seqlens", cu_seqlens, k.device).shape[0] - 1) if packed else k.shape[0]
    if batch < 0:
        raise CallError("cu_seqlens must have shape (batch + 1,), got (0,)")
    _check_vectors(batch, k.device, cache_seqlens=seqlens, batch_index=batch_index, rotary_offsets=offsets)
    if table is not None:
        _check_index("page_table", table, k.device, (torch.int32,), 2)
        if table.shape[0] != batch:
            raise CallError(f"page_table has {table.shape[0]} rows, but there are {batch} sequences")
    if slots is not None:
        _check_index("slots", slots, k.device, (torch.int32, torch.int64), rank - 2)
        if slots.shape != k.shape[:-2]:
            raise CallError(f"slots must have shape {tuple(k.shape[:-2])}, got {tuple(slots.shape)}")
    elif seqlens is None:
        raise CallError("cache_seqlens is needed: the keys that each sequence had before, (batch,) int32")
    _check_rotary(k, q, q_out, cos, sin, interleaved)
    if cos is not None and seqlens is None and offsets is None:
        raise CallError("a rotation needs positions: give cache_seqlens or rotary_offsets")
    return _tokens(k, cu_seqlens, batch, entries, rows)


def _tokens(k: Tensor, cu_seqlens: Tensor | None, batch: int, entries: int, rows: int) -> _Tokens:
    if cu_seqlens is None:
        length = k.shape[1]
        token = torch.arange(batch * length, device=k.device)
        sequence = token // max(length, 1)
        return _Tokens(sequence, token % max(length, 1), torch.ones_like(token, dtype=torch.bool), batch, entries, rows)
    token = torch.arange(k.shape[0], device=k.device, dtype=torch.int32)
    sequence = torch.searchsorted(cu_seqlens[1:], token, right=True)
    belongs = sequence < batch
    sequence = torch.where(belongs, sequence, 0)
    if not batch:
        return _Tokens(sequence, token.long(), belongs, batch, entries, rows)
    return _Tokens(sequence, token.long() - cu_seqlens[sequence], belongs, batch, entries, rows)


def _check_caches(k: Tensor, v: Tensor, k_cache: Any, v_cache: Any, page_layout: str) -> tuple[int, int]:
    """Return the pages or entries of a cache, and the rows of each."""
    middle = "rows x kv_heads" if page_layout == "NHD" else "kv_heads x rows"
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_rank(name, cache, 4, f"pages x {middle} x head_dim")
    for name, new, cache in (("k", k, k_cache), ("v", v, v_cache)):
        if (cache.dtype, cache.device) != (new.dtype, k.device):
            raise CallError(
                f"{name} has {new.dtype} on {new.device}, but {name}_cache has {cache.dtype} on {cache.device}; k is "
                f"on {k.device}"
            )
        heads = cache.shape[2 if page_layout == "NHD" else 1]
        if (heads, cache.shape[-1]) != tuple(new.shape[-2:]):
            raise CallError(
                f"{name} has {new.shape[-2]} heads of {new.shape[-1]} numbers, but {name}_cache has {heads} of "
                f"{cache.shape[-1]}"
            )
    rows = 1 if page_layout == "NHD" else 2
    of_k, of_v = ((cache.shape[0], cache.shape[rows]) for cache in (k_cache, v_cache))
    if of_k != of_v:
        raise CallError(f"k_cache has {of_k[0]} pages of {of_k[1]} rows, but v_cache has {of_v[0]} of {of_v[1]}")
    return of_k


def _check_vectors(batch: int, device: torch.device, **vectors: Any) -> None:
    for name, vector in vectors.items():
        if vector is not None and index_vector(name, vector, device).shape[0] != batch:
            raise CallError(f"{name} must have shape ({batch},), got {tuple(vector.shape)}")


def _check_index(name: str, value: Any, device: torch.device, dtypes: tuple[torch.dtype, ...], rank: int) -> None:
    if not isinstance(value, Tensor):
        raise CallError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    if value.dtype not in dtypes or value.dim() != rank:
        kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise CallError(
            f"{name} must be {kinds} with {rank} dimension{'s' * (rank > 1)}, got {value.dtype} of shape "
            f"{tuple(value.shape)}"
        )
    if value.device != device:
        raise CallError(f"{name} is on {value.device}, but k is on {device}")


def _check_rotary(k: Tensor, q: Any, q_out: Any, cos: Any, sin: Any, interleaved: Any) -> None:
    """Raise CallError unless the tables of a rotation fit each other, the keys and the queries."""
    if not isinstance(interleaved, bool):
        raise CallError(f"rotary_interleaved must be True or False, got {interleaved!r}")
    if (cos is None) != (sin is None):
        raise CallError("rotary_cos and rotary_sin go together; give both or neither")
    if q_out is not None and q is None:
        raise CallError("q_out takes the rotated queries; give q, too")
    if cos is None:
        if q is not None:
            raise CallError("q is given to be rotated; give rotary_cos and rotary_sin, or leave it out")
        return
    for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        check_rank(name, table, 2, "positions x rotary_dim / 2")
        if table.shape != cos.shape or table.dtype not in _ROTARY_DTYPES or table.device != k.device:
            raise CallError(
                f"{name} must be a float tensor of shape {tuple(cos.shape)} on {k.device}, got {table.dtype} of shape "
                f"{tuple(table.shape)} on {table.device}"
            )
    if 2 * cos.shape[1] > k.shape[-1]:
        raise CallError(f"rotary_cos turns {2 * cos.shape[1]} numbers, but head_dim is {k.shape[-1]}")
    if q is None:
        return
    if q.shape[-1] != k.shape[-1] or q.dtype != k.dtype or q.device != k.device:
        raise CallError(
            f"k has head_dim {k.shape[-1]}, {k.dtype}, {k.device}, but q has {q.shape[-1]}, {q.dtype}, {q.device}"
        )
    if q_out is not None and (
        not isinstance(q_out, Tensor) or (q_out.shape, q_out.dtype, q_out.device) != (q.shape, q.dtype, q.device)
    ):
        found = f"{q_out.dtype} of shape {tuple(q_out.shape)}" if isinstance(q_out, Tensor) else type(q_out).__name__
        raise CallError(f"q_out must be a {q.dtype} tensor of shape {tuple(q.shape)} on {q.device}, got {found}")


def _check_contents(
    tokens: _Tokens, place: _Place, positions: Tensor | None, cos: Tensor | None, cu_seqlens: Tensor | None,
    table: Tensor | None,
) -> None:  # fmt: skip
    """Raise CallError for a token that has no place, or no row of the rotation. Waits for the GPU."""
    if cu_seqlens is not None:
        debugging.check_offsets("cu_seqlens", cu_seqlens.tolist(), tokens.index.shape[0])
    lost = (place.wanted & ~place.written).nonzero()
    if lost.numel():
        token = int(lost[0])
        b, j = int(tokens.sequence[token]), int(tokens.index[token])
        entry, row = int(place.entry[token]), int(place.row[token])
        where = f"page {entry}" if table is not None else f"row {row} of {entry}"
        width = "" if table is None else f"; a row of page_table holds {table.shape[1] * tokens.rows} keys"
        raise CallError(
            f"new token {j} of sequence {b} has no place: {where}, where the cache has {tokens.entries} times "
            f"{tokens.rows} rows{width}"
        )
    if positions is not None and cos is not None:
        outside = (tokens.belongs & ((positions < 0) | (positions >= cos.shape[0]))).nonzero()
        if outside.numel():
            token = int(outside[0])
            raise CallError(
                f"new token {int(tokens.index[token])} of sequence {int(tokens.sequence[token])} has position "
                f"{int(positions[token])}, but rotary_cos has {cos.shape[0]}"
            )
