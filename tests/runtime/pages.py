"""Caches in pages for tests: sequences scattered over pages, with NaN and wrong numbers wherever nothing may look."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

#: Entries of a page table that no cache has; what lies beyond a length is drawn from these.
OUTSIDE = (-1, -(2**31), 2**31 - 1, 10**6)


@dataclass(frozen=True)
class Cache:
    """Pages, and the same keys and values by sequence, (length, kv_heads, head_dim) each."""

    k_pages: Tensor
    v_pages: Tensor
    page_table: Tensor
    seqused_k: Tensor
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]


def cache(
    lengths: Sequence[int],
    page_size: int,
    *,
    kv_heads: int = 2,
    head_dim: int = 8,
    head_dim_v: int | None = None,
    page_layout: str = "NHD",
    dtype: torch.dtype = torch.float32,
    spare: int = 3,
    wider: int = 2,
    seed: int = 0,
) -> Cache:
    """Return sequences of these lengths in pages of any order: ``spare`` pages are nobody's, tables are ``wider`` than
    needed, rows beyond a length are NaN, and entries beyond it are no pages at all."""
    generator, chance = torch.Generator().manual_seed(seed), random.Random(seed)
    counts = [-(-length // page_size) for length in lengths]
    pages = sum(counts) + spare
    order = chance.sample(range(pages), pages)
    table = torch.tensor(
        [[chance.choice(OUTSIDE) for _ in range(max(counts, default=0) + wider)] for _ in lengths], dtype=torch.int32
    ).reshape(len(lengths), -1)
    shape = (pages, page_size, kv_heads)
    k, v = (torch.full((*shape, width), torch.nan, dtype=dtype) for width in (head_dim, head_dim_v or head_dim))
    sequences: tuple[list[Tensor], list[Tensor]] = ([], [])
    for b, length in enumerate(lengths):
        for tensor, kept in zip((k, v), sequences, strict=True):
            kept.append(torch.randn(length, kv_heads, tensor.shape[-1], generator=generator).to(dtype))
        for i in range(counts[b]):
            page = order.pop()
            table[b, i] = page
            for tensor, kept in zip((k, v), sequences, strict=True):
                rows = kept[b][i * page_size : (i + 1) * page_size]
                tensor[page, : rows.shape[0]] = rows
    if page_layout == "HND":
        k, v = k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()
    return Cache(k, v, table, torch.tensor(lengths, dtype=torch.int32), tuple(sequences[0]), tuple(sequences[1]))


def starts_of(rows: Sequence[int]) -> Tensor:
    """Return cu_seqlens of sequences with so many rows."""
    return torch.tensor([0, *accumulate(rows)], dtype=torch.int32)
