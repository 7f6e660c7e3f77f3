"""Checks of what the tensors of a call hold: facts that are trusted at speed. They wait for the GPU: opt in.

with attngen.debug():
    attngen.attention(q, k, v, variant="packed_documents", doc=doc)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch

from attngen.errors import CallError
from attngen.lang.eager import beyond
from attngen.lang.listed import EXTRA_INDICES, EXTRA_TOPK_LENGTH, INDICES, LISTS, TOPK_LENGTH
from attngen.lang.variant import Bound
from attngen.lang.variant import Tensor as DeclaredTensor
from attngen.runtime.arguments.checked import Call
from attngen.runtime.arguments.extra_cache import extra_slots

#: The ``debug`` blocks that are open, in all threads.
depth = 0


def active() -> bool:
    """Whether some ``debug`` block is open, in any thread."""
    return depth > 0


@contextmanager
def debug() -> Iterator[None]:
    """Check the contents of every call inside: cu_seqlens, seqused_k, lists of keys, declared ranges and monotone
    axes.

    A fact that does not hold raises CallError before anything is launched.
    """
    global depth
    depth += 1
    try:
        yield
    finally:
        depth -= 1


def check_lengths(call: Call) -> None:
    """Raise CallError unless cu_seqlens and seqused_k hold lengths that the tensors have."""
    lengths_k = None
    if call.layout == "varlen":
        assert call.cu_seqlens_q is not None
        assert call.cu_seqlens_k is not None
        check_offsets("cu_seqlens_q", call.cu_seqlens_q.tolist(), call.total_q, call.seqlen_q, "max_seqlen_q")
        starts = call.cu_seqlens_k.tolist()
        check_offsets("cu_seqlens_k", starts, call.total_k, call.seqlen_k, "max_seqlen_k")
        lengths_k = [end - start for start, end in pairwise(starts)]
    if call.layout == "paged" and call.cu_seqlens_q is not None:
        check_offsets("cu_seqlens_q", call.cu_seqlens_q.tolist(), call.total_q, call.seqlen_q, "max_seqlen_q")
    if call.seqused_k is None:
        return
    for b, used in enumerate(call.seqused_k.tolist()):
        most = call.seqlen_k if lengths_k is None else lengths_k[b]
        if not 0 <= used <= most:
            held = "its row of page_table holds" if call.layout == "paged" else f"sequence {b} has"
            raise CallError(f"seqused_k[{b}] is {used}; {held} {most} keys")
    if call.layout == "paged":
        _pages(call)


def _pages(call: Call) -> None:
    """Raise CallError unless each page that a sequence uses is one of the cache; other entries may be anything."""
    assert call.page_table is not None
    assert call.seqused_k is not None
    used = -(-call.seqused_k // max(call.page_size, 1))
    listed = torch.arange(call.page_table.shape[1], device=call.device) < used[:, None]
    outside = (listed & ((call.page_table < 0) | (call.page_table >= call.num_pages))).nonzero()
    if outside.numel():
        b, place = outside[0].tolist()
        raise CallError(
            f"page_table[{b}, {place}] is {call.page_table[b, place].item()}, but the cache has pages 0 to "
            f"{call.num_pages - 1}; sequence {b} uses its first {used[b].item()} pages"
        )


def check_lists(call: Call) -> None:
    """Raise CallError for entries of lists of keys that name none and are not -1, and for counts that no row has."""
    if call.variant.keys is None:
        return
    lists = LISTS[call.variant.keys]
    keys = call.seqused_k
    if keys is None and call.cu_seqlens_k is not None:
        keys = call.cu_seqlens_k.diff()
    if keys is None:
        keys = torch.full((call.batch,), call.seqlen_k, device=call.device, dtype=torch.int64)
    held = keys.to(call.device)
    each = "keys" if lists.block == 1 else f"blocks of {lists.block} keys"
    _check_list(call, INDICES.name, TOPK_LENGTH.name, -(-held // lists.block), each)
    if lists.extra:
        slots = torch.full((call.batch,), extra_slots(call), device=call.device, dtype=torch.int64)
        _check_list(call, EXTRA_INDICES.name, EXTRA_TOPK_LENGTH.name, slots, "rows of the second cache")


def _check_list(call: Call, indices: str, topk_length: str, named: torch.Tensor, each: str) -> None:
    """Check the entries of one tensor of lists, each of which may name so many keys or blocks of a sequence."""
    entries = call.tensors[indices]
    ones = [1] * (entries.dim() - 1)
    places = torch.arange(entries.shape[-1], device=entries.device)
    read = torch.ones_like(entries, dtype=torch.bool)
    if call.cu_seqlens_q is not None:
        queries = torch.arange(entries.shape[1], device=entries.device).view(1, -1, *ones[1:])
        read &= queries < call.cu_seqlens_q.diff().view(-1, *ones)
    length = call.tensors.get(topk_length)
    if length is not None:
        odd = (read.any(-1) & ((length < 0) | (length > entries.shape[-1]))).nonzero()
        if odd.numel():
            where = odd[0].tolist()
            raise CallError(
                f"{topk_length}{where} is {length[tuple(where)].item()}, but a row of {indices} has "
                f"{entries.shape[-1]} entries"
            )
        read &= places < length[..., None]
    wrong = (read & (entries != -1) & ((entries < 0) | (entries >= named.view(-1, *ones)))).nonzero()
    if wrong.numel():
        where = wrong[0].tolist()
        raise CallError(
            f"{indices}{where} is {entries[tuple(where)].item()}, but sequence {where[0]} has "
            f"{named[where[0]].item()} {each}; -1 names none"
        )


def check_offsets(name: str, offsets: list[int], total: int, longest: int | None = None, limit: str = "") -> None:
    """Raise CallError unless offsets start with 0, never decrease, and end within the ``total`` rows of a tensor;
    ``longest``: no sequence may be longer than this, which the call names ``limit``."""
    if offsets[0] != 0:
        raise CallError(f"{name} must start with 0, got {offsets[0]}")
    for i, (start, end) in enumerate(pairwise(offsets)):
        if end < start:
            raise CallError(f"{name} must not decrease, but {name}[{i + 1}] = {end} follows {start}")
        if longest is not None and end - start > longest:
            raise CallError(f"{limit} is {longest}, but sequence {i} has length {end - start}")
    if offsets[-1] > total:
        raise CallError(f"{name} ends at {offsets[-1]}, beyond the {total} rows of the tensor")


def check_scales(call: Call) -> None:
    """Raise CallError unless the scales of quantized tensors are finite and positive."""
    for name, scale in call.descales.items():
        check_scale(name, scale)


def check_scale(name: str, scale: torch.Tensor) -> None:
    """Raise CallError unless scales are finite and positive."""
    odd = (~torch.isfinite(scale) | (scale <= 0)).nonzero()
    if len(odd):  # one of no axes has no coordinates
        where = odd[0].tolist()
        raise CallError(f"{name}{where} is {scale[tuple(where)].item()}; a scale is finite and positive")


def check_facts(call: Call) -> None:
    """Raise CallError unless the variant's tensors keep the ranges and the order that the spec declares."""
    for declared in call.variant.tensors:
        tensor = call.tensors[declared.name].detach()
        if declared.monotone is not None:
            _monotone(call, declared, tensor, declared.monotone.axis)
            _by_ones(call, declared, tensor)
    for name, (low, high) in limits_of(call).items():
        tensor = call.tensors[name].detach()
        odd = (~((tensor >= low) & (tensor <= high))).nonzero()  # so that NaN is outside any range
        if len(odd):  # one of no axes has no coordinates
            where = odd[0].tolist()
            value = tensor[tuple(where)].item()
            raise CallError(f"{call.variant.name}: {beyond(name, where, value, low, high)}")


