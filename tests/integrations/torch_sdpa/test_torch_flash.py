"""torch's registry of flash attentions: its operators, on the CPU, and what activation does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    list_flash_attention_impls,
    restore_flash_attention_impl,
)
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

from attngen.errors import NoKernelError
from attngen.integrations.torch_sdpa import flash as torch_flash


@pytest.fixture
def active() -> Iterator[None]:
    """The operators on the CPU, where the reference runs."""
    handle = torch_flash.activate("CPU")
    yield
    handle.remove()


def qkv(*shape: int, kv: tuple[int, ...] | None = None, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(size, dtype=dtype) for size in (shape, kv or shape, kv or shape)]


def test_it_is_listed_activated_and_removed() -> None:
    torch_flash.register()
    torch_flash.register()
    assert list_flash_attention_impls().count("attngen") == 1
    activate_flash_attention_impl("attngen")
    assert current_flash_attention_impl() == "attngen"
    restore_flash_attention_impl()
    assert current_flash_attention_impl() is None


@pytest.mark.parametrize("causal", [False, True])
def test_dense_calls_and_their_gradients(active: None, causal: bool) -> None:
    q, k, v = (t.requires_grad_() for t in qkv(2, 4, 20, 16))
    wanted = scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.3)
    grad = torch.randn_like(wanted)
    exact = torch.autograd.grad(wanted, (q, k, v), grad)
    out, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=0.3)
    torch.testing.assert_close(out, wanted)
    for mine, theirs in zip(torch.autograd.grad(out, (q, k, v), grad), exact, strict=True):
        torch.testing.assert_close(mine, theirs)


def of_sequences(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of two packed sequences, of 12 and 18 tokens."""
    rows = (slice(0, 12), slice(12, 30))
    parts = [[t[where].transpose(0, 1)[None] for t in (q, k, v)] for where in rows]
    return torch.cat([scaled_dot_product_attention(*part, is_causal=True)[0].transpose(0, 1) for part in parts])


def test_packed_calls(active: None) -> None:
    q, k, v = qkv(30, 4, 16)
    starts = torch.tensor([0, 12, 30], dtype=torch.int32)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(q, k, v, starts, starts, 18, 18, 0.0, True, False)
    assert lse.shape == (4, 30)
    torch.testing.assert_close(out, of_sequences(q, k, v))


def test_varlen_attn_and_its_gradients(active: None) -> None:
    """torch's own function, whose backward runs below autograd."""
    q, k, v = (t.requires_grad_() for t in qkv(30, 4, 16))
    starts = torch.tensor([0, 12, 30], dtype=torch.int32)
    out, wanted = varlen_attn(q, k, v, starts, starts, 18, 18, window_size=(-1, 0)), of_sequences(q, k, v)
    torch.testing.assert_close(out, wanted)
    grad = torch.randn_like(wanted)
    gradients, exact = (torch.autograd.grad(each, (q, k, v), grad) for each in (out, wanted))
    for mine, theirs in zip(gradients, exact, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_varlen_attn_over_pages(active: None) -> None:
    """torch's own function: two sequences whose keys lie in pages, with a window."""
    pages_k, pages_v = (torch.randn(6, 8, 2, 16, dtype=torch.float64) for _ in range(2))
    table, used = torch.tensor([[3, 1], [5, 0]], dtype=torch.int32), torch.tensor([13, 9], dtype=torch.int32)
    starts = torch.tensor([0, 2, 3], dtype=torch.int32)
    q = torch.randn(3, 4, 16, dtype=torch.float64)
    out = varlen_attn(
        q, pages_k, pages_v, starts, None, 2, 13, window_size=(4, 0), enable_gqa=True, seqused_k=used, block_table=table
    )
    for b, rows in enumerate((slice(0, 2), slice(2, 3))):
        n = int(used[b])
        k, v = (pages[table[b].long()].flatten(0, 1)[:n].transpose(0, 1)[None] for pages in (pages_k, pages_v))
        position = torch.arange(n - (rows.stop - rows.start), n)[:, None]
        seen = (torch.arange(n) <= position) & (position - torch.arange(n) <= 4)
        wanted = scaled_dot_product_attention(q[rows].transpose(0, 1)[None], k, v, seen, enable_gqa=True)
        torch.testing.assert_close(out[rows], wanted[0].transpose(0, 1))


def test_what_is_refused(active: None) -> None:
    q, k, v = qkv(1, 4, 20, 16)
    with pytest.raises(NoKernelError, match="dropout is not supported here"):
        torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.5, False, False)
    with pytest.raises(NoKernelError, match="return_debug_mask"):
        torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, False, True)


@pytest.mark.skipif(
    not hasattr(torch.ops.aten, "_flash_attention_forward_no_dropout_inplace"), reason="this torch has no such operator"
)
def test_results_in_memory_of_the_caller(active: None) -> None:
    q, k, v = qkv(1, 5, 2, 64)
    out = torch.full_like(q, torch.nan)
    sizes = (None, None, 5, 5, 0.0, True, False)
    lse = torch.ops.aten._flash_attention_forward_no_dropout_inplace(out, q, k, v, *sizes)
    wanted = torch.ops.aten._flash_attention_forward(q, k, v, *sizes)
    assert torch.equal(out, wanted[0])
    assert torch.equal(lse, wanted[1])
