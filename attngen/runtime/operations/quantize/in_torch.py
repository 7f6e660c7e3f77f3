"""Quantizing in plain torch: a few operations that read no number back, and the check of what tensors hold.

Sums of a transform are added up in the order in which a kernel does it, so that both give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attngen.errors import CallError
from attngen.runtime.operations.append.in_torch import rotated
from attngen.runtime.operations.quantize.arguments import (
    LARGEST,
    LEAST_SCALE,
    Quantize,
    QuantizeSizes,
    in_rows,
    random_signs,
    transform_size,
)

_WORD_BITS = 32


def quantize(call: Quantize, sizes: QuantizeSizes) -> tuple[Tensor, ...]:
    """q, k and v of a checked call in 8 bits, and their scales."""
    with torch.no_grad():
        signs = signs_of(call) if call.hadamard else None
        each = [_quantized(call, sizes, name, signs if name in "qk" else None) for name in "qkv"]
        return (*(values for values, _ in each), *(scale for _, scale in each))


def signs_of(call: Quantize) -> Tensor:
    """Signs of a call, float32 (head_dim,)."""
    if call.signs is not None:
        given: Tensor = call.signs.float()
        return given
    head_dim, device = call.q.shape[-1], call.q.device
    bits = random_signs(call.seed, head_dim)
    place = torch.arange(_WORD_BITS, device=device)  # made on the device: a graph can record it
    words = (bits >> start & (1 << _WORD_BITS) - 1 for start in range(0, head_dim, _WORD_BITS))
    flipped = torch.cat([torch.bitwise_right_shift(word, place) & 1 for word in words])[:head_dim]
    return 1.0 - 2.0 * flipped.float()


def _quantized(call: Quantize, sizes: QuantizeSizes, name: str, signs: Tensor | None) -> tuple[Tensor, Tensor]:
    x = in_rows(getattr(call, name), call.layout)
    if call.k_mean is not None and name == "k":
        x = x - call.k_mean[:, None]
    x = x.float()
    if call.rotary_cos is not None and name != "v":
        x = _rotated(call, x)
    norm = 1.0
    if signs is not None:
        norm = float(transform_size(x.shape[-1])) ** -0.5
        x = transformed(x, signs)
    x = x.transpose(1, 2)  # (batch, heads, seqlen, head_dim)
    limit = LARGEST[call.dtype]
    scale = _scale(_largest(call, sizes, name, x) * norm, limit)
    factor = _of_rows(call, sizes, x, torch.ones_like(scale) / scale * norm)
    values = torch.empty(getattr(call, name).shape, dtype=call.dtype, device=x.device)
    in_rows(values, call.layout).transpose(1, 2).copy_((x * factor).clamp(-limit, limit))
    return values, scale


def _rotated(call: Quantize, x: Tensor) -> Tensor:
    tables: Sequence[Tensor] = (call.rotary_cos, call.rotary_sin)
    positions = _positions(call, x.shape[0], x.shape[1]).clamp(0, tables[0].shape[0] - 1).flatten()
    cos, sin = (table.index_select(0, positions) for table in tables)
    return rotated(x.flatten(0, 1), cos, sin, call.rotary_interleaved).view(x.shape)


def _positions(call: Quantize, batch: int, seqlen: int) -> Tensor:
    """Position of each token in the tables of the rotation, (batch, seqlen)."""
    tokens = torch.arange(seqlen, device=call.q.device).expand(batch, seqlen)
    return tokens if call.rotary_offsets is None else tokens + call.rotary_offsets.long()[:, None]


def transformed(x: Tensor, signs: Tensor) -> Tensor:
    """x D H, without the division by the root of the size: rows (…, head_dim) float32 in blocks of the
    transform's size, added up and subtracted neighbours first."""
    x = x * signs
    step = 1
    while step < transform_size(signs.shape[0]):
        a, b = x.unflatten(-1, (-1, 2, step)).unbind(-2)
        x = torch.stack((a + b, a - b), dim=-2).flatten(-3)
        step *= 2
    return x


def _largest(call: Quantize, sizes: QuantizeSizes, name: str, x: Tensor) -> Tensor:
    """The largest finite magnitude of each scale's elements; 0 for nothing. x: (b, heads, seqlen, head_dim)."""
    shape = sizes.scales[name]
    x = torch.where(x.isfinite(), x.abs(), 0.0)
    if not x.numel():
        return x.new_zeros(shape)
    if len(shape) == 2:
        return x.unflatten(1, (sizes.kv_heads, -1)).amax((2, 3, 4))
    if len(shape) == 3:
        rows = x.amax(-1)
        block = 1 if call.granularity == "token" else call.granularity
        padded = torch.nn.functional.pad(rows, (0, -rows.shape[-1] % block))
        return padded.unflatten(-1, (-1, block)).amax(-1)
    return x.amax()


def _scale(largest: Tensor, limit: float) -> Tensor:
    """Scales from the largest magnitudes, which become the largest number of 8 bits."""
    scale = (largest / torch.full_like(largest, limit)).clamp(min=LEAST_SCALE)
    return scale.masked_fill(largest == 0, 1.0)


def _of_rows(call: Quantize, sizes: QuantizeSizes, x: Tensor, scale: Tensor) -> Tensor:
    """The scale of each row, so that it can be multiplied with x."""
    if scale.dim() == 2:
        return scale.repeat_interleave(x.shape[1] // sizes.kv_heads, dim=1)[:, :, None, None]
    if scale.dim() == 3:
        block = 1 if call.granularity == "token" else call.granularity
        return scale.repeat_interleave(block, dim=2)[:, :, : x.shape[2], None]
    return scale


def check_contents(call: Quantize, sizes: QuantizeSizes) -> None:
    """Raise CallError for signs other than 1 and -1, and tokens that have no row of the rotation. Waits for the GPU."""
    if call.signs is not None and not bool((call.signs.float().abs() == 1).all()):
        wrong = int((call.signs.float().abs() != 1).nonzero()[0])
        raise CallError(f"signs must be 1 or -1, but number {wrong} is {call.signs[wrong].item()}")
    if call.rotary_cos is None or not sizes.batch:
        return
    known = call.rotary_cos.shape[0]
    for name, seqlen in (("q", sizes.seqlen_q), ("k", sizes.seqlen_k)):
        positions = _positions(call, sizes.batch, seqlen)
        outside = ((positions < 0) | (positions >= known)).nonzero()
        if outside.numel():
            b, token = outside[0].tolist()
            raise CallError(
                f"token {token} of {name}, sequence {b}, has position {int(positions[b, token])}, but rotary_cos has "
                f"{known}"
            )
