"""flash-attn 4's functions on a GPU, with kernels compiled on first call, beside dense attention in float64."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import attngen
from attngen.integrations.flash_attn.v4 import flash_attn_func, flash_attn_varlen_func
from attngen.runtime.registry.lookup import registry
from tests.integrations.flash_attn.test_flash_attn_4 import wanted_with_sink


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("ATTNGEN_CACHE", str(tmp_path / "cache"))
    registry.clear()
    with attngen.jit():
        yield
    registry.clear()


def near(actual: Any, wanted: Any) -> None:
    for one, other in zip(actual, wanted, strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("given", [{"causal": True}, {"window_size": (100, 30), "softcap": 5.0}], ids=str)
@pytest.mark.parametrize("sinks", [False, True])
def test_results_and_gradients(given: dict[str, Any], sinks: bool) -> None:
    torch.manual_seed(0)
    inputs = [
        torch.randn(2, n, h, 64, device="cuda").bfloat16().requires_grad_() for n, h in ((200, 4), (300, 2), (300, 2))
    ]
    sink = torch.randn(4, device="cuda", dtype=torch.bfloat16, requires_grad=True) if sinks else None
    out, lse = flash_attn_func(*inputs, **given, learnable_sink=sink, return_lse=True)
    wanted = wanted_with_sink(inputs, sink, given)
    assert lse is not None
    near((out, lse), wanted)
    leaves = inputs if sink is None else [*inputs, sink]
    weights = torch.randn_like(out), torch.randn_like(lse)
    gradients = torch.autograd.grad((out, lse), leaves, weights)
    exact = torch.autograd.grad(wanted, leaves, tuple(w.double() for w in weights))
    for one, other in zip(gradients, exact, strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=3e-2, atol=6e-2)
    with torch.no_grad():  # a kernel with sinks of its own, where there is one
        near((flash_attn_func(*inputs, **given, learnable_sink=sink)[0],), wanted[:1])


@pytest.mark.parametrize("sinks", [False, True])
def test_packed_sequences_without_longest_lengths_and_pages(sinks: bool) -> None:
    torch.manual_seed(0)
    lengths, used = (40, 1, 90), (64, 33, 130)
    starts = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    q = torch.randn(sum(lengths), 4, 128, device="cuda").bfloat16()
    pages = [torch.randn(12, 32, 2, 128, device="cuda").bfloat16() for _ in "kv"]
    table = torch.randperm(12, device="cuda").int()[: 3 * 4].view(3, 4)
    table = torch.cat((table, table[:, :1]), dim=1)
    used_k = torch.tensor(used, device="cuda", dtype=torch.int32).clamp(max=128)
    sink = torch.randn(4, device="cuda") if sinks else None
    out, lse = flash_attn_varlen_func(
        q, *pages, cu_seqlens_q=starts, seqused_k=used_k, page_table=table, causal=True, learnable_sink=sink,
        return_lse=True,
    )  # fmt: skip
    assert lse is not None
    keys = [[page[table[b].long()].flatten(0, 1)[: int(used_k[b])] for page in pages] for b in range(3)]
    starts_k = torch.tensor([0, *used_k.tolist()], device="cuda").cumsum(0).int()
    k, v = (torch.cat([pair[place] for pair in keys]) for place in range(2))
    packed, packed_lse = flash_attn_varlen_func(
        q, k, v, None, starts, starts_k, causal=True, learnable_sink=sink, return_lse=True
    )
    assert packed_lse is not None
    for b, (first, count) in enumerate(zip(starts.tolist(), lengths, strict=False)):
        rows = slice(first, first + count)
        wanted, wanted_lse = wanted_with_sink([q[None, rows], *(t[None] for t in keys[b])], sink, {"causal": True})
        near((out[rows], lse[:, rows], packed[rows], packed_lse[:, rows]), (wanted[0], wanted_lse[0]) * 2)
