"""Block-sparse drop-ins on a GPU, with kernels compiled on first call, beside attention in float64 over these pairs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen.integrations import block_sparse_attn, cudnn, fastvideo, flash_attn_4
from attngen.runtime.registry.lookup import registry
from tests.gpu.packages import no_worse
from tests.integrations.block_sparse_attn import test_block_sparse_attn as heads
from tests.integrations.drops import next_factors
from tests.integrations.fastvideo import test_video_sparse as videos
from tests.integrations.flash_attn import test_flash_attn_4_blocks as lists
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


@pytest.mark.parametrize(("dims", "kv_heads"), [((192, 128), HEADS), ((256, 256), 2)], ids=str)
def test_lists_of_wide_heads(dims: tuple[int, int], kv_heads: int) -> None:
    queries, keys = 1000, 1300
    inputs, shown = call_of(64, kv_heads, dims[0], queries, keys)
    inputs[2] = inputs[2].detach()[..., : dims[1]].contiguous().requires_grad_()
    mask = attngen.block_mask(*lists_of(shown, shown.shape[-1]), key_blocks=shown.shape[-1])
    variant = attngen.variant(blocks=64, name="blocks_64")
    out = attngen.attention(*inputs, variant=variant, block_mask=mask, layout="bhsd")
    dout = torch.randn_like(out)
    gradients = torch.autograd.grad(out, inputs, dout)
    check(out, inputs, pairs_of_blocks(shown, 64, 64, queries, keys), dout, gradients)


@pytest.mark.parametrize(("block_size", "tokens"), [((4, 4, 4), 64), ((2, 8, 8), 128)])
@pytest.mark.parametrize("topk", [2, 9])
def test_fastvideo(block_size: tuple[int, int, int], tokens: int, topk: int) -> None:
    torch.manual_seed(tokens + topk)
    sizes = torch.randint(1, tokens + 1, (9,), dtype=torch.int32)
    here = videos.inputs_of(sizes, sizes, tokens, torch.bfloat16, dim=64)
    weight = torch.randn_like(here[0]).requires_grad_()
    leaves = [x.detach().cuda().requires_grad_() for x in (*here, weight)]
    q, k = leaves[:2]
    means = [
        (x.unflatten(2, (-1, tokens)).sum(3, dtype=torch.float32) / sizes.cuda()[:, None]).bfloat16() for x in (q, k)
    ]
    scores = means[0] @ means[1].mT / 8.0  # those that choose
    order = scores.sort(dim=-1, descending=True, stable=True).indices[..., :topk]
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, True).cpu()
    out = fastvideo.video_sparse_attn(*leaves[:3], sizes.cuda(), sizes.cuda(), topk, block_size, leaves[3])
    dout = torch.randn_like(out)
    gradients = torch.autograd.grad(out, leaves, dout)
    true, plain = (
        videos.exact(here, sizes, sizes, tokens, topk, weight, dtype, chosen)[0] for dtype in (torch.float64, out.dtype)
    )
    no_worse(out.detach().cpu(), plain.detach(), true.detach())
    of_true, of_plain = (torch.autograd.grad(x, [*here, weight], dout.cpu().to(x.dtype)) for x in (true, plain))
    for one, other, exact in zip(gradients, of_plain, of_true, strict=True):
        no_worse(one.cpu(), other, exact, times=4)


def test_fastvideo_of_lists() -> None:
    inputs, shown = call_of(64, HEADS, 128, 640, 960)
    sizes = torch.randint(0, 65, (15,), device="cuda", dtype=torch.int32)
    seen = pairs_of_blocks(shown, 64, 64, 640, 960)
    seen = seen & (torch.arange(64, device="cuda") < sizes[:, None]).flatten()
    out, _ = fastvideo.block_sparse_attn_from_indices(*inputs, *lists_of(shown, 15), sizes)
    dout = torch.randn_like(out)
    check(out, inputs, seen, dout, torch.autograd.grad(out, inputs, dout))


@pytest.mark.parametrize(("causal", "exact"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(("rate", "dim", "deterministic"), [(0.0, 128, False), (0.0, 64, True), (0.25, 64, False)])
def test_heads_of_several_types(causal: bool, exact: bool, rate: float, dim: int, deterministic: bool) -> None:
    torch.manual_seed(dim)
    inputs, packing = heads.call_of("cuda", torch.bfloat16, dim)
    blocks, streaming = heads.masks("cuda"), heads.KEYS if exact else heads.BLOCKS
    seen = [heads.seen_of(i, blocks, streaming, causal, exact, heads.TYPES) for i in range(len(heads.LENGTHS))]
    torch.manual_seed(4)
    factors = next_factors(rate, heads.LENGTHS, heads.HEADS, "cuda") if rate else None
    torch.manual_seed(4)
    types, info = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in (heads.TYPES, streaming))
    out = block_sparse_attn.block_sparse_attn_func(
        *inputs, *packing[:2], types, info, blocks, *packing[2:], rate, deterministic, is_causal=causal,
        exact_streaming=exact,
    )  # fmt: skip
    exact_out, plain = (
        heads.exact_of(inputs, seen, factors=factors, compute=dtype)[0] for dtype in (torch.float64, torch.bfloat16)
    )
    no_worse(out.detach(), plain.detach(), exact_out.detach())
    dout = torch.randn_like(out)
    gradients = torch.autograd.grad(out, inputs, dout)
    of_exact, of_plain = (torch.autograd.grad(x, inputs, dout.to(x.dtype)) for x in (exact_out, plain))
    for one, other, true in zip(gradients, of_plain, of_exact, strict=True):
        no_worse(one, other, true, times=4)


@pytest.mark.parametrize(
    ("block_size", "causal", "full", "deterministic"),
    [((64, 64), False, True, False), ((256, 128), True, False, True), ((64, 192), True, True, False)],
)
def test_flash_attn_4(block_size: tuple[int, int], causal: bool, full: bool, deterministic: bool) -> None:
    torch.manual_seed(7)
    queries, keys = lists.QUERIES, lists.KEYS
    given, seen = lists.call_of(block_size, BATCH, HEADS, full, "cuda")
    if causal:
        behind = torch.arange(queries, device="cuda")[:, None] + keys - queries
        seen = seen & (behind >= torch.arange(keys, device="cuda"))
    inputs = [
        torch.randn(BATCH, h, n, 128, device="cuda").bfloat16().requires_grad_()
        for n, h in ((queries, HEADS), (keys, 2), (keys, 2))
    ]
    q, k, v = (x.transpose(1, 2) for x in inputs)
    out, _ = flash_attn_4.flash_attn_func(
        q, k, v, causal=causal, block_sparse_tensors=given, deterministic=deterministic
    )
    dout = torch.randn_like(out).transpose(1, 2)
    check(out.transpose(1, 2), inputs, seen, dout, torch.autograd.grad(out.transpose(1, 2), inputs, dout))
