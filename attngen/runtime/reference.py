"""The eager reference: any variant on any device, from the same expressions as the kernels, in plain torch.

It is slow and exact: scores in float32 (or float64, as the oracle of a kernel), a few query rows at a time so that
memory stays bounded, gradients by autograd. Nothing invisible contributes anything, not even a NaN: invisible keys
and values are never multiplied by a zero, they are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from attngen.lang.eager import evaluate
from attngen.lang.variant import Variant
from attngen.runtime.anchor import with_zero_gradients
from attngen.runtime.arguments import Call
from attngen.runtime.descales import dequantized
from attngen.runtime.dropout import kept, rate_of
from attngen.runtime.sinks import sinks

#: Elements of the score matrix that are held at a time: some megabytes for a CPU's caches, more to fill a GPU.
CHUNK_ELEMENTS = {"cpu": 2**21}
_CHUNK_ELEMENTS_ELSEWHERE = 2**26

#: Keys with a NaN or an infinity that are handled at a time, since each takes a product of its own.
_ODD_KEYS = 16


@dataclass(frozen=True, slots=True)
class OneSequence:
    """One sequence of a call: q (s, h, d), k and v (s, hk, d), and where it stands."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    index: int
    q_offset: int  # of its first query among all queries
    k_offset: int


@dataclass(frozen=True, slots=True)
class _Keys:
    """Keys and values of one sequence for all query heads, (h, keys, d), and which rows hold what is not finite."""

    k: torch.Tensor
    v: torch.Tensor
    odd_k: torch.Tensor
    odd_v: torch.Tensor

    @classmethod
    def of(cls, call: Call, sequence: OneSequence, compute: torch.dtype) -> _Keys:
        """Return those of a sequence, once for all chunks of its query rows."""
        own = [rows.to(compute).transpose(0, 1) for rows in (sequence.k, sequence.v)]
        groups = call.heads // call.kv_heads
        k, v = (rows.repeat_interleave(groups, dim=0) if groups > 1 else rows for rows in own)
        return cls(k, v, *map(_not_finite, own))


