"""flash-attn's ``flash_attn_with_kvcache``, in its versions 2 and 3: append, rotate, attend.

New keys and values go into the cache first (``attngen.append_kv``), which also rotates keys and queries. Then queries
attend to the cache: as it is, if its entries are in the order of the sequences, else as pages, where an entry of a
dense cache is one page (``attngen.attention_paged``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attngen.dtypes import QUANTIZED_DTYPES
from attngen.errors import CallError
from attngen.integrations.flash_attn.arguments import Window, attend_wide, candidates_for, sequences_of, sides_of
from attngen.integrations.shared.arguments import contiguous_rows, refused, tensor
from attngen.integrations.shared.choice import Pages, VariantCandidate
from attngen.runtime.arguments.checked import TORCH_DTYPES
from attngen.runtime.arguments.torch_state import is_traced
from attngen.runtime.operations.append.call import append_kv
from attngen.runtime.operations.append.in_torch import rotated

#: The shipped spec that builds what these functions ask for.
SPEC = "flash_attn_kvcache"

#: Suffix of the name of a variant's sibling that skips the first keys of each sequence.
LEFTPAD = "_leftpad"

#: Dtypes of tensors that come with scales.
QUANTIZED = tuple(TORCH_DTYPES[name] for name in QUANTIZED_DTYPES)
_INTEGERS = (torch.int32, torch.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedCall:
    """A call over a cache: q (b, sq, h, d), or (total_q, h, d) with ``cu_seqlens_q`` and ``max_seqlen_q``.

    ``k_cache`` and ``v_cache`` are (entries, rows, hk, d), and sequence i has entry ``batch_index[i]``, or i; with
    ``page_table`` (b, max_pages) int32 they are (pages, page_size, hk, d). With both, sequence i has row
    ``batch_index[i]`` of a table with any number of rows. ``lengths`` counts the keys that a sequence had before: an
    int, or int32 (b,); None for all that there is room for. Nobody sees the first ``leftpad`` (b,) int32 of them. ``k``
    and ``v`` (b, new, hk, d), or (total_new, hk, d) with ``cu_seqlens_new``, are written after these.
    ``rotary_lengths`` (b,) says where rotations begin, if not after the lengths.

    A cache in 8 bits has ``k_descale`` and ``v_descale``, () or (b, hk), or (pages, hk) with a page table; q in 8 bits
    has ``q_descale``, () or (b, hk). One that is left out is 1.
    """

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    k: Tensor | None = None
    v: Tensor | None = None
    rotary_cos: Tensor | None = None
    rotary_sin: Tensor | None = None
    rotary_lengths: Tensor | None = None
    rotary_interleaved: bool = True
    lengths: int | Tensor | None = None
    batch_index: Tensor | None = None
    leftpad: Tensor | None = None
    page_table: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_new: Tensor | None = None
    max_seqlen_q: int | None = None
    softmax_scale: float | None = None
    causal: bool = False
    window_size: Window = (-1, -1)
    chunk: int = 0
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    q_descale: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None
    num_splits: int = 0
    return_lse: bool = False
    out: Tensor | None = None


@torch.no_grad()
def attend_cached(call: CachedCall) -> Any:
    """Return out, or (out, lse) with ``return_lse``, after new keys and values are in the cache.

    lse is float32, (b, h, sq), or (h, total_q) for packed queries. Raises CallError for arguments that disagree, and
    NoKernelError for what no built kernel computes.
    """
    for name in ("q", "k_cache", "v_cache"):
        tensor(name, getattr(call, name))
    call = replace(call, q=contiguous_rows(q=call.q)[0])
    if (call.k is None) != (call.v is None):
        raise CallError("k and v are given together or not at all")
    batch = _batch(call)
    call = _with_own_pages(call)
    used = _lengths(call, batch)
    candidates = candidates_over_cache(call, batch)
    if call.k is not None:
        call, used = _with_new_keys(call, used)
    elif call.rotary_cos is not None or call.rotary_sin is not None:
        raise CallError("rotary_cos rotates new keys, and queries with them; k and v are not given")
    elif call.cu_seqlens_new is not None:
        raise CallError("cu_seqlens_k_new says where new keys begin; k and v are not given")
    options: dict[str, Any] = {
        "spec": SPEC, "softmax_scale": call.softmax_scale, "return_lse": call.return_lse, "seqused_k": used,
        "descales": scales_or_ones(call.q, call.k_cache, call.q_descale, call.k_descale, call.v_descale),
    }  # fmt: skip
    if _in_order(call):
        k, v = (cache[:batch] if cache.shape[0] > batch else cache for cache in (call.k_cache, call.v_cache))
        return attend_wide(candidates, call.q, k, v, **options)
    if call.page_table is not None:
        table = call.page_table
    elif call.batch_index is not None:
        table = call.batch_index.to(torch.int32)[:, None]
    else:
        table = torch.arange(batch, dtype=torch.int32, device=call.q.device)[:, None]
    longest = None if call.cu_seqlens_q is None else call.max_seqlen_q  # as there, for packed queries only
    pages = Pages(table, call.cu_seqlens_q, longest, 1 if call.num_splits == 1 else None, call.out)
    return attend_wide(candidates, call.q, call.k_cache, call.v_cache, pages=pages, **options)


def scales_or_ones(
    q: Tensor, kv: Tensor, q_descale: Tensor | None, k_descale: Tensor | None, v_descale: Tensor | None
) -> dict[str, Tensor]:
    """Scales by their keywords, 1 for quantized tensors without one."""
    named = {"q_descale": (q, q_descale), "k_descale": (kv, k_descale), "v_descale": (kv, v_descale)}
    ones = {
        name: torch.ones((), dtype=torch.float32, device=q.device)
        for name, (of, _) in named.items()
        if of.dtype in QUANTIZED
    }
    return ones | {name: scale for name, (_, scale) in named.items() if scale is not None}


def _in_order(call: CachedCall) -> bool:
    """Whether the cache is read as it is, by a kernel that may split keys among blocks; else as pages."""
    elsewhere = (call.page_table, call.batch_index, call.cu_seqlens_q, call.out)
    return call.num_splits != 1 and all(given is None for given in elsewhere)


def _batch(call: CachedCall) -> int:
    """Return the number of sequences, and check that all arguments have it."""
    q, starts = call.q, call.cu_seqlens_q
    if q.dim() != (4 if starts is None else 3):
        form = "(batch, seqlen_q, heads, head_dim)" if starts is None else "(total_q, heads, head_dim)"
        raise CallError(f"q must have shape {form}, got {tuple(q.shape)}")
    if starts is not None and call.max_seqlen_q is None:
        raise CallError("cu_seqlens_q needs max_seqlen_q, the longest query length")
    for name in ("k_cache", "v_cache"):
        if getattr(call, name).dim() != 4:
            form = "(batch, capacity, kv_heads, head_dim), or (pages, page_size, kv_heads, head_dim)"
            raise CallError(f"{name} must have shape {form}, got {tuple(getattr(call, name).shape)}")
    batch: int = q.shape[0] if starts is None else sequences_of(starts)
    for name, given in (("cache_batch_idx", call.batch_index), ("cache_leftpad", call.leftpad)):
        if given is not None and (tensor(name, given).shape != (batch,) or given.dtype not in _INTEGERS):
            got = f"{given.dtype} of shape {tuple(given.shape)}"
            raise CallError(f"{name} must be int32 of shape ({batch},), got {got}")
    table = call.page_table
    if table is not None and (
        tensor("page_table", table).dim() != 2 or (call.batch_index is None and table.shape[0] != batch)
    ):
        rows = batch if call.batch_index is None else "entries"
        raise CallError(f"the page table must be int32 of shape ({rows}, max_pages), got {tuple(table.shape)}")
    if table is None and call.batch_index is None and call.k_cache.shape[0] < batch:
        raise CallError(f"the cache has {call.k_cache.shape[0]} entries, but there are {batch} sequences")
    return batch


def _with_own_pages(call: CachedCall) -> CachedCall:
    """Pick each sequence's row of a page table that ``batch_index`` points into."""
    table, index = call.page_table, call.batch_index
    if table is None or index is None:
        return call
    if index.is_cpu and not is_traced(index):
        for place, row in enumerate(index.tolist()):
            if not 0 <= row < table.shape[0]:
                raise CallError(f"cache_batch_idx[{place}] is {row}; the page table has {table.shape[0]} rows")
    return replace(call, page_table=table.index_select(0, index), batch_index=None)


