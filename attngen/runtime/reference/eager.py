"""The eager reference: any variant on any device, from the same expressions as the kernels, in plain torch.

It is slow and exact: scores in float32 (or float64, as the oracle of a kernel), a few query rows at a time so that
memory stays bounded, gradients by autograd. Nothing invisible contributes anything, not even a NaN: invisible keys
and values are never multiplied by a zero, they are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from attngen.dtypes import LATENT_ROWS
from attngen.errors import CallError
from attngen.lang.eager import Limits, evaluate
from attngen.lang.variant import WEIGHTS, Variant
from attngen.runtime.arguments.checked import Call
from attngen.runtime.arguments.debug import limits_of
from attngen.runtime.arguments.descales import dequantized
from attngen.runtime.arguments.dropout import kept, rate_of
from attngen.runtime.arguments.extra_cache import has_extra_cache, with_extra_rows
from attngen.runtime.arguments.latent_rows import unpacked
from attngen.runtime.arguments.torch_state import recording
from attngen.runtime.reference.anchor import with_zero_gradients
from attngen.runtime.reference.listed import listed
from attngen.runtime.reference.sinks import sinks

#: Elements of the score matrix that are held at a time: some megabytes for a CPU's caches, more to fill a GPU.
CHUNK_ELEMENTS = {"cpu": 2**21}
CHUNK_ELEMENTS_ELSEWHERE = 2**26

#: Keys with a NaN or an infinity that are handled at a time, since each takes a product of its own.
_ODD_KEYS = 16


#: Features of variants that the reference computes, and its derivatives.
SERVES = ("mask", "score", "sink", "dropout", "keys", "sink_in_lse", "weights", "max_logits")


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
class _SequenceKeys:
    """Keys and values of one sequence for all query heads, (h, keys, d), and which rows hold what is not finite."""

    k: torch.Tensor
    v: torch.Tensor
    odd_k: torch.Tensor
    odd_v: torch.Tensor

    @classmethod
    def of(
        cls,
        call: Call,
        sequence: OneSequence,
        compute: torch.dtype,
        *,
        heads: torch.Tensor | None = None,
        smooth: bool = False,
    ) -> _SequenceKeys:
        """Return those of a sequence, once for all chunks of its query rows; ``heads`` and ``smooth`` are those of
        ``attend_rows``."""
        own = [rows.to(compute).transpose(0, 1) for rows in (sequence.k, sequence.v)]
        groups = call.heads // call.kv_heads
        if heads is not None:
            k, v = (rows[heads // groups] for rows in own)
        else:
            k, v = (rows.repeat_interleave(groups, dim=0) if groups > 1 else rows for rows in own)
        none = torch.empty(0, dtype=torch.int64, device=call.device)
        return cls(k, v, none, none) if smooth else cls(k, v, *map(_not_finite, own))


def reference(
    call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, compute: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out and the natural log-sum-exp of a checked call.

    ``compute`` is the dtype of all arithmetic: float32 unless the inputs are float64. With float64 both results stay
    float64, which makes an oracle; otherwise out has q's dtype and lse is float32. Rows without a visible key give
    0 and −inf, or the sink of their head if there is one; rows of no sequence give 0 and −inf. Where weights have no
    log-sum-exp, 0 stands for that of other rows. With ``max_logits`` a last axis has it and, as a constant, the largest
    logit of the row, −inf without a visible key. Autograd records it if
    gradients are enabled, also inside an operator. Raises IndexError for a load out of extent that nothing guards, and
    CallError for an element beyond the range that the variant declares, and for an input of inference mode that asks
    for a gradient.
    """
    inputs = {"q": q, "k": k, "v": v, **call.tensors, **call.scalars}
    learned = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor) and value.requires_grad}
    if not torch.is_grad_enabled() or not learned:
        return _computed(call, q, k, v, compute)
    for name, tensor in learned.items():
        if tensor.is_inference():
            raise CallError(
                f"{name} requires a gradient, but was made in inference mode, which autograd does not record; clone it "
                "outside of torch.inference_mode()"
            )
    with recording():
        out, lse = with_zero_gradients(_computed(call, q, k, v, compute), tuple(learned.values()))
    return out, lse


