"""Caches of latents in bytes: e4m3 with scales, and rotary columns in bf16, in one row (``dtypes.LATENT_ROWS``).

A cache is a tensor of uint8, (pages, page_size, 1, bytes of a token). Where scales follow the rows of a page, rows and
scales lie side by side only as counted: a page has as many bytes as its rows and scales together, and maybe padding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attngen.dtypes import KEY_VALUE_DIMS, LATENT_ROWS, LatentRow
from attngen.errors import CallError

#: Names of caches by the bytes of a token.
_NAMES = {row.bytes: name for name, row in LATENT_ROWS.items()}

_E4M3_MAX = 448.0
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny


def latent_name(tensor: Tensor) -> str | None:
    """Name of the cache that a tensor is, or None."""
    if tensor.dtype != torch.uint8 or not tensor.dim():
        return None
    size = tensor.shape[-1]  # in a trace it may be a symbol, which has no hash
    return next((name for known, name in _NAMES.items() if size == known), None)


def value_columns(v: Tensor) -> int:
    """Columns of the values in a tensor that is passed as v, which may be a cache of latents."""
    name = latent_name(v)
    if name is None:
        return v.shape[-1]
    columns = LATENT_ROWS[name].columns
    return next(of_v for of_qk, of_v in KEY_VALUE_DIMS if of_qk == columns)


def check_latent_rows(name: str, cache: Tensor, heads: int) -> LatentRow:
    """Form of the rows of a cache. Raises CallError for one whose bytes do not lie as the form says."""
    row = LATENT_ROWS[name]
    if not row.scales_after_rows:
        return row
    page, step = cache.shape[1] * row.bytes, cache.stride(1)
    if cache.dim() != 4 or heads != 1 or (cache.shape[1] > 1 and step != row.bytes) or (
        cache.shape[0] > 1 and cache.stride(0) < page
    ):  # fmt: skip
        raise CallError(
            f"a cache of {row.bytes} bytes a token must be pages of one KV head, whose bytes follow each other: "
            f"(pages, page_size, 1, {row.bytes}), got shape {tuple(cache.shape)} with strides {cache.stride()}"
        )
    return row


def views_of(name: str, cache: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and scales of a cache (pages, page_size, heads, bytes), as views of its bytes: (pages, page_size, heads,
    bytes of each)."""
    row = LATENT_ROWS[name]
    if not row.scales_after_rows:
        return cache, cache[..., row.latents : row.latents + row.scale_bytes]
    pages, size = cache.shape[:2]
    begin, step = cache.storage_offset(), cache.stride(0)
    of_rows = cache.as_strided((pages, size, 1, row.row_step), (step, row.row_step, row.row_step, 1), begin)
    at = begin + size * row.row_step
    return of_rows, cache.as_strided((pages, size, 1, row.scale_bytes), (step, row.scale_bytes, row.scale_bytes, 1), at)


def unpacked(name: str, cache: Tensor) -> Tensor:
    """Columns of a cache in float32: (pages, page_size, heads, head_dim)."""
    row = LATENT_ROWS[name]
    rows, exponents = views_of(name, cache)
    if row.scales_after_rows:
        scales = _powers(exponents[..., : row.scales])
    else:
        scales = exponents.contiguous().view(torch.float32)
    latents = rows[..., : row.latents].contiguous().view(torch.float8_e4m3fn).float()
    latents = latents * scales.repeat_interleave(row.group, dim=-1)
    rotary = rows[..., row.rotary_at : row.rotary_at + 2 * row.rotary].contiguous().view(torch.bfloat16).float()
    return torch.cat((latents, rotary), dim=-1)


def packed(name: str, latents: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes of rows and of their scales, from latents (tokens, heads, latents) and rotary columns in bf16.

    A scale is the largest magnitude of its columns over 448, 1 where all are 0, and NaN where one is; exponents are
    those of the next power of two. Numbers are divided by their scale and rounded to nearest even.
    """
    row = LATENT_ROWS[name]
    groups = latents.float().unflatten(-1, (row.scales, row.group))
    largest = groups.abs().amax(dim=-1)  # NaN if any is
    scales = torch.where(largest == 0, 1.0, (largest / _E4M3_MAX).clamp(min=_SMALLEST_SCALE))
    scales = torch.where(scales.isnan(), torch.nan, scales)  # of one bit pattern
    if row.scales_after_rows:
        bits = scales.view(torch.int32)
        exponents = ((bits >> 23) + ((bits & 0x7FFFFF) != 0)).clamp(max=255).to(torch.uint8)
        scales = _powers(exponents)
    quotient = groups / scales[..., None]
    quotient = torch.where(quotient.isnan(), torch.nan, quotient.clamp(-_E4M3_MAX, _E4M3_MAX))
    rounded = quotient.to(torch.float8_e4m3fn).view(torch.uint8).flatten(-2)
    tail = rotary.contiguous().view(torch.uint8)
    if row.scales_after_rows:
        padding = exponents.new_zeros((*exponents.shape[:-1], row.scale_bytes - row.scales))
        return torch.cat((rounded, tail), dim=-1), torch.cat((exponents, padding), dim=-1)
    in_row = scales.contiguous().view(torch.uint8)
    return torch.cat((rounded, in_row, tail), dim=-1), in_row


def cache_of(name: str, columns: Tensor) -> Tensor:
    """A new cache of given columns (pages, page_size, heads, head_dim), whose pages lie one after the other."""
    row = LATENT_ROWS[name]
    cache = torch.zeros((*columns.shape[:-1], row.bytes), dtype=torch.uint8, device=columns.device)
    latents, rotary = columns.split([row.latents, row.rotary], dim=-1)
    for view, values in zip(views_of(name, cache), packed(name, latents, rotary.bfloat16()), strict=True):
        view.copy_(values)
    return cache


def representable(name: str, columns: Tensor) -> Tensor:
    """Columns near given ones of about 1 that a cache holds exactly, and bf16, too."""
    row = LATENT_ROWS[name]
    latents, rotary = columns.float().split([row.latents, row.rotary], dim=-1)
    eights = (64 * latents).clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn).float()
    eights[..., :: row.group] = _E4M3_MAX  # so that scales are powers of two
    return torch.cat((eights / 64, rotary.bfloat16().float()), dim=-1)


def _powers(exponents: Tensor) -> Tensor:
    """2^(exponent - 127) in float32; 255 is NaN."""
    bits = exponents.int() << 23
    powers = torch.where(exponents == 0, 2.0**-127, bits.view(torch.float32))
    return torch.where(exponents == 255, torch.nan, powers)
