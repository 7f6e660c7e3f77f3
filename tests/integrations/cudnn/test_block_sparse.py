"""cuDNN frontend's block-sparse attention: results and gradients beside attention in float64 over the same pairs."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from attngen.errors import CallError, NoKernelError
from attngen.integrations.cudnn import BSA, block_sparse_attention_backward, block_sparse_attention_forward
from tests.integrations.oracles import lists_of, masked_attention, pairs_of_blocks
from tests.sampling import sampled

BATCH, HEADS, QUERIES, KEYS = 2, 4, 200, 300
#: Axes of block_sizes before the last one.
SIZES = {1: (), 2: (BATCH,), 3: (BATCH, HEADS)}


def call_of(block: int, kv_heads: int, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], Tensor]:
    """q, k and v (b, h, s, d), and a block mask whose first row is empty."""
    q = torch.randn(BATCH, HEADS, QUERIES, 16, dtype=dtype)
    k, v = torch.randn(2, BATCH, kv_heads, KEYS, 16, dtype=dtype)
    shown = torch.rand(BATCH, HEADS, -(-QUERIES // block), -(-KEYS // block)) < 0.6
    shown[0, 0, 0] = False
    return [q, k, v], shown


def seen_of(shown: Tensor, block: int, sizes: Tensor | None) -> Tensor:
    seen = pairs_of_blocks(shown, block, block, QUERIES, KEYS)
    if sizes is None:
        return seen
    sizes = sizes[:, None] if sizes.dim() == 2 else sizes
    valid = torch.arange(KEYS) % block < sizes.expand(BATCH, HEADS, -1).repeat_interleave(block, -1)[..., :KEYS]
    return seen & valid[..., None, :]


def near(actual: Any, wanted: Any) -> None:
    for one, exact in zip(actual, wanted, strict=True):
        torch.testing.assert_close(one.double(), exact.double(), rtol=1e-4, atol=1e-5)


@sampled(form=[(0, 4, None), (1, 2, 0.3), (2, 1, None), (3, 4, 0.1)], block=[64, 128], layout=["bhsd", "bshd"])
def test_results_and_gradients(form: tuple[int, int, float | None], block: int, layout: str) -> None:
    axes, kv_heads, scale = form
    torch.manual_seed(block + axes)
    inputs, shown = call_of(block, kv_heads)
    blocks = shown.shape[-1]
    sizes = torch.randint(1, block + 1, SIZES[axes] + (blocks,), dtype=torch.int32) if axes else None
    indices, counts = lists_of(shown, blocks)
    for each in inputs:
        each.requires_grad_()
    exact = masked_attention(*inputs, seen_of(shown, block, sizes), scale)
    dout = torch.randn_like(exact[0])
    gradients = torch.autograd.grad(exact[0], inputs, dout)

    def moved(tensor: Tensor) -> Tensor:
        return tensor.transpose(1, 2) if layout == "bshd" else tensor

    options: dict[str, Any] = {
        "block_sizes": sizes, "q2k_block_nums": counts, "sparse_block_size": block, "softmax_scale": scale,
        "layout": layout,
    }  # fmt: skip
    result = block_sparse_attention_forward(*map(moved, inputs), indices, **options)
    out, lse = result
    assert out is result["o_tensor"]
    assert lse is result[1]
    near((moved(out), lse), exact)
    near(torch.autograd.grad(moved(out), inputs, dout.float(), retain_graph=True), gradients)
    into = torch.full_like(moved(inputs[0]), float("nan"))
    made = block_sparse_attention_backward(
        moved(dout).float(), *(moved(x.detach()) for x in inputs), out.detach(), lse.detach(), indices,
        dq_tensor=into, **options,
    )  # fmt: skip
    assert made["dq_tensor"] is into
    near([moved(one) for one in made], gradients)


@pytest.mark.parametrize("count", [None, 2])
def test_lists_of_one_length(count: int | None) -> None:
    inputs, _ = call_of(64, HEADS)
    indices = torch.rand(BATCH, HEADS, 4, 5).argsort(-1)[..., :3].int()
    shown = torch.zeros(BATCH, HEADS, 4, 5, dtype=torch.bool).scatter_(-1, indices[..., :count].long(), True)
    near(
        BSA.block_sparse_attention_forward(*inputs, indices, count), masked_attention(*inputs, seen_of(shown, 64, None))
    )


def test_half_precision_errs_as_plain_torch() -> None:
    torch.manual_seed(3)
    inputs, shown = call_of(64, HEADS, torch.bfloat16)
    indices, counts = lists_of(shown, 5)
    out, _ = block_sparse_attention_forward(*inputs, indices, q2k_block_nums=counts)
    seen = seen_of(shown, 64, None)
    exact, plain = (masked_attention(*inputs, seen, compute=dtype)[0] for dtype in (torch.float64, torch.bfloat16))
    assert (out - exact).abs().max() <= 2 * (plain - exact).abs().max()


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"sparse_block_size": 32}, CallError, "sparse_block_size must be 64 or 128, got 32"),
        ({"block_sparse_num": 6}, CallError, "block_sparse_num must be from 1 to 5"),
        ({"pack_gqa": True}, NoKernelError, "pack_gqa is not supported: lists are of each head of q; leave it out"),
        ({"q2k_block_nums": torch.ones(2, 4, 4)}, CallError, "q2k_block_nums must be int32"),
        ({"sparse_block_size": 128}, CallError, r"q2k_block_index must be int32, .* are \(2, 4, 2\)"),
        (
            {"block_sizes": torch.ones(6, dtype=torch.int32)},
            CallError,
            r"shapes \(5,\), \(2, 5\), \(2, 4, 5\)",
        ),
        ({"layout": "sbhd"}, CallError, "layout must be one of bhsd, bshd"),
    ],
)
def test_refusals(given: dict[str, Any], error: type[Exception], message: str) -> None:
    inputs, _ = call_of(64, HEADS)
    with pytest.raises(error, match=message):
        block_sparse_attention_forward(*inputs, torch.zeros(2, 4, 4, 5, dtype=torch.int32), **given)


def test_the_arguments_are_those_of_cudnn() -> None:
    """In nvidia-cudnn-frontend 1.32.0."""
    lists = ["q2k_block_index", "block_sparse_num", "block_sizes", "q2k_block_nums"]
    assert [*inspect.signature(block_sparse_attention_forward).parameters] == [
        "q_tensor", "k_tensor", "v_tensor", *lists, "sparse_block_size", "allow_empty_block_nums", "softmax_scale",
        "pack_gqa", "layout", "kv_splits", "use_clc",
    ]  # fmt: skip
    assert [*inspect.signature(block_sparse_attention_backward).parameters] == [
        "do_tensor", "q_tensor", "k_tensor", "v_tensor", "o_tensor", "lse_tensor", *lists, "softmax_scale", "dq_tensor",
        "dk_tensor", "dv_tensor", "bucket_size_blocks", "sparse_block_size", "layout",
    ]  # fmt: skip
