"""FlashMLA's functions for dense decoding: the reference against plain torch, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import attngen
from attngen.errors import CallError, NoKernelError
from attngen.integrations.flash_mla import flash_mla_with_kvcache, get_mla_metadata
from tests.runtime.pages import cache

HEADS, DIM = 3, 24  # of the reference, which takes any
DIM_V = 16


def given(queries: int = 2) -> tuple[Any, torch.Tensor]:
    c = cache([11, 40, 2], 16, kv_heads=1, head_dim=DIM, dtype=torch.float64)
    torch.manual_seed(1)
    return c, torch.randn(3, queries, HEADS, DIM, dtype=torch.float64)


@pytest.mark.parametrize("causal", [False, True])
def test_against_plain_torch(causal: bool) -> None:
    c, q = given()
    metadata, splits = get_mla_metadata(c.seqused_k, 2 * HEADS, 1)
    out, lse = flash_mla_with_kvcache(
        q, c.k_pages, c.page_table, c.seqused_k, DIM_V, metadata, splits, causal=causal, softmax_scale=0.3
    )
    assert (out.shape, lse.shape) == ((3, 2, HEADS, DIM_V), (3, HEADS, 2))
    for b, keys in enumerate(c.keys):
        logits = 0.3 * torch.einsum("qhd,kd->hqk", q[b], keys[:, 0])
        if causal:
            seen = torch.arange(keys.shape[0]) <= torch.arange(2)[:, None] + keys.shape[0] - 2
            logits = logits.masked_fill(~seen, -torch.inf)
        torch.testing.assert_close(lse[b], logits.logsumexp(-1))
        torch.testing.assert_close(out[b], torch.einsum("hqk,kd->qhd", logits.softmax(-1), keys[:, 0, :DIM_V]))


@pytest.mark.parametrize(
    "changed",
    [
        {"indices": torch.zeros(3, 2, 4, dtype=torch.int32)}, {"is_fp8_kvcache": True},
        {"attn_sink": torch.zeros(HEADS)}, {"descale_k": torch.ones(1)},
    ],
)  # fmt: skip
def test_sparse_forms_and_8_bits_are_refused_by_name(changed: dict[str, Any]) -> None:
    c, q = given()
    with pytest.raises(NoKernelError, match=f"{next(iter(changed))} is not supported"):
        flash_mla_with_kvcache(q, c.k_pages, c.page_table, c.seqused_k, DIM_V, None, **changed)


def test_arguments_that_disagree_are_named() -> None:
    c, q = given()
    with pytest.raises(CallError, match="block_table and cache_seqlens are needed"):
        flash_mla_with_kvcache(q, c.k_pages, None, None, DIM_V)
    with pytest.raises(CallError, match="head_dim_v is 32, but k_cache has 24 columns"):
        flash_mla_with_kvcache(q, c.k_pages, c.page_table, c.seqused_k, 32)


def test_latents_and_rotary_columns_are_appended_as_values_and_keys() -> None:
    """A row of the cache has the latents, then the rotary columns: views of both are what ``append_kv`` writes."""
    table = torch.arange(9, dtype=torch.int32).reshape(3, 3)
    pages = torch.zeros(9, 16, 1, DIM)
    torch.manual_seed(2)
    latents, rotary = torch.randn(3, 2, 1, DIM_V), torch.randn(3, 2, 1, DIM - DIM_V)
    angles = torch.randn(64, (DIM - DIM_V) // 2)
    lengths = torch.tensor([0, 15, 30], dtype=torch.int32)
    attngen.append_kv(
        rotary, latents, pages[..., DIM_V:], pages[..., :DIM_V], lengths, page_table=table, rotary_cos=angles.cos(),
        rotary_sin=angles.sin(), rotary_interleaved=True,
    )  # fmt: skip
    for b, length in enumerate(lengths.tolist()):
        for j in range(2):
            row = pages[table[b, (length + j) // 16], (length + j) % 16, 0]
            torch.testing.assert_close(row[:DIM_V], latents[b, j, 0])
            cos, sin = angles[length + j].cos(), angles[length + j].sin()
            even, odd = rotary[b, j, 0, 0::2], rotary[b, j, 0, 1::2]
            turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten()
            torch.testing.assert_close(row[DIM_V:], turned)
    assert (pages != 0).any(-1).sum() == 6
