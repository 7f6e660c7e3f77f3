"""Appending to caches in plain torch: a few operations that read no number back, and the check of what tensors hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attngen.errors import CallError
from attngen.runtime.arguments import debug as debugging
from attngen.runtime.arguments.latent_rows import latent_name, packed, views_of
from attngen.runtime.operations.append.arguments import DESCALES, Append, AppendSizes, scales_of


@dataclass(frozen=True, slots=True)
class Tokens:
    """New tokens, and where they are to go: of each its sequence, its number in it, and whether it belongs to one."""

    sequence: Tensor
    index: Tensor
    belongs: Tensor


@dataclass(frozen=True, slots=True)
class Place:
    """Page or entry, and row in it, of each token that is ``written``; ``wanted``: it was to be."""

    entry: Tensor
    row: Tensor
    wanted: Tensor
    written: Tensor


def append(call: Append, sizes: AppendSizes) -> Tensor | None:
    """Append new keys and values of a checked call; the rotated queries."""
    k, v, q, new_q = call.k, call.v, call.q, call.q
    if not sizes.tokens:
        return q if q is None or call.q_out is None else _into(call.q_out, q)
    with torch.no_grad():
        tokens = tokens_of(call, sizes)
        place, positions = _place(call, tokens, sizes), _positions(call, tokens)
        new_k = k.reshape(-1, *k.shape[-2:])
        if positions is not None:
            tables: Sequence[Tensor] = (call.rotary_cos, call.rotary_sin)
            row = positions.clamp(0, max(tables[0].shape[0] - 1, 0))
            cos, sin = (table.index_select(0, row) for table in tables)
            new_k = rotated(new_k, cos, sin, call.rotary_interleaved)
            if q is not None:
                new_q = rotated(q.reshape(-1, *q.shape[-2:]), cos, sin, call.rotary_interleaved).view(q.shape)
        new_v, scales = v.reshape(-1, *v.shape[-2:]), scales_of(call, sizes)
        if sizes.of_rows:
            made = [_scales_of_rows(new) for new in (new_k, new_v)]
            new_k, new_v = (
                _rounded(new, scale, call.k_cache.dtype) for new, scale in zip((new_k, new_v), made, strict=True)
            )
            for each, scale in zip(DESCALES, made, strict=True):
                _write(getattr(call, each)[..., None], scale[..., None], place, call.page_layout)
        elif scales:
            of = torch.where(place.written, place.entry, 0) if sizes.of_pages else tokens.sequence
            new_k, new_v = (
                _rounded(new, scales[name][of], call.k_cache.dtype)
                for name, new in zip(DESCALES, (new_k, new_v), strict=True)
            )
        name = latent_name(call.k_cache)
        if name is not None:
            cache = call.k_cache if call.page_layout == "NHD" else call.k_cache.transpose(1, 2)
            for view, rows in zip(views_of(name, cache), packed(name, new_v, new_k), strict=True):
                _write(view, rows, place, "NHD")
            return new_q if call.q_out is None or new_q is None else _into(call.q_out, new_q)
        _write(call.k_cache, new_k, place, call.page_layout)
        _write(call.v_cache, new_v, place, call.page_layout)
        if call.q_out is None or new_q is None:
            return new_q
        return _into(call.q_out, new_q)


def _into(out: Tensor, values: Tensor) -> Tensor:
    return out.copy_(values)


def _scales_of_rows(new: Tensor) -> Tensor:
    """Scales (tokens, heads) that bring the largest magnitude of each row to the largest number of e4m3."""
    largest = new.float().abs().amax(dim=-1)
    least = torch.finfo(torch.float32).tiny
    # a tensor: on a GPU torch multiplies by the reciprocal of a number
    most = largest.new_full((), torch.finfo(torch.float8_e4m3fn).max)
    return torch.where(largest == 0, 1.0, (largest / most).clamp(min=least))


def _rounded(new: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows (tokens, heads, head_dim) divided by their scales (tokens, heads), in 8 bits."""
    limit = torch.finfo(dtype).max
    quotient = (new.float() / scales[..., None]).clamp(-limit, limit)
    return torch.where(quotient.isnan(), torch.nan, quotient).to(dtype)  # NaN without a sign, as conversions make it


def tokens_of(call: Append, sizes: AppendSizes) -> Tokens:
    """The new tokens of a call."""
    k, starts = call.k, call.cu_seqlens
    if starts is None:
        length = k.shape[-3]
        token = torch.arange(sizes.batch * length, device=k.device)
        sequence = token // max(length, 1)
        return Tokens(sequence, token % max(length, 1), torch.ones_like(token, dtype=torch.bool))
    token = torch.arange(k.shape[0], device=k.device, dtype=torch.int32)
    sequence = torch.searchsorted(starts[1:], token, right=True)
    belongs = sequence < sizes.batch
    sequence = torch.where(belongs, sequence, 0)
    return Tokens(sequence, token.long() - starts[sequence], belongs)