def _lengths(call: CachedCall, batch: int) -> Tensor | None:
    """The number of keys of each sequence, (b,) int32. The values of a tensor on a GPU are not read."""
    lengths, table = call.lengths, call.page_table
    room = call.k_cache.shape[1] * (1 if table is None else table.shape[1])
    new = 0 if call.k is None or call.cu_seqlens_new is not None else tensor("k", call.k).shape[1]
    device = call.q.device
    if lengths is None:
        if call.k is not None:
            raise CallError("new keys need cache_seqlens, which says where they go")
        if _in_order(call):
            return None
        return torch.full((batch,), room, dtype=torch.int32, device=device)
    if isinstance(lengths, int):
        if not 0 <= lengths <= room - new:
            raise CallError(f"the cache has room for {room} keys; {lengths} and {new} new ones do not fit")
        return torch.full((batch,), lengths, dtype=torch.int32, device=device)
    if not isinstance(lengths, Tensor):
        raise CallError(f"cache_seqlens must be an integer or a torch.Tensor, got {type(lengths).__name__}")
    if lengths.shape != (batch,) or lengths.is_floating_point():
        raise CallError(
            f"cache_seqlens must be a number, or int32 of shape ({batch},), got {lengths.dtype} of shape "
            f"{tuple(lengths.shape)}"
        )
    if lengths.device != device:
        raise CallError(f"cache_seqlens is on {lengths.device}, but q is on {device}")
    if lengths.is_cpu and not is_traced(lengths):
        for place, used in enumerate(lengths.tolist()):
            if not 0 <= used <= room - new:
                raise CallError(
                    f"cache_seqlens[{place}] is {used}; the cache has room for {room} keys, {new} of them new"
                )
    return lengths.to(torch.int32).contiguous()


