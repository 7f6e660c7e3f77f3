"""Quantizing queries, keys and values to 8 bits, with the transform that makes their rows even.

On a GPU one kernel does it, in up to three launches, where a package has one and the call suits it
(``quantize_kernel``). Elsewhere it is plain torch, with the same results (``quantize_torch``).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from attngen.errors import CallError
from attngen.runtime.operations.quantize.arguments import Quantize, check, in_rows
from attngen.runtime.operations.quantize.path import QUANTIZE
from attngen.runtime.operations.quantize.sampled import SAMPLED, Sampled, mean_of_keys


class Quantized(NamedTuple):
    """Contiguous q, k and v in 8 bits, in the layout that they had, and their scales in float32: the value of an
    element is the element times its scale."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_descale: Tensor
    k_descale: Tensor
    v_descale: Tensor

    @property
    def descales(self) -> dict[str, Tensor]:
        """The scales by the names that ``attention`` has for them."""
        return {"q_descale": self.q_descale, "k_descale": self.k_descale, "v_descale": self.v_descale}


def quantize(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    granularity: Literal["tensor", "head", 64, 128, "token"] = "head",
    hadamard: bool = True,
    signs: Tensor | None = None,
    seed: int = 0,
    layout: Literal["bshd", "bhsd"] = "bshd",
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
    rotary_offsets: Tensor | None = None,
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> Quantized:
    """Convert q, k and v to 8 bits, with the scales that ``attention`` takes.

    A scale is the largest magnitude over the largest number of ``dtype`` (448 for e4m3), at least 2**-126, and 1 where
    all are 0. Elements are divided by it in float32, rounded to nearest even, and saturate. NaN stays NaN, an infinity
    becomes the largest number of its sign, and neither counts for a scale, so that no other row is affected.

    It does not wait for the GPU. Any spec with a kernel for ``dtype: fp8_e4m3`` brings a kernel for bfloat16 and one
    for float16: one launch for blocks, else up to three, and a tensor for maxima beside those that are returned. They
    take rows that are multiples of 16 bytes, up to 256 numbers; other calls, and those in float32, are some operations
    of torch. There is no derivative.

    Sources: Shah et al., FlashAttention-3, arXiv 2407.08608, section 3.3 (block quantization and incoherent
    processing); Chee et al., QuIP, arXiv 2307.13304; Ashkboos et al., QuaRot, arXiv 2404.00456.

    Args:
        q: (batch, seqlen_q, heads, head_dim), bfloat16, float16 or float32, with any strides.
        k: (batch, seqlen_k, kv_heads, head_dim).
        v: (batch, seqlen_k, kv_heads, head_dim of v).
        granularity: Elements that share a scale. ``'tensor'``: all, with scales of shape (). ``'head'``: those of a KV
            head, (batch, kv_heads), also of the query heads that share it. 64 or 128: a head's blocks of so many
            tokens, (batch, heads, blocks). ``'token'``: a head's token, (batch, heads, seqlen_q) for q and (batch,
            kv_heads, seqlen_k) for k; v has scales of heads.
        hadamard: Multiply rows of q and k by D H / sqrt(n), which leaves q kᵀ as it is: D changes signs at random, and
            H is the Hadamard transform of each n numbers, n being the largest power of two that divides head_dim. It
            spreads large numbers, and those that are not finite, over n numbers, which makes the error smaller.
        signs: (head_dim,), 1 or -1 each, the diagonal of D. q and the keys that it attends to must have the same.
        seed: Seed of the signs if these are not given.
        layout: ``'bshd'`` as above, or ``'bhsd'`` for (batch, heads, seqlen, head_dim).
        rotary_cos: (positions, rotary_dim / 2) in float32, bfloat16 or float16. The first ``rotary_dim`` numbers of
            each row of q and k are rotated first, as by ``append_kv``. Positions beyond the tables raise CallError on
            the CPU and under ``attngen.debug()``; on a GPU they take the nearest row.
        rotary_sin: The same for sines.
        rotary_interleaved: Pairs are numbers 2 i and 2 i + 1, instead of i and i + rotary_dim / 2.
        rotary_offsets: (batch,) int32: token j of sequence b takes row rotary_offsets[b] + j, instead of j.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.

    Returns:
        Contiguous q, k and v in ``dtype``, and their scales.

    Raises:
        CallError: Arguments are wrong or contradict each other.
    """
    if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in (q, k, v)):
        raise CallError("quantize is not differentiable; call it under torch.no_grad()")
    call = Quantize(
        q, k, v, granularity, hadamard, signs, seed, layout, rotary_cos, rotary_sin, rotary_interleaved, rotary_offsets,
        dtype,
    )  # fmt: skip
    return _run(call)


def quantize_centered(q: Tensor, k: Tensor, v: Tensor, *, layout: str, k_mean: Tensor | None) -> Quantized:
    """q, k less ``k_mean`` (batch, kv_heads, head_dim), of k's dtype, and v as ``quantize`` makes them by default."""
    return _run(Quantize(
        q, k, v, "head", True, None, 0, layout, None, None, False, None, torch.float8_e4m3fn, k_mean,
    ))  # fmt: skip


def quantize_by_sample(
    q: Tensor, k: Tensor, v: Tensor, *, layout: str, centered: bool, grouped: bool = False
) -> tuple[Quantized, Tensor | None]:  # fmt: skip
    """As ``quantize_centered``, with a mean of the keys that is returned, or without, (batch, kv_heads, head_dim).
    Scales may be larger than the largest magnitudes ask for, where a kernel takes them from a sample of the rows. With
    ``grouped``, such a kernel writes v in groups of keys."""
    *results, mean = SAMPLED.serve(Sampled(q, k, v, layout, centered, grouped), _exact)
    return Quantized(*results), mean


def _exact(call: Sampled) -> tuple[Tensor | None, ...]:
    """The results of a call that is traced, by operators: scales are those of all rows."""
    mean = mean_of_keys(call.k, call.layout) if call.centered and in_rows(call.k, call.layout).shape[1] else None
    return *_run(call.exact(mean)), mean


def _run(call: Quantize) -> Quantized:
    return Quantized(*QUANTIZE.serve(call, _traced))


def _traced(call: Quantize) -> tuple[Tensor, ...]:
    """Call the operator; what is traced is this function and nothing below it."""
    from attngen.runtime.operations.quantize import operator as quantize_operator

    check(call)
    return quantize_operator.call(call)
