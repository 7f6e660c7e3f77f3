"""Baselines on the same inputs in the same dtype: the yardsticks for a kernel's error.

``plain`` rounds after every step, as PyTorch does. ``fused`` rounds where a fused kernel with a custom score does:
logits stay in float32, and probabilities are rounded relative to a reference of their row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from attngen.lang.eager import evaluate
from attngen.lang.ir import Expr, Load, rewrite
from attngen.lang.listed import LISTS
from attngen.runtime.arguments.checked import Call
from attngen.runtime.arguments.descales import dequantized
from attngen.runtime.arguments.dropout import kept, rate_of
from attngen.runtime.arguments.extra_cache import with_extra_rows
from attngen.runtime.autograd.derivatives import pushforward
from attngen.runtime.reference.eager import lengths, names_of, weights_of
from attngen.runtime.reference.listed import listed

#: Features of variants that it computes.
SERVES = ("mask", "score", "sink", "dropout", "keys", "sink_in_lse", "weights")


@dataclass(frozen=True, slots=True)
class _Sequence:
    """One sequence with heads first: q (h, rows, d), k and v (h, keys, d), and which pairs the mask shows."""

    q: Tensor
    k: Tensor
    v: Tensor
    rows: slice
    visible: Tensor  # (h, rows, keys)
    log_times: Tensor | None  # of the same shape: what a key adds to its logit that a query lists so many times
    names: dict[str, object]
    index: int


def plain(
    call: Call, q: Tensor, k: Tensor, v: Tensor, probabilities: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Return out and lse of plain PyTorch: every step rounds to q's dtype, save the score, which is float32. Of
    quantized tensors only the ``probabilities`` are rounded, to 8 bits unless a dtype is given: PyTorch has no
    arithmetic of 8 bits.

    Shapes as ``reference``. Rows that see nothing give 0 and −inf, or their sink.
    """

    return _over_sequences(call, q, k, v, lambda one: _attend(call, one, call.tensors, probabilities))