def _positions(call: Append, tokens: Tokens) -> Tensor | None:
    """Position of each token in the tables of the rotation; None without a rotation."""
    if call.rotary_cos is None:
        return None
    start: Tensor = call.cache_seqlens if call.rotary_offsets is None else call.rotary_offsets
    positions: Tensor = start[tokens.sequence].long() + tokens.index
    return positions


def _place(call: Append, tokens: Tokens, sizes: AppendSizes) -> Place:
    """Places of the tokens."""
    wanted, rows, table = tokens.belongs, max(sizes.rows, 1), call.page_table
    if call.slots is not None:
        slot = call.slots.reshape(-1).long()
        wanted = wanted & (slot >= 0)
        entry, row = slot // rows, slot % rows
        known = slot < sizes.entries * sizes.rows
    else:
        before: Tensor = call.cache_seqlens
        position = before[tokens.sequence].long() + tokens.index
        known = position >= 0
        if table is not None:
            page, row = position // rows, position % rows
            known = known & (page < table.shape[1])
            entry = (
                table.flatten() if table.shape[1] == 0 else table[tokens.sequence, page.clamp(0, table.shape[1] - 1)]
            )
            entry = torch.zeros_like(page) if table.shape[1] == 0 else entry.long()
        else:
            entry = tokens.sequence if call.batch_index is None else call.batch_index[tokens.sequence].long()
            row = position
            known = known & (position < sizes.rows)
        known = known & (entry >= 0) & (entry < sizes.entries)
    return Place(entry, row, wanted, wanted & known)


def _write(cache: Tensor, values: Tensor, place: Place, page_layout: str) -> None:
    """Write the tokens that have a place. Those that have none write again what the first of the others does, so that
    nothing has to be counted; if there is no other, what stands in the first row."""
    if cache.element_size() == 1:  # torch moves bytes, but not numbers of 8 bits
        cache, values = cache.view(torch.uint8), values.view(torch.uint8)
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


def rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rows (tokens, heads, head_dim) with their first numbers rotated, each token by its row of ``cos`` and ``sin``."""
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    half = cos.shape[-1]
    cos, sin = (table[:, None, :].to(compute) for table in (cos, sin))
    turned = x[..., : 2 * half].to(compute)
    pairs = turned.unflatten(-1, (half, 2)) if interleaved else turned.unflatten(-1, (2, half)).transpose(-1, -2)
    a, b = pairs.unbind(-1)
    pairs = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1 if interleaved else -2).flatten(-2)
    if x.element_size() == 1:  # saturates, as conversions to 8 bits do in kernels
        limit = torch.finfo(x.dtype).max
        return torch.cat((pairs.clamp(-limit, limit), x[..., 2 * half :].to(compute)), dim=-1).to(x.dtype)
    return torch.cat((pairs.to(x.dtype), x[..., 2 * half :]), dim=-1)


def check_contents(call: Append, sizes: AppendSizes) -> None:
    """Raise CallError for a token that has no place, or no row of the rotation. Waits for the GPU."""
    if not sizes.tokens:
        return
    tokens = tokens_of(call, sizes)
    place, positions = _place(call, tokens, sizes), _positions(call, tokens)
    if call.cu_seqlens is not None:
        debugging.check_offsets("cu_seqlens", call.cu_seqlens.tolist(), tokens.index.shape[0])
    for name, scale in () if sizes.of_rows else scales_of(call, sizes).items():
        debugging.check_scale(name, scale)
    lost = (place.wanted & ~place.written).nonzero()
    if lost.numel():
        token = int(lost[0])
        b, j = int(tokens.sequence[token]), int(tokens.index[token])
        entry, row = int(place.entry[token]), int(place.row[token])
        where = f"page {entry}" if call.page_table is not None else f"row {row} of {entry}"
        width = ""
        if call.page_table is not None:
            width = f"; a row of page_table holds {call.page_table.shape[1] * sizes.rows} keys"
        raise CallError(
            f"new token {j} of sequence {b} has no place: {where}, where the cache has {sizes.entries} times "
            f"{sizes.rows} rows{width}"
        )
    if positions is not None:
        cos: Tensor = call.rotary_cos
        known = cos.shape[0]
        outside = (tokens.belongs & ((positions < 0) | (positions >= known))).nonzero()
        if outside.numel():
            token = int(outside[0])
            raise CallError(
                f"new token {int(tokens.index[token])} of sequence {int(tokens.sequence[token])} has position "
                f"{int(positions[token])}, but rotary_cos has {known}"
            )
