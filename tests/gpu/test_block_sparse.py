"""Block-sparse drop-ins on a GPU, with kernels compiled on first call, beside attention in float64 over these pairs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen.integrations import cudnn
from attngen.runtime.registry.lookup import registry
from tests.gpu.packages import no_worse
from tests.integrations.oracles import lists_of, masked_attention, pairs_of_blocks

BATCH, HEADS = 2, 4


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("ATTNGEN_CACHE", str(tmp_path / "cache"))
    registry.clear()
    with attngen.jit():
        yield
    registry.clear()


def call_of(
    block: int, kv_heads: int, dim: int, queries: int, keys: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[list[Tensor], Tensor]:
    """q, k and v (b, h, s, d), and a block mask whose first row is empty."""
    torch.manual_seed(queries + dim)
    q = torch.randn(BATCH, HEADS, queries, dim, device="cuda").to(dtype).requires_grad_()
    k, v = (torch.randn(BATCH, kv_heads, keys, dim, device="cuda").to(dtype).requires_grad_() for _ in "kv")
    shown = torch.rand(BATCH, HEADS, -(-queries // block), -(-keys // block), device="cuda") < 0.4
    shown[0, 0, 0] = False
    return [q, k, v], shown


def check(out: Tensor, inputs: Sequence[Tensor], seen: Tensor, dout: Tensor, gradients: Sequence[Tensor]) -> None:
    """Output and gradients err at most a few times as much as plain torch in the same dtype."""
    exact, plain = (masked_attention(*inputs, seen, compute=dtype)[0] for dtype in (torch.float64, out.dtype))
    no_worse(out.detach(), plain.detach(), exact.detach())
    of_exact, of_plain = (torch.autograd.grad(one, inputs, dout.to(one.dtype)) for one in (exact, plain))
    for one, other, true in zip(gradients, of_plain, of_exact, strict=True):
        no_worse(one, other, true, times=4)


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize(("dim", "kv_heads", "sized"), [(128, HEADS, False), (64, 2, True)])
def test_cudnn(block: int, dim: int, kv_heads: int, sized: bool) -> None:
    queries, keys = 1000, 1300
    inputs, shown = call_of(block, kv_heads, dim, queries, keys)
    seen = pairs_of_blocks(shown, block, block, queries, keys)
    sizes = None
    if sized:
        sizes = torch.randint(1, block + 1, (BATCH, shown.shape[-1]), device="cuda", dtype=torch.int32)
        ends = sizes.repeat_interleave(block, -1)[:, :keys]
        seen = seen & (torch.arange(keys, device="cuda") % block < ends)[:, None, None]
    indices, counts = lists_of(shown, shown.shape[-1])
    options: dict[str, Any] = {"block_sizes": sizes, "q2k_block_nums": counts, "sparse_block_size": block}
    out, lse = cudnn.block_sparse_attention_forward(*inputs, indices, **options)
    dout = torch.randn_like(out)
    gradients = torch.autograd.grad(out, inputs, dout, retain_graph=True)
    check(out, inputs, seen, dout, gradients)
    torch.testing.assert_close(lse.double(), masked_attention(*inputs, seen)[1], rtol=1e-2, atol=1e-2)
    given = [each.detach() for each in (*inputs, out, lse)]
    apart = cudnn.block_sparse_attention_backward(dout, *given, indices, **options)
    check(out, inputs, seen, dout, list(apart))