def _with_sink(call: Call, scores: Tensor, names: Mapping[str, object], tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the logits (h, rows, keys) with one more after them: the sink of the head, if there is one."""
    if call.variant.sink is None:
        return scores
    sink = evaluate(call.variant.sink, names, tensors).to(scores.dtype).to(scores.device)
    return torch.cat([scores, sink.broadcast_to(*scores.shape[:2], 1)], dim=-1)


def _attend(
    call: Call, one: _Sequence, tensors: Mapping[str, Tensor], probabilities: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Return out (h, rows, d) and lse (h, rows) of one sequence."""
    scores = (one.q @ one.k.transpose(1, 2)) * call.scale
    if call.variant.score is not None:
        names = {**one.names, "s": scores.float()}
        scores = evaluate(call.variant.score, names, tensors, guard=one.visible).to(one.q.dtype)
    scores = _of_visible(one, scores)
    if not call.variant.has_lse:
        return weights_of(call.variant, scores) @ one.v, _in_place_of_lse(one)
    keys = scores.shape[-1]
    scores = _with_sink(call, scores, one.names, tensors)
    if call.descales:
        return _attend_quantized(one, scores, keys, probabilities)
    weights = torch.softmax(scores, dim=-1).nan_to_num(nan=0.0)[..., :keys]  # dead rows
    if call.variant.dropout:
        stays = kept(call, one.index, slice(0, scores.shape[1]), keys)
        weights = torch.where(stays, weights * rate_of(call)[1], 0.0)
    summed = scores if call.variant.sink_in_lse else scores[..., :keys]
    return weights @ one.v, torch.logsumexp(summed.float(), dim=-1)


def _of_visible(one: _Sequence, scores: Tensor) -> Tensor:
    """The logits (h, rows, keys) of what the mask shows, -inf elsewhere; a key counts as often as it is listed."""
    scores = scores.broadcast_to(one.visible.shape)
    if one.log_times is not None:
        scores = scores + one.log_times.to(scores.dtype)
    return torch.where(one.visible, scores, -math.inf)


def _in_place_of_lse(one: _Sequence) -> Tensor:
    """Stand-in (h, rows) of a log-sum-exp that weights do not have, as the reference gives it."""
    return torch.where(one.visible.any(dim=-1), 0.0, -math.inf)


#: The largest P becomes about this before it is rounded to 8 bits: e4m3 ends at 448.
_LARGEST_OF_BYTES = 2.0**7


def _attend_quantized(
    one: _Sequence, scores: Tensor, keys: int, probabilities: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    """Return out and lse of logits whose probabilities are rounded before they are divided by their sum."""
    summed = torch.logsumexp(scores, dim=-1)
    peak = scores.amax(dim=-1, keepdim=True)
    peak = torch.where(peak == -math.inf, 0.0, peak)
    weights = _in_few_bits(torch.exp(scores[..., :keys] - peak), probabilities)
    total = torch.exp(summed[..., None] - peak)
    return weights @ one.v / torch.where(total == 0, 1.0, total), summed


def _in_few_bits(weights: Tensor, probabilities: torch.dtype | None) -> Tensor:
    """Return probabilities as a dtype holds them, or as 8 bits do."""
    if probabilities is not None:
        return weights.to(probabilities).to(weights.dtype)
    return (weights * _LARGEST_OF_BYTES).to(torch.float8_e4m3fn).to(weights.dtype) / _LARGEST_OF_BYTES


#: Relative error of the hardware's tanh (PTX ISA, tanh.approx.f32), which kernels in 16 bits use with ``fast_math``.
_TANH_ERROR = 2.0**-11

#: The largest errors with ``fast_math`` (docs/spec.md) of the functions that are made of it, by argument and result.
#: Those of other functions are about as small as rounding to float32.
_ERRORS: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    torch.tanh: lambda x, y: _TANH_ERROR * y,
    torch.sigmoid: lambda x, y: _TANH_ERROR * (y - 0.5),
    torch.nn.functional.silu: lambda x, y: _TANH_ERROR * (y - 0.5 * x),
    torch.erf: lambda x, y: 4 * _TANH_ERROR * y.clamp(-0.5, 0.5),
}

#: A probability below this is too small to matter, whatever its logit.
_NEGLIGIBLE = 2.0**-24


class _Approximate(TorchFunctionMode):
    """Makes functions as inexact as those of kernels: by their largest errors in the first draw, at random in the
    others."""

    def __init__(self, draw: int, generator: torch.Generator) -> None:
        super().__init__()
        self._draw, self._generator = draw, generator

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in _ERRORS:
            return result
        noise = 1.0 if self._draw == 0 else 2 * _uniform(result.shape, self._generator).to(result) - 1
        return result + noise * _ERRORS[func](args[0], result)


def _uniform(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    return torch.rand(tuple(shape), generator=generator, dtype=torch.float32, device="cpu")


@dataclass(frozen=True, slots=True)
class Fused:
    """Results in a fused kernel's arithmetic, and the largest scored logit of a probability that matters."""

    out: Tensor
    lse: Tensor
    logits: float


def fused(call: Call, q: Tensor, k: Tensor, v: Tensor, draw: int, probabilities: torch.dtype | None = None) -> Fused:
    """Results of a fused kernel's arithmetic: arguments and shapes as ``plain``; other draws round otherwise."""
    generator = torch.Generator().manual_seed(draw)
    logits = [0.0]
    rounded_to = call.out_dtype if call.descales else q.dtype  # quantized tensors come in float32

    def attend(one: _Sequence) -> tuple[Tensor, Tensor]:
        products = one.q.float() @ one.k.float().transpose(1, 2)
        scores = _fused_logits(call, one, products, call.tensors, rounded_to, draw, generator)
        if not call.variant.has_lse:
            weights = weights_of(call.variant, scores)
            matter = weights > _NEGLIGIBLE
            logits.append(float(scores[matter].abs().max()) if matter.any() else 0.0)
            rounded = weights.to(one.q.dtype).float() @ one.v.float()
            return rounded.to(one.q.dtype), _in_place_of_lse(one)
        summed = torch.logsumexp(_with_sink(call, scores, one.names, call.tensors), dim=-1)
        matter = torch.exp(scores - torch.where(summed == -math.inf, 0.0, summed)[..., None]) > _NEGLIGIBLE
        logits.append(float(scores[matter].abs().max()) if matter.any() else 0.0)
        # Kernels keep the maximum of some tile, so that the largest probability is rounded as well.
        shift = summed - 0.7 * _uniform(summed.shape, generator).to(summed)
        shift = torch.where(summed == -math.inf, 0.0, shift)[..., None]
        weights = _dropped(call, one, torch.exp(scores - shift))
        weights = _in_few_bits(weights, probabilities) if call.descales else weights.to(one.q.dtype).float()
        total = torch.exp(summed[..., None] - shift)
        return (weights @ one.v.float() / torch.where(total == 0, 1.0, total)).to(one.q.dtype), summed

    return Fused(*_over_sequences(call, q, k, v, attend), max(logits))


def _fused_logits(
    call: Call, one: _Sequence, products: Tensor, tensors: Mapping[str, Tensor], dtype: torch.dtype, draw: int,
    generator: torch.Generator,
) -> Tensor:  # fmt: skip
    """Return the logits (h, rows, keys) of float32 products; -inf where nothing is seen. ``dtype`` is that of q."""
    scores = products * call.scale
    if call.variant.score is not None:
        with nullcontext() if dtype == torch.float32 else _Approximate(draw, generator):
            scores = evaluate(call.variant.score, {**one.names, "s": scores}, tensors, guard=one.visible)
    return _of_visible(one, scores)


def _dropped(call: Call, one: _Sequence, weights: Tensor) -> Tensor:
    """Return probabilities (h, rows, keys), or their gradients, after dropout."""
    if not call.variant.dropout:
        return weights
    stays = kept(call, one.index, slice(0, weights.shape[1]), weights.shape[2])
    return torch.where(stays, weights * rate_of(call)[1], 0.0)


def fused_gradients(
    call: Call,
    given: Mapping[str, Tensor],
    dout: Tensor,
    dlse: Tensor,
    names: Sequence[str],
    draw: int,
) -> dict[str, Tensor]:
    """Return the gradients of a fused backward with respect to q, k, v and the variant's tensors ``names``.

    ``given`` holds q, k, v, and what the forward stored: out, and lse in float32. Probabilities are recomputed from
    the latter, D is a sum of products with the former, and P and dS are rounded to q's dtype.
    """
    generator = torch.Generator().manual_seed(draw)
    leaves = {name: given[name].detach().float() for name in "qkv"}
    own = dict(call.tensors) | {name: call.tensors[name].detach().float().requires_grad_() for name in names}
    total = {name: torch.zeros_like(leaf) for name, leaf in leaves.items()} | {
        name: torch.zeros_like(own[name]) for name in names
    }
    groups, dtype = call.heads // call.kv_heads, given["q"].dtype
    for b, one in _sequences(call, leaves["q"], leaves["k"], leaves["v"]):
        products, scores, lse, above, p, delta, ds = _fused_ds(call, b, one, given, (dout, dlse), own, draw, generator)
        dropped = _dropped(call, one, p).to(dtype).float()
        learned = [own[name] for name in names]
        with torch.enable_grad():
            gradients_of_score = gradients_of((scores,), [products, *learned], (ds,))
            sinks: Sequence[Tensor | None] = [None] * len(learned)
            if call.variant.sink is not None and names:
                value = evaluate(call.variant.sink, one.names, own).float().broadcast_to(*lse.shape[:1], 1, 1)[..., 0]
                weight = torch.where(torch.isfinite(lse), torch.exp(value.detach() - lse.nan_to_num(neginf=0.0)), 0.0)
                sinks = gradients_of((value.expand_as(lse),), learned, (-weight * delta[..., 0],))
        slopes = torch.zeros_like(ds) if gradients_of_score[0] is None else gradients_of_score[0]
        rounded = slopes.nan_to_num(nan=0.0).to(dtype).float()
        # what the derivative of the score leaves of the scale is a factor of the finished products
        parts = {
            "q": rounded @ one.k,
            "k": rounded.transpose(1, 2) @ one.q,
            "v": dropped.transpose(1, 2) @ above,
        }
        for name, part in parts.items():
            rows = part if name == "q" else part.unflatten(0, (-1, groups)).sum(1)
            _place(call, total[name], rows.transpose(0, 1), name, b)
        for name, *gradients in zip(names, gradients_of_score[1:], sinks, strict=True):
            for gradient in gradients:
                if gradient is not None:
                    total[name] += gradient.nan_to_num(nan=0.0)
    return {
        name: gradient.to(given[name].dtype if name in "qkv" else gradient.dtype) for name, gradient in total.items()
    }


def _fused_ds(
    call: Call, b: int, one: _Sequence, given: Mapping[str, Tensor], results: tuple[Tensor, Tensor],
    own: Mapping[str, Tensor], draw: int, generator: torch.Generator,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Products of q and k and the logits of a sequence, with a graph of autograd between them, and then its
    log-sum-exp, dO, P, D, and dS, the derivative by the logits; all in float32. ``results`` are the gradients of output
    and log-sum-exp."""
    varlen, dtype, (dout, dlse) = call.layout == "varlen", given["q"].dtype, results
    place = one.rows if varlen else b
    above, stored = (t[place].float().transpose(0, 1) for t in (dout, given["out"]))
    lse, above_lse = (t[:, one.rows] if varlen else t[b] for t in (given["lse"], dlse))
    rows_see = torch.isfinite(lse)[..., None]
    above = torch.where(one.visible.any(dim=-1)[..., None], above, 0.0)
    with torch.enable_grad():
        products = (one.q @ one.k.transpose(1, 2)).requires_grad_()
        scores = _fused_logits(call, one, products, own, dtype, draw, generator)
    dp = _dropped(call, one, above @ one.v.transpose(1, 2))
    if not call.variant.has_lse:
        logits = scores.detach().requires_grad_()
        with torch.enable_grad():
            p = weights_of(call.variant, logits)
        (ds,) = torch.autograd.grad(p, logits, dp)
        return products, scores, lse, above, p.detach(), torch.zeros_like(p[..., :1]), ds
    p = torch.where(rows_see, torch.exp(scores.detach() - lse.nan_to_num(neginf=0.0)[..., None]), 0.0)
    delta = ((above * stored).sum(-1) - torch.where(torch.isfinite(lse), above_lse, 0.0))[..., None]
    ds = p * (dp - delta)
    return products, scores, lse, above, p, delta, ds


#: Draws of the roundings of terms, of which the root mean square is taken.
_ROUNDINGS = 8


def roundings_of_terms(
    call: Call, given: Mapping[str, Tensor], dout: Tensor, dlse: Tensor, names: Sequence[str]
) -> dict[str, float]:
    """Error of the gradients of the variant's tensors ``names`` that rounding each of their terms to q's dtype makes:
    the root mean square, of the entry where it is largest.

    Kernels add up P (dP - D) times a derivative, of which P, P times the derivative, or dS has q's dtype. The sums
    cancel, down to a single number for a scalar factor, and their yardsticks may happen to be much nearer to the truth.
    Terms of one pair by several reads of a tensor may be rounded in several places, so that they cancel no more: the
    errors of the reads are added up. ``given`` is as in ``fused_gradients``.
    """
    dtype = given["q"].dtype
    if dtype == torch.float32 or call.variant.score is None or not names:
        return dict.fromkeys(names, 0.0)
    leaves = {name: given[name].detach().float() for name in "qkv"}
    score, reads = _apart(call.variant.score, names)
    if not reads:  # a sink alone reads them
        return dict.fromkeys(names, 0.0)
    own = dict(call.tensors) | {
        read: call.tensors[name].detach().float().requires_grad_() for read, name in reads.items()
    }
    apart = replace(call, variant=replace(call.variant, score=score))
    learned, generator = [own[read] for read in reads], torch.Generator().manual_seed(0)
    signs = torch.Generator(dout.device).manual_seed(0)
    squares = {read: torch.zeros_like(own[read], dtype=torch.float64, requires_grad=False) for read in reads}
    for b, one in _sequences(call, leaves["q"], leaves["k"], leaves["v"]):
        *_, ds = parts = _fused_ds(apart, b, one, given, (dout, dlse), own, 0, generator)
        for _ in range(_ROUNDINGS):
            either = 2.0 * torch.randint(0, 2, ds.shape, generator=signs, device=ds.device) - 1.0
            with torch.enable_grad():
                sums = gradients_of((parts[1],), learned, (ds * either,), keep=True)
            for read, total in zip(reads, sums, strict=True):
                if total is not None:
                    squares[read] += torch.where(total.isfinite(), total.double(), 0.0).square() / _ROUNDINGS
    rounding = torch.finfo(dtype).eps / 2 / math.sqrt(3)  # of errors that are equally likely up to half a unit
    errors = {name: torch.zeros_like(call.tensors[name], dtype=torch.float64) for name in names}
    for read, name in reads.items():
        errors[name] += squares[read].sqrt()
    return {name: rounding * float(error.max()) if error.numel() else 0.0 for name, error in errors.items()}


def _apart(score: Expr, names: Sequence[str]) -> tuple[Expr, dict[str, str]]:
    """A score in which each element that is read of some tensors is that of a tensor of its own, and the tensors by
    these names."""
    reads: dict[Load, str] = {}

    def renamed(node: Expr) -> Expr | None:
        if not isinstance(node, Load) or node.tensor not in names:
            return None
        return replace(node, tensor=reads.setdefault(node, f"{node.tensor} {len(reads)}"))

    score = rewrite(score, renamed)
    return score, {read: load.tensor for load, read in reads.items()}


def _place(call: Call, into: Tensor, rows: Tensor, name: str, sequence: int) -> None:
    """Add the gradients of one sequence's rows (rows, heads, d) where they belong."""
    _, _, q_start, k_start = lengths(call)[sequence]
    if call.layout == "varlen":
        start = q_start if name == "q" else k_start
        into[start : start + rows.shape[0]] += rows
    else:
        into[sequence, : rows.shape[0]] += rows


def gradients_of(
    results: Sequence[Tensor], leaves: Sequence[Tensor], above: Sequence[Tensor], *, keep: bool = False
) -> tuple[Tensor | None, ...]:
    """Return autograd's gradients, None where nothing depends on a leaf; a result may depend on none at all.

    ``keep``: more gradients of these results will be asked for.
    """
    pairs = [(result, gradient) for result, gradient in zip(results, above, strict=True) if result.requires_grad]
    if not pairs:
        return (None,) * len(leaves)
    kept, gradients = zip(*pairs, strict=True)
    return torch.autograd.grad(kept, leaves, gradients, allow_unused=True, retain_graph=keep)


def plain_gradients(
    call: Call, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor, names: Sequence[str]
) -> dict[str, Tensor]:
    """Return plain PyTorch's gradients with respect to q, k, v and the variant's tensors ``names``, in their dtypes.

    Rows that see nothing have none, except through a sink in their log-sum-exp.
    """
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in zip("qkv", (q, k, v), strict=True)}
    own = dict(call.tensors) | {name: call.tensors[name].detach().requires_grad_() for name in names}
    leaves |= {name: own[name] for name in names}
    total = {name: torch.zeros_like(leaf, memory_format=torch.contiguous_format) for name, leaf in leaves.items()}
    with torch.enable_grad():
        for b, one in _sequences(call, leaves["q"], leaves["k"], leaves["v"]):
            out, lse = _attend(call, one, own)
            varlen = call.layout == "varlen"
            above = dout[one.rows] if varlen else dout[b]
            above_lse = dlse[:, one.rows] if varlen else dlse[b]
            alive = one.visible.any(dim=-1)
            above = torch.where(alive[..., None], above.transpose(0, 1), 0.0)
            summed = alive if call.variant.sink is None else torch.isfinite(lse)
            results = (out, torch.where(summed, lse, 0.0))
            gradients = gradients_of(results, list(leaves.values()), (above, torch.where(summed, above_lse, 0.0)))
            for name, gradient in zip(leaves, gradients, strict=True):
                if gradient is not None:
                    total[name] += gradient.nan_to_num(nan=0.0)
    return total


def plain_tangents(call: Call, inputs: Sequence[Tensor], directions: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return plain PyTorch's tangents of out and lse, from those of q, k and v, in their dtype. Those of rows that see
    nothing are NaN."""
    dq, dk, dv = directions
    moved = iter([one for _, one in _sequences(call, dq, dk, dv)])

    def attend(one: _Sequence) -> tuple[Tensor, Tensor]:
        also = next(moved)

        def results(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            return _attend(call, replace(one, q=q, k=k, v=v), call.tensors)

        out, lse = pushforward(results, (one.q, one.k, one.v), (also.q, also.k, also.v))
        return out, lse

    q, k, v = inputs
    return _over_sequences(call, q, k, v, attend)


def sdpa(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
    """Return out of ``scaled_dot_product_attention``'s fused kernels under a dense mask.

    None where these cannot serve: without a softmax, with a score, a sink or dropout, for quantized tensors, in float32
    (where some round to TF32), off the GPU, or if none of them takes the shapes. Rows that see nothing are undefined.
    """
    own = call.variant.score is not None or call.variant.sink is not None or call.variant.dropout
    own = own or not call.variant.has_lse
    if own or call.descales or q.dtype == torch.float32 or not q.is_cuda:
        return None
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def attend(one: _Sequence) -> tuple[Tensor, Tensor]:
        mask = None if not call.variant.masked else one.visible[None].contiguous()
        out = torch.nn.functional.scaled_dot_product_attention(
            one.q[None], one.k[None], one.v[None], attn_mask=mask, scale=call.scale
        )[0]
        return out, out.new_zeros(one.q.shape[:2], dtype=torch.float32)

    try:
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
            return _over_sequences(call, q, k, v, attend)[0]
    except RuntimeError:  # no fused kernel for these shapes
        return None


def _over_sequences(
    call: Call, q: Tensor, k: Tensor, v: Tensor, attend: Callable[[_Sequence], tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Run ``attend`` on each sequence and lay the results out as a call does."""
    out = torch.zeros(call.out_shape(), dtype=call.out_dtype, device=q.device)
    lse = torch.full(call.lse_shape(), -math.inf, device=q.device, dtype=torch.float32)
    with torch.no_grad():
        for b, one in _sequences(call, q, k, v):
            result, sums = attend(one)
            if call.layout == "varlen":
                out[one.rows], lse[:, one.rows] = result.transpose(0, 1), sums
            else:
                out[b], lse[b] = result.transpose(0, 1), sums
    return out, lse


def _sequences(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[int, _Sequence]]:
    """Yield the sequences that have queries, and keys or a sink, cut to their used keys."""
    call.variant.require(SERVES, "the baseline in plain torch")
    groups = call.heads // call.kv_heads
    for b, (rows, keys, q_offset, k_offset) in enumerate(lengths(call)):
        if not rows or (not keys and call.variant.sink is None):
            continue
        if call.layout == "varlen":
            queries, used = slice(q_offset, q_offset + rows), slice(k_offset, k_offset + keys)
            parts = q[queries], k[used], v[used]
        else:
            queries, parts = slice(0, rows), (q[b], k[b, :keys], v[b, :keys])
        if call.descales:
            parts = tuple(dequantized(call, *part, b, torch.float32) for part in zip("qkv", parts, strict=True))
        if call.variant.keys is not None and LISTS[call.variant.keys].extra:
            parts = (parts[0], *with_extra_rows(call, parts[1], parts[2]))
            keys = len(parts[1])
        names = names_of(call, b, slice(0, rows), rows, keys, q_offset, k_offset)
        value = evaluate(call.variant.mask, names, call.tensors)
        visible, log_times = value.broadcast_to((call.heads, rows, keys)).to(q.device), None
        if call.variant.keys is not None:
            log_times = listed(call, b, slice(0, rows), keys, None).float().log()
            log_times = log_times.broadcast_to(visible.shape)
            visible = visible & (log_times != -math.inf)
        heads_first = [part.transpose(0, 1) for part in parts]
        yield (
            b,
            _Sequence(
                heads_first[0],
                heads_first[1].repeat_interleave(groups, dim=0),
                heads_first[2].repeat_interleave(groups, dim=0),
                queries,
                visible,
                log_times,
                names,
                b,
            ),
        )