def candidates_over_cache(call: CachedCall, batch: int) -> list[VariantCandidate]:
    """The variants that serve a call."""
    candidates = candidates_for(
        call.q, call.causal, call.window_size, call.softcap, call.alibi_slopes, batch, call.chunk
    )  # fmt: skip
    if call.sinks is not None:
        candidates = [_with_sink(candidates[0], call.sinks, call.q.shape[-2])]
    if call.leftpad is None:
        return candidates
    if call.sinks is not None:
        raise refused("cache_leftpad", "no variant of this integration has it together with sinks")
    general = candidates[-1]
    skipped = {**general.arguments, "leftpad": call.leftpad.to(torch.int32)}
    return [VariantCandidate(general.variant + LEFTPAD, skipped)]


def _with_sink(candidate: VariantCandidate, sinks: Tensor, heads: int) -> VariantCandidate:
    """Return the sibling of a variant with a logit (h,) of each head that joins the softmax."""
    if candidate.variant not in ("causal", "sliding_window"):
        raise refused(
            "s_aux", "sinks are supported with causal masks and windows only, without softcap, ALiBi or chunks"
        )
    if tensor("s_aux", sinks).shape != (heads,):
        raise CallError(f"s_aux must have shape ({heads},), one number for each head, got {tuple(sinks.shape)}")
    return VariantCandidate(f"{candidate.variant}_sink", {**candidate.arguments, "sinks": sinks.float()})


def _with_new_keys(call: CachedCall, used: Tensor | None) -> tuple[CachedCall, Tensor]:
    """Write new keys and values into the cache; return the call with rotated queries, and the new lengths."""
    k, v, q = call.k, call.v, call.q
    assert k is not None
    assert v is not None
    assert used is not None, "lengths were asked for"
    starts, new_starts = call.cu_seqlens_q, call.cu_seqlens_new
    for name, given in (("k", k), ("v", v)):
        if tensor(name, given).dim() != (4 if new_starts is None else 3):
            raise CallError(f"{name} must have the layout of the new keys, got shape {tuple(given.shape)}")
    call = replace(call, rotary_cos=_widened(call.rotary_cos), rotary_sin=_widened(call.rotary_sin))
    turns = call.rotary_cos is not None
    # Queries have the positions of the new keys if the mask depends on positions, else all that of the first one.
    moving = bool(call.causal or call.chunk or sides_of(call.window_size) != (-1, -1))
    together = turns and moving and q.shape[:-2] == k.shape[:-2] and (starts is None or starts is new_starts)
    rounded: dict[str, Tensor] = {}
    if call.k_cache.dtype in QUANTIZED and k.dtype != call.k_cache.dtype:
        rounded = scales_or_ones(k, call.k_cache, None, call.k_descale, call.v_descale)
    k, v = contiguous_rows(k=k, v=v)
    turned = append_kv(
        k, v, call.k_cache, call.v_cache, used,
        page_table=call.page_table, batch_index=None if call.batch_index is None else call.batch_index.to(torch.int32),
        cu_seqlens=new_starts, q=q if together else None, rotary_cos=call.rotary_cos, rotary_sin=call.rotary_sin,
        rotary_interleaved=bool(call.rotary_interleaved),
        rotary_offsets=None if call.rotary_lengths is None else call.rotary_lengths.to(torch.int32), **rounded,
    )  # fmt: skip
    if turns and not together:
        turned = _rotated_queries(call, used if call.rotary_lengths is None else call.rotary_lengths, moving)
    used = used + (k.shape[1] if new_starts is None else new_starts.diff())
    return (call if turned is None else replace(call, q=turned)), used


def _widened(table: Tensor | None) -> Tensor | None:
    """Rotary table in a dtype that appending reads: flash-attn 3 has tables in 8 bits beside caches in 8 bits."""
    return table.float() if isinstance(table, Tensor) and table.dtype in QUANTIZED else table


def _rotated_queries(call: CachedCall, offsets: Tensor, moving: bool) -> Tensor:
    """Return queries rotated by their positions: ``offsets`` (b,), plus the query's index if they are ``moving``."""
    q, starts = call.q, call.cu_seqlens_q
    assert call.rotary_cos is not None
    assert call.rotary_sin is not None
    if starts is None:
        index = torch.arange(q.shape[1], device=q.device)
        positions = (offsets.long()[:, None] + (index if moving else 0 * index)).flatten()
    else:
        token = torch.arange(q.shape[0], device=q.device)
        sequence = torch.searchsorted(starts[1:].long(), token, right=True).clamp(max=starts.shape[0] - 2)
        positions = offsets.long()[sequence] + ((token - starts.long()[sequence]) if moving else 0)
    row = positions.clamp(0, max(call.rotary_cos.shape[0] - 1, 0))
    cos, sin = (table.index_select(0, row) for table in (call.rotary_cos, call.rotary_sin))
    return rotated(q.reshape(-1, *q.shape[-2:]), cos, sin, bool(call.rotary_interleaved)).view(q.shape)
