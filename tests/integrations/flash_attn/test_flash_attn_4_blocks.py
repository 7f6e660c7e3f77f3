"""flash-attn 4's lists of blocks against attention in float64 over the same pairs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attngen.errors import CallError, NoKernelError
from attngen.integrations import flash_attn_4
from attngen.integrations.flash_attn_4 import BlockSparseTensorsTorch, flash_attn_func
from tests.integrations.oracles import lists_of, masked_attention, pairs_of_blocks
from tests.sampling import sampled

BATCH, HEADS, QUERIES, KEYS = 2, 4, 200, 300


def call_of(
    block_size: tuple[int, int], batch: int, heads: int, full: bool, device: str = "cpu"
) -> tuple[BlockSparseTensorsTorch, Tensor]:
    """Lists in which the first block of queries has nothing, and the pairs that they show."""
    rows, columns = block_size
    kinds = torch.randint(0, 3, (batch, heads, -(-QUERIES // rows), -(-KEYS // columns)), device=device)
    kinds[0, 0, 0] = 0
    masks = [kinds == 1, kinds == 2] if full else [kinds > 0]
    lists = [each for mask in masks for each in reversed(lists_of(mask, mask.shape[-1]))]
    given = BlockSparseTensorsTorch(*lists, block_size=block_size)
    return given, pairs_of_blocks(kinds > 0, rows, columns, QUERIES, KEYS)


def near(actual: Any, wanted: Any) -> None:
    for one, exact in zip(actual, wanted, strict=True):
        torch.testing.assert_close(one.double(), exact.double(), rtol=1e-4, atol=1e-5)


@sampled(
    block_size=[(64, 64), (128, 128), (256, 128), (128, 64), (64, 192)],
    form=[(BATCH, HEADS, True), (1, HEADS, False), (BATCH, 1, True)],
    causal=[False, True],
    sinks=[True, False],
)
def test_results_and_gradients(
    block_size: tuple[int, int], form: tuple[int, int, bool], causal: bool, sinks: bool
) -> None:
    batch, heads, full = form
    torch.manual_seed(sum(block_size) + heads)
    inputs = [torch.randn(BATCH, n, h, 16, requires_grad=True) for n, h in ((QUERIES, 4), (KEYS, 2), (KEYS, 2))]
    given, seen = call_of(block_size, batch, heads, full)
    if causal:
        seen = seen & (torch.arange(QUERIES)[:, None] + KEYS - QUERIES >= torch.arange(KEYS))
    sink = torch.randn(HEADS, requires_grad=True) if sinks else None
    out, lse = flash_attn_func(
        *inputs, causal=causal, learnable_sink=sink, block_sparse_tensors=given, softmax_scale=0.3, return_lse=True
    )
    exact, total = masked_attention(*(x.transpose(1, 2) for x in inputs), seen, 0.3)
    leaves = inputs
    if sink is not None:
        before, total = total, torch.logaddexp(total, sink.double()[:, None])
        exact, leaves = exact * torch.exp(before - total)[..., None], [*inputs, sink]
    near((out, lse), (exact.transpose(1, 2), total))
    dout = torch.randn_like(out)
    near(torch.autograd.grad(out, leaves, dout), torch.autograd.grad(exact.transpose(1, 2), leaves, dout.double()))


@pytest.mark.parametrize(
    ("fields", "options", "error", "message"),
    [
        ({"block_size": None}, {}, CallError, r"block_size must be .*, such as \(128, 128\), got None; without it"),
        ({"block_size": (96, 128)}, {}, CallError, "blocks of 96 queries and 128 keys.* the next are 128 and 128"),
        ({"block_size": (64, 128)}, {}, CallError, r"tensors.mask_block_idx must be int32, .* \(2, 4, 4\)"),
        ({"full_block_cnt": None}, {}, CallError, "has one of full_block_cnt and full_block_idx"),
        ({"mask_block_idx": None}, {}, CallError, "must be a BlockSparseTensorsTorch with mask_block_idx"),
        ({"cu_total_m_blocks": 1}, {}, NoKernelError, "block_sparse_tensors.cu_total_m_blocks is not supported"),
        ({}, {"softcap": 2.0}, NoKernelError, "softcap is not supported: .* pass 0.0"),
        ({}, {"window_size": (3, None)}, NoKernelError, "window_size is not supported: .* list fewer blocks"),
        ({}, {"mask_mod": print}, NoKernelError, "mask_mod is not supported"),
    ],
)  # fmt: skip
def test_refusals(fields: dict[str, Any], options: dict[str, Any], error: type[Exception], message: str) -> None:
    given, _ = call_of((128, 128), BATCH, HEADS, True)
    q, k, v = (torch.randn(BATCH, n, HEADS, 16) for n in (QUERIES, KEYS, KEYS))
    with pytest.raises(error, match=message):
        flash_attn_func(q, k, v, block_sparse_tensors=given._replace(**fields), **options)


def test_lists_by_key_alone_are_refused() -> None:
    q = torch.randn(1, 4, 2, 16)
    with pytest.raises(CallError, match="block_sparse_tensors_bwd lists the blocks .* by key; pass both"):
        flash_attn_func(q, q, q, block_sparse_tensors_bwd=call_of((64, 64), 1, 1, True)[0])


def test_the_fields_are_those_of_flash_attn() -> None:
    """In flash-attn-4 4.0.0b36."""
    assert flash_attn_4.BlockSparseTensorsTorch._fields == (
        "mask_block_cnt", "mask_block_idx", "full_block_cnt", "full_block_idx", "cu_total_m_blocks",
        "cu_block_idx_offsets", "block_size", "dq_write_order", "dq_write_order_full", "spt",
    )  # fmt: skip