def reference(
    call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, compute: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out and the natural log-sum-exp of a checked call.

    ``compute`` is the dtype of all arithmetic: float32 unless the inputs are float64. With float64 both results stay
    float64, which makes an oracle; otherwise out has q's dtype and lse is float32. Rows without a visible key give
    0 and −inf, or the sink of their head if there is one; rows of no sequence give 0 and −inf. Raises IndexError for a
    load out of extent that nothing guards.
    """
    compute = compute or (torch.float64 if q.dtype == torch.float64 else torch.float32)
    out_dtype = torch.float64 if compute == torch.float64 else call.out_dtype
    outs, lses = [], []
    for sequence in _sequences(call, q, k, v):
        if call.descales:
            sequence = _dequantized(call, sequence, compute)
        out, lse = _attend(call, sequence, compute)
        outs.append(out.to(out_dtype))
        lses.append(lse)
    join = _join_packed if call.order == "thd" else _join_dense
    out, lse = join(call, q, outs, lses, out_dtype, compute)
    out, anchored = with_zero_gradients(out, lse, (q, k, v, *call.tensors.values()))
    return out, lse if anchored is None else anchored


def _dequantized(call: Call, sequence: OneSequence, compute: torch.dtype) -> OneSequence:
    """Return a sequence with what its quantized elements stand for."""
    in_units = {name: dequantized(call, name, getattr(sequence, name), sequence.index, compute) for name in "qkv"}
    return replace(sequence, **in_units)


def lengths(call: Call) -> list[tuple[int, int, int, int]]:
    """Return for each sequence its queries, its used keys, and the positions of its first query and first key."""
    used = None if call.seqused_k is None else call.seqused_k.tolist()
    if call.layout == "paged":
        assert used is not None
        if call.cu_seqlens_q is None:
            return [(call.seqlen_q, used[b], b * call.seqlen_q, 0) for b in range(call.batch)]
        starts = call.cu_seqlens_q.tolist()
        return [(starts[b + 1] - starts[b], used[b], starts[b], 0) for b in range(call.batch)]
    if call.layout == "dense":
        keys = [call.seqlen_k] * call.batch if used is None else used
        return [(call.seqlen_q, keys[b], b * call.seqlen_q, b * call.seqlen_k) for b in range(call.batch)]
    assert call.cu_seqlens_q is not None
    assert call.cu_seqlens_k is not None
    q_starts, k_starts = call.cu_seqlens_q.tolist(), call.cu_seqlens_k.tolist()
    keys = [end - start for start, end in pairwise(k_starts)] if used is None else used
    return [(q_starts[b + 1] - q_starts[b], keys[b], q_starts[b], k_starts[b]) for b in range(call.batch)]


def _sequences(call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Iterator[OneSequence]:
    """Yield the sequences of a call, cut to their used keys: what lies beyond is never read."""
    if call.order == "bhsd":
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    if call.layout == "paged" and call.cu_seqlens_q is None:
        q = q.flatten(0, 1)
    for b, (rows, keys, q_offset, k_offset) in enumerate(lengths(call)):
        if call.layout == "paged":
            own_k, own_v = (_in_order(call, pages, b, keys) for pages in (k, v))
            yield OneSequence(q[q_offset : q_offset + rows], own_k, own_v, b, q_offset, k_offset)
        elif call.layout == "dense":
            yield OneSequence(q[b], k[b, :keys], v[b, :keys], b, q_offset, k_offset)
        else:
            q_rows, k_rows = slice(q_offset, q_offset + rows), slice(k_offset, k_offset + keys)
            yield OneSequence(q[q_rows], k[k_rows], v[k_rows], b, q_offset, k_offset)


def _in_order(call: Call, pages: torch.Tensor, b: int, keys: int) -> torch.Tensor:
    """Return the keys or values of a sequence, (keys, hk, d), from the pages that its row of the table lists.

    Entries beyond its length are not read, whatever they hold.
    """
    assert call.page_table is not None
    if call.page_layout == "HND":
        pages = pages.transpose(1, 2)
    if not keys:
        return pages.new_zeros((0, *pages.shape[2:]))
    listed = call.page_table[b, : -(-keys // call.page_size)].long()
    return pages[listed].flatten(0, 1)[:keys]


def _join_dense(
    call: Call,
    q: torch.Tensor,
    outs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    out_dtype: torch.dtype,
    compute: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Put sequences of one length in one tensor, in the order of axes of the call."""
    if not outs:
        return q.new_zeros(call.out_shape(), dtype=out_dtype), q.new_zeros(call.lse_shape(), dtype=compute)
    out = torch.stack(outs)  # (b, s, h, d)
    out = (out.transpose(1, 2) if call.order == "bhsd" else out).contiguous()
    if call.ragged:  # (heads, total_q) in memory, as kernels write it
        return out, torch.stack(lses, dim=1).transpose(0, 1)
    return out, torch.stack(lses)


def _join_packed(
    call: Call,
    q: torch.Tensor,
    outs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    out_dtype: torch.dtype,
    compute: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Put packed sequences back in their rows; rows after the last sequence belong to none."""
    assert call.cu_seqlens_q is not None
    rest = call.total_q - sum(out.shape[0] for out in outs)
    out = q.new_zeros((rest, *call.out_shape()[1:]), dtype=out_dtype)
    lse = torch.full((call.heads, rest), -math.inf, dtype=compute, device=q.device)
    return torch.cat([*outs, out]), torch.cat([*lses, lse], dim=1)


def _attend(call: Call, sequence: OneSequence, compute: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out (s, h, d) and lse (h, s) of one sequence."""
    rows, keys = sequence.q.shape[0], sequence.k.shape[0]
    if not rows or not keys or not call.heads:
        out = sequence.q.new_zeros((rows, call.heads, call.head_dim_v), dtype=compute)
        lse = torch.full((call.heads, rows), -math.inf, dtype=compute, device=sequence.q.device)
        return out, lse if call.variant.sink is None else sinks(call, compute)[sequence.index, :, None].expand_as(lse)
    chunk = CHUNK_ELEMENTS.get(call.device.type, _CHUNK_ELEMENTS_ELSEWHERE)
    step = max(1, chunk // (call.heads * keys))
    differentiable = torch.is_grad_enabled() and any(t.requires_grad for t in _tensors_of(call, sequence))
    keys_of_heads = _Keys.of(call, sequence, compute)
    parts = []
    for first in range(0, rows, step):
        arguments = (call, sequence, keys_of_heads, first, min(first + step, rows), compute)
        if differentiable and rows > step:
            # Only one chunk's scores are alive at a time in the backward pass too.
            parts.append(checkpoint(_attend_rows, *arguments, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(_attend_rows(*arguments))
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs), torch.cat(lses, dim=1)


def _tensors_of(call: Call, sequence: OneSequence) -> Iterator[torch.Tensor]:
    yield from (sequence.q, sequence.k, sequence.v)
    yield from call.tensors.values()
    yield from (value for value in call.scalars.values() if isinstance(value, torch.Tensor))


def _attend_rows(
    call: Call, sequence: OneSequence, of_heads: _Keys, first: int, last: int, compute: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out (rows, h, d) and lse (h, rows) of query rows ``first`` to ``last``."""
    q = sequence.q[first:last].to(compute).transpose(0, 1)  # (h, rows, d)
    rows, keys = sequence.q.shape[0], sequence.k.shape[0]
    names = names_of(call, sequence.index, slice(first, last), rows, keys, sequence.q_offset, sequence.k_offset)
    tensors = {name: _as_compute(tensor, compute) for name, tensor in call.tensors.items()}
    shape = (call.heads, last - first, keys)
    visible = _truth(evaluate(call.variant.mask, names, tensors, float_dtype=compute), shape, q.device)
    logits = _product(q, of_heads.k, of_heads.odd_k, visible) * call.scale
    scores = _scores(call.variant, logits, visible, names, tensors, compute)
    visible = visible & (scores != -math.inf)  # a score may hide a pair too
    scores = torch.where(visible, scores, -math.inf)
    sink = None if call.variant.sink is None else sinks(call, compute)[sequence.index, :, None, None]
    peak = scores.detach().amax(dim=-1, keepdim=True)
    if sink is not None:
        peak = torch.maximum(peak, sink.detach())
    peak = torch.where(peak == -math.inf, 0.0, peak)
    # Twice: exp must see no −inf, whose gradient would be NaN against an infinite one from above.
    weights = torch.where(visible, torch.exp(torch.where(visible, scores - peak, 0.0)), 0.0)
    total = weights.sum(dim=-1, keepdim=True)
    dead = ~visible.any(dim=-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(sink - peak)
        dead = dead & (sink == -math.inf)
    divisor = torch.where(dead, 1.0, total)
    if call.variant.dropout:
        stays = kept(call, sequence.index, slice(first, last), keys)
        weights = torch.where(stays, weights * rate_of(call)[1], 0.0)
    out = _weighted(weights, of_heads.v, of_heads.odd_v, visible) / divisor
    lse = torch.where(dead, -math.inf, peak + torch.log(divisor)).squeeze(-1)
    return out.transpose(0, 1), lse


def _as_compute(tensor: torch.Tensor, compute: torch.dtype) -> torch.Tensor:
    return tensor.to(compute) if tensor.is_floating_point() else tensor


def names_of(
    call: Call, index: int, shown: slice, rows: int, keys: int, q_offset: int, k_offset: int
) -> dict[str, Any]:
    """Return every name of the language for query rows ``shown`` of a sequence, which broadcast to (h, rows, keys)."""
    device = call.device
    q = torch.arange(shown.start, shown.stop, device=device)[None, :, None]
    kv = torch.arange(keys, device=device)[None, None, :]
    h = torch.arange(call.heads, device=device)[:, None, None]
    return {
        **call.scalars,
        "b": index,
        "h": h,
        "hk": h // (call.heads // call.kv_heads),
        "q": q,
        "kv": kv,
        "q_pos": q + (keys - rows),
        "q_global": q + q_offset,
        "kv_global": kv + k_offset,
        "seqlen_q": rows,
        "seqlen_k": keys,
        "total_q": call.total_q,
        "total_k": call.total_k,
        "heads": call.heads,
        "kv_heads": call.kv_heads,
    }


def _truth(value: Any, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.as_tensor(value, dtype=torch.bool, device=device).broadcast_to(shape)


def _scores(
    variant: Variant,
    logits: torch.Tensor,
    visible: torch.Tensor,
    names: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    compute: torch.dtype,
) -> torch.Tensor:
    """Return the score of every visible pair; what stands at other pairs does not matter and has no gradient."""
    if variant.score is None:
        return logits
    scores = evaluate(variant.score, {**names, "s": logits}, tensors, float_dtype=compute, guard=visible)
    return scores.to(compute).broadcast_to(logits.shape)


def _product(q: torch.Tensor, k: torch.Tensor, odd: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """Return q @ k^T (h, rows, keys), in which a hidden pair takes no gradient from a key that is not finite."""
    if not odd.numel():
        return q @ k.transpose(1, 2)
    product = q @ k.index_fill(1, odd, 0.0).transpose(1, 2)
    for part in _seen(odd, visible).split(_ODD_KEYS):
        keys = torch.where(visible[:, :, part, None], k[:, None, part, :], 0.0)
        product = product.index_copy(2, part, (q[:, :, None, :] * keys).sum(dim=-1))
    return product


def _weighted(weights: torch.Tensor, v: torch.Tensor, odd: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """Return weights @ v (h, rows, d), in which a value that is not finite reaches only the rows that see it."""
    if not odd.numel():
        return weights @ v
    total = weights @ v.index_fill(1, odd, 0.0)
    for part in _seen(odd, visible).split(_ODD_KEYS):
        values = torch.where(visible[:, :, part, None], v[:, None, part, :], 0.0)
        total = total + (weights[:, :, part, None] * values).sum(dim=2)
    return total


def _not_finite(rows: torch.Tensor) -> torch.Tensor:
    """Return which rows of keys or values (hk, keys, d) hold something that is not finite in any head."""
    return (~torch.isfinite(rows).all(dim=-1).all(dim=0)).nonzero().squeeze(-1)


def _seen(odd: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """Return those of some rows of keys or values that any query sees."""
    return odd[visible[:, :, odd].any(dim=0).any(dim=0)]