def limits_of(call: Call) -> dict[str, tuple[float, float]]:
    """The least and the greatest element of each tensor whose range the variant declares."""
    declared = [tensor for tensor in call.variant.tensors if tensor.range is not None]
    return {
        tensor.name: (
            -math.inf if (low := _limit(call, tensor.range[0])) is None else low,
            math.inf if (high := _limit(call, tensor.range[1])) is None else high,
        )
        for tensor in declared
        if tensor.range is not None
    }


def _monotone(call: Call, declared: DeclaredTensor, tensor: torch.Tensor, axis: int) -> None:
    if tensor.shape[axis] < 2:
        return
    steps = tensor.shape[axis] - 1
    falls = tensor.narrow(axis, 1, steps) < tensor.narrow(axis, 0, steps)
    if falls.any():
        where = falls.nonzero()[0].tolist()
        where[axis] += 1
        raise CallError(
            f"{call.variant.name}: tensor '{declared.name}' is declared nondecreasing along axis {axis}, "
            f"but it decreases at index {where}"
        )


def _by_ones(call: Call, declared: DeclaredTensor, tensor: torch.Tensor) -> None:
    assert declared.monotone is not None
    axis, runs = declared.monotone.axis, declared.monotone.runs
    if runs is None or tensor.shape[axis] < 2:
        return
    places = torch.arange(1, tensor.shape[axis], device=tensor.device)
    inside = places[places % runs != 0]
    steps = tensor.index_select(axis, inside) - tensor.index_select(axis, inside - 1)
    odd = (steps != 1).nonzero()
    if odd.numel():
        where = odd[0].tolist()
        where[axis] = int(inside[where[axis]])
        raise CallError(
            f"{call.variant.name}: tensor '{declared.name}' is declared to grow by one within runs of {runs} along "
            f"axis {axis}, but it does not at index {where}"
        )


def _limit(call: Call, bound: Bound) -> int | float | None:
    return call.extents[bound] if isinstance(bound, str) else bound


def check(call: Call) -> None:
    """Run every check of a call's contents."""
    check_lengths(call)
    check_lists(call)
    check_scales(call)
    check_facts(call)
