"""Caches of latents in bytes for tests, decoded by hand."""

from __future__ import annotations

import torch
from torch import Tensor

#: Latents, latents that share a scale, and whether exponents of scales follow the rows of a page.
FORMS = {"fp8_mla_656": (512, 128, False), "fp8_mla_584": (448, 64, True)}
ROTARY = 64


def empty_cache(name: str, pages: int, page_size: int, *, fill: int = 0, device: str = "cpu") -> Tensor:
    """A cache whose pages are padded to multiples of 576 bytes where exponents follow the rows."""
    latents, group, after = FORMS[name]
    token = latents + 2 * ROTARY + (8 if after else 4 * latents // group)
    step = -(-page_size * token // 576) * 576 if after else page_size * token
    raw = torch.full((pages * step,), fill, dtype=torch.uint8, device=device)
    return raw.as_strided((pages, page_size, 1, token), (step, token, token, 1))


def latent_cache(name: str, pages: int, page_size: int) -> tuple[Tensor, Tensor]:
    """A cache of random bytes that are numbers, and its columns (pages, page_size, head_dim) in float64, from the
    bytes one by one."""
    latents, group, after = FORMS[name]
    cache = empty_cache(name, pages, page_size)
    columns = torch.empty(pages, page_size, latents + ROTARY, dtype=torch.float64)
    for page in range(pages):
        block = cache.as_strided((cache.stride(0),), (1,), page * cache.stride(0))
        for row in range(page_size):
            eights = torch.randn(latents).to(torch.float8_e4m3fn)
            rotary = torch.randn(ROTARY).bfloat16()
            if after:
                exponents = torch.randint(120, 130, (latents // group,), dtype=torch.uint8)
                scales = 2.0 ** (exponents.double() - 127)
                block[page_size * 576 + 8 * row :][: latents // group] = exponents
                place = block[576 * row : 576 * (row + 1)]
                place[latents:] = rotary.view(torch.uint8)
            else:
                scales = torch.rand(latents // group) + 0.01
                place = block[656 * row : 656 * (row + 1)]
                place[latents : latents + 16] = scales.view(torch.uint8)
                place[latents + 16 :] = rotary.view(torch.uint8)
                scales = scales.double()
            place[:latents] = eights.view(torch.uint8)
            columns[page, row, :latents] = eights.double() * scales.repeat_interleave(group)
            columns[page, row, latents:] = rotary.double()
    return cache, columns