def _computed(
    call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, compute: torch.dtype | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``reference``, recorded or not."""
    compute = compute or (torch.float64 if q.dtype == torch.float64 else torch.float32)
    out_dtype = torch.float64 if compute == torch.float64 else call.out_dtype
    outs, lses = [], []
    for sequence in sequences(call, q, k, v, compute):
        out, lse = _attend(call, sequence, compute)
        outs.append(out.to(out_dtype))  # while others are computed in twice the bytes
        lses.append(lse)
    out, lse = joined(call, q, outs, lses, out_dtype, compute)
    return out, (lse.movedim(-1, 0).contiguous().movedim(0, -1) if call.variant.max_logits else lse)


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


def sequences(
    call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, compute: torch.dtype
) -> Iterator[OneSequence]:
    """Yield the sequences of a call, cut to their used keys: what lies beyond is never read."""
    for b, place in enumerate(lengths(call)):
        yield _in_units(call, one_sequence(call, q, k, v, b, place), compute)


def sequence_at(
    call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, b: int, compute: torch.dtype
) -> OneSequence:
    """Return sequence ``b`` as ``sequences`` yields it."""
    return _in_units(call, one_sequence(call, q, k, v, b, lengths(call)[b]), compute)


def _in_units(call: Call, sequence: OneSequence, compute: torch.dtype) -> OneSequence:
    return _dequantized(call, sequence, compute) if call.descales else sequence


def one_sequence(
    call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, b: int, place: tuple[int, int, int, int]
) -> OneSequence:
    """Return a sequence of a call; ``place`` is its entry of ``lengths``."""
    sequence = _rows_of(call, q, k, v, b, place)
    if call.kv_dtype in LATENT_ROWS and call.layout != "paged":
        k = unpacked(call.kv_dtype, sequence.k[None])[0]
        sequence = replace(sequence, k=k, v=k[..., : call.head_dim_v])
    if has_extra_cache(call):
        k, v = with_extra_rows(call, sequence.k, sequence.v)
        return replace(sequence, k=k, v=v)
    return sequence


def _rows_of(
    call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, b: int, place: tuple[int, int, int, int]
) -> OneSequence:
    """A sequence as its tensors have it, but with keys of pages of packed rows as numbers."""
    rows, keys, q_offset, k_offset = place
    if call.order == "bhsd":
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    if call.layout == "paged":
        q = q if call.cu_seqlens_q is not None else q.flatten(0, 1)
        own_k, own_v = (_in_order(call, pages, b, keys) for pages in (k, v))
        own_v = own_v[..., : call.head_dim_v]  # of packed rows k and v are the same
        return OneSequence(q[q_offset : q_offset + rows], own_k, own_v, b, q_offset, k_offset)
    if call.layout == "dense":
        return OneSequence(q[b], k[b, :keys], v[b, :keys], b, q_offset, k_offset)
    q_rows, k_rows = slice(q_offset, q_offset + rows), slice(k_offset, k_offset + keys)
    return OneSequence(q[q_rows], k[k_rows], v[k_rows], b, q_offset, k_offset)


def _in_order(call: Call, pages: torch.Tensor, b: int, keys: int) -> torch.Tensor:
    """Return the keys or values of a sequence, (keys, hk, d), from the pages that its row of the table lists.

    Entries beyond its length are not read, whatever they hold.
    """
    assert call.page_table is not None
    if call.page_layout == "HND":
        pages = pages.transpose(1, 2)
    packed = call.kv_dtype in LATENT_ROWS
    if not keys:
        return pages.new_zeros((0, pages.shape[2], call.head_dim_qk if packed else pages.shape[3]))
    own = pages[call.page_table[b, : -(-keys // call.page_size)].long()]
    return (unpacked(call.kv_dtype, own) if packed else own).flatten(0, 1)[:keys]


def joined(
    call: Call,
    q: torch.Tensor,
    outs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    out_dtype: torch.dtype,
    compute: torch.dtype,
    *,
    rest: float = -math.inf,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return results of sequences, (rows, h, d) and (h, rows), as the call lays them out.

    ``rest`` is the log-sum-exp of rows that no sequence has."""
    if call.order == "thd":
        return _join_packed(call, q, [out.to(out_dtype) for out in outs], lses, out_dtype, compute, rest)
    return _join_dense(call, q, [out.to(out_dtype) for out in outs], lses, out_dtype, compute)


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
    rest: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Put packed sequences back in their rows; rows after the last sequence belong to none."""
    assert call.cu_seqlens_q is not None
    unowned = call.total_q - sum(out.shape[0] for out in outs)
    out = q.new_zeros((unowned, *call.out_shape()[1:]), dtype=out_dtype)
    lse = torch.full((call.heads, unowned, *call.lse_shape()[2:]), rest, dtype=compute, device=q.device)
    return torch.cat([*outs, out]), torch.cat([*lses, lse], dim=1)


def without_keys(
    call: Call, sequence: OneSequence, rows: int, compute: torch.dtype, *, heads: torch.Tensor | None = None,
    smooth: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Out (rows, h, d) and lse (h, rows) of rows that see no key: 0, and −inf or the sink; of all ``heads`` or of
    these. CallError as ``scores_of``."""
    call.variant.require(SERVES, "the reference")
    count = call.heads if heads is None else len(heads)
    out = sequence.q.new_zeros((rows, count, call.head_dim_v), dtype=compute)
    lse = sequence.q.new_full((count, rows), -math.inf, dtype=compute)
    if call.variant.sink is not None and call.variant.sink_in_lse:
        of_heads = sinks(call, compute, checked=not smooth)[sequence.index]
        lse = (of_heads if heads is None else of_heads[heads])[:, None].expand_as(lse)
    return out, (torch.stack((lse, lse.new_full(lse.shape, -math.inf)), dim=-1) if call.variant.max_logits else lse)


def _attend(call: Call, sequence: OneSequence, compute: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out (s, h, d) and lse (h, s) of one sequence."""
    rows, keys = sequence.q.shape[0], sequence.k.shape[0]
    if not rows or not keys or not call.heads:
        return without_keys(call, sequence, rows, compute)
    chunk = CHUNK_ELEMENTS.get(call.device.type, CHUNK_ELEMENTS_ELSEWHERE)
    step = max(1, chunk // (call.heads * keys))
    differentiable = torch.is_grad_enabled() and any(t.requires_grad for t in _tensors_of(call, sequence))
    keys_of_heads = _SequenceKeys.of(call, sequence, compute)
    parts = []
    for first in range(0, rows, step):
        arguments = (call, sequence, keys_of_heads, first, min(first + step, rows), compute)
        if differentiable and rows > step:
            # Only one chunk's scores are alive at a time in the backward pass too.
            parts.append(
                checkpoint(
                    _attend_rows, *arguments, use_reentrant=False, preserve_rng_state=False, context_fn=_contexts
                )
            )
        else:
            parts.append(_attend_rows(*arguments))
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs), torch.cat(lses, dim=1)


def _contexts() -> tuple[Any, Any]:
    """Contexts of a chunk and of its recomputation, which may happen inside an operator, too."""
    return nullcontext(), recording()


def _tensors_of(call: Call, sequence: OneSequence) -> Iterator[torch.Tensor]:
    yield from (sequence.q, sequence.k, sequence.v)
    yield from call.tensors.values()
    yield from (value for value in call.scalars.values() if isinstance(value, torch.Tensor))


def _attend_rows(
    call: Call, sequence: OneSequence, keys: _SequenceKeys, first: int, last: int, compute: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out (rows, h, d) and lse (h, rows) of query rows ``first`` to ``last``."""
    return attend_rows(call, sequence, slice(first, last), compute, keys=keys)


def attend_rows(
    call: Call,
    sequence: OneSequence,
    rows: slice | torch.Tensor,
    compute: torch.dtype,
    *,
    heads: torch.Tensor | None = None,
    smooth: bool = False,
    keys: _SequenceKeys | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out (rows, h, d) and lse (h, rows) of some query rows of a sequence, of all ``heads`` or of these.

    ``smooth`` is for transforms of torch.func: nothing depends on values, so that no index is checked, and a hidden key
    or value which is not finite may reach what does not see it. ``keys`` are those of the sequence, if they are known.
    """
    keys = keys or _SequenceKeys.of(call, sequence, compute, heads=heads, smooth=smooth)
    visible, scores = scores_of(call, sequence, rows, compute, heads=heads, smooth=smooth, keys=keys)
    weights, divisor, lse = probabilities_of(call, sequence, rows, visible, scores, compute, heads=heads, smooth=smooth)
    out = _weighted(weights, keys.v, keys.odd_v, visible) / divisor
    if call.variant.max_logits:
        lse = torch.stack((lse, scores.detach().amax(dim=-1)), dim=-1)
    return out.transpose(0, 1), lse


def scores_of(
    call: Call,
    sequence: OneSequence,
    rows: slice | torch.Tensor,
    compute: torch.dtype,
    *,
    heads: torch.Tensor | None = None,
    smooth: bool = False,
    keys: _SequenceKeys | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Visible pairs, and the logits after the score expression: both (h, rows, keys), of all ``heads`` or of these.

    A pair is visible where the mask holds and the score is more than −inf; logits are −inf elsewhere. Raises CallError
    for a feature of the variant that is not among ``SERVES``.
    """
    call.variant.require(SERVES, "the reference")
    q = sequence.q[rows].to(compute).transpose(0, 1)  # (h, rows, d)
    q = q if heads is None else q[heads]
    keys = keys or _SequenceKeys.of(call, sequence, compute, heads=heads, smooth=smooth)
    queries, seqlen_k = sequence.q.shape[0], sequence.k.shape[0]
    place = sequence.q_offset, sequence.k_offset
    names = names_of(call, sequence.index, rows, queries, seqlen_k, *place, heads=heads)
    tensors = {name: _as_compute(tensor, compute) for name, tensor in call.tensors.items()}
    shape = (q.shape[0], q.shape[1], seqlen_k)
    limits = limits_of(call)
    shown = evaluate(call.variant.mask, names, tensors, float_dtype=compute, checked=not smooth, limits=limits)
    visible = _truth(shown, shape, q.device)
    if call.variant.keys is not None:
        visible = visible & (listed(call, sequence.index, rows, seqlen_k, heads) > 0)
    logits = _product(q, keys.k, keys.odd_k, visible) * call.scale
    scores = _scores(call.variant, logits, visible, names, tensors, compute, checked=not smooth, limits=limits)
    visible = visible & (scores != -math.inf)  # a score may hide a pair too
    return visible, torch.where(visible, scores, -math.inf)


def probabilities_of(
    call: Call,
    sequence: OneSequence,
    rows: slice | torch.Tensor,
    visible: torch.Tensor,
    scores: torch.Tensor,
    compute: torch.dtype,
    *,
    heads: torch.Tensor | None = None,
    smooth: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the exponentials of logits less the largest of their row, after dropout (h, rows, keys); what divides
    them (h, rows, 1); and the log-sum-exp (h, rows). Of weights that have none: the weights, 1, and 0, or −inf where a
    row sees no key."""
    if not call.variant.has_lse:
        weights = weights_of(call.variant, scores)
        blind = torch.where(visible.any(dim=-1), 0.0, -math.inf).to(compute)
        return weights, torch.ones_like(weights[..., :1]), blind
    sink = None
    if call.variant.sink is not None:
        of_heads = sinks(call, compute, checked=not smooth)[sequence.index]
        sink = (of_heads if heads is None else of_heads[heads])[:, None, None]
    peak = scores.detach().amax(dim=-1, keepdim=True)
    if sink is not None:
        peak = torch.maximum(peak, sink.detach())
    peak = torch.where(peak == -math.inf, 0.0, peak)
    # Twice: exp must see no −inf, whose gradient would be NaN against an infinite one from above.
    weights = torch.where(visible, torch.exp(torch.where(visible, scores - peak, 0.0)), 0.0)
    if call.variant.keys is not None:
        weights = weights * listed(call, sequence.index, rows, visible.shape[-1], heads)
    total = weights.sum(dim=-1, keepdim=True)
    dead = ~visible.any(dim=-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(sink - peak)
        dead = dead & (sink == -math.inf)
    divisor = torch.where(dead, 1.0, total)
    if call.variant.dropout:
        stays = kept(call, sequence.index, rows, visible.shape[-1])
        weights = torch.where(stays if heads is None else stays[heads], weights * rate_of(call)[1], 0.0)
    if call.variant.sink_in_lse:
        lse = torch.where(dead, -math.inf, peak + torch.log(divisor)).squeeze(-1)
    else:
        times = listed(call, sequence.index, rows, visible.shape[-1], heads)
        lse = torch.logsumexp(torch.where(visible, scores + torch.log(times.to(compute)), -math.inf), dim=-1)
    return weights, divisor, lse


def weights_of(variant: Variant, logits: torch.Tensor) -> torch.Tensor:
    """Weights of logits of which each is a function of its own; 0 where a logit is −inf: its pair is hidden."""
    weight = WEIGHTS[variant.weights]
    assert weight is not None  # else the variant has a softmax
    shown = logits != -math.inf
    of_shown = evaluate(weight, {"s": torch.where(shown, logits, 0.0)}, float_dtype=logits.dtype)
    return torch.where(shown, of_shown, 0.0)


def _as_compute(tensor: torch.Tensor, compute: torch.dtype) -> torch.Tensor:
    return tensor.to(compute) if tensor.is_floating_point() else tensor


def names_of(
    call: Call,
    index: int,
    shown: slice | torch.Tensor,
    rows: int,
    keys: int,
    q_offset: int,
    k_offset: int,
    *,
    heads: torch.Tensor | None = None,
) -> dict[str, Any]:
    """Return every name of the language for query rows ``shown`` of a sequence, which broadcast to (h, rows, keys)."""
    device = call.device
    q = (torch.arange(shown.start, shown.stop, device=device) if isinstance(shown, slice) else shown)[None, :, None]
    kv = torch.arange(keys, device=device)[None, None, :]
    h = (torch.arange(call.heads, device=device) if heads is None else heads)[:, None, None]
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
    *,
    checked: bool,
    limits: Limits,
) -> torch.Tensor:
    """Return the score of every visible pair; what stands at other pairs does not matter and has no gradient."""
    if variant.score is None:
        return logits
    names = {**names, "s": logits}
    scores = evaluate(
        variant.score, names, tensors, float_dtype=compute, guard=visible, checked=checked, limits=limits
    )  # fmt: skip
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
    """Mask of the rows of keys or values (hk, keys, d) that hold something that is not finite in any head."""
    return (~torch.isfinite(rows).all(dim=-1).all(dim=0)).nonzero().squeeze(-1)


def _seen(odd: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """Return those of some rows of keys or values that any query sees."""
    return odd[visible[:, :, odd].any(dim=0).any(dim=0)]
