"""The helpers for padded batches against plain loops over the tokens of each sequence."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attngen.integrations.flash_attn.bert_padding import (
    index_first_axis,
    index_put_first_axis,
    pad_input,
    unpad_input,
    unpad_input_for_concatenated_sequences,
)
from attngen.integrations.flash_attn.v2 import flash_attn_varlen_func
from tests.integrations.oracles import flash_attention


def padded(*shape: int) -> tuple[Tensor, Tensor]:
    """Return tokens (3, 6, …) and a mask with padding on the right, on the left, and everywhere."""
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]])
    return torch.randn(3, 6, *shape, dtype=torch.float64), mask


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(5,), (2, 5)])
def test_unpad_and_pad(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tokens, mask = padded(*shape)
    tokens.requires_grad_()
    rows, indices, starts, longest, used = unpad_input(tokens, mask.to(dtype))
    assert torch.equal(rows, torch.stack([tokens[b, s] for b in range(3) for s in range(6) if mask[b, s]]))
    assert indices.tolist() == [b * 6 + s for b in range(3) for s in range(6) if mask[b, s]]
    assert (starts.dtype, starts.tolist(), longest) == (torch.int32, [0, 4, 8, 8], 4)
    assert (used.dtype, used.tolist()) == (torch.int32, [4, 4, 0])
    back = pad_input(rows, indices, 3, 6)
    real = mask.bool().view(3, 6, *(1 for _ in shape))
    assert torch.equal(back, tokens * real)
    (gradient,) = torch.autograd.grad((back * torch.arange(back.numel()).view_as(back)).sum(), tokens)
    assert torch.equal(gradient, torch.arange(back.numel()).view_as(back) * real)


def test_tokens_that_are_kept_and_not_used() -> None:
    tokens, mask = padded(5)
    unused = torch.zeros_like(mask)
    unused[0, 4] = unused[2, 0] = 1
    rows, indices, starts, longest, used = unpad_input(tokens, mask, unused)
    assert indices.tolist() == [0, 1, 2, 3, 4, 8, 9, 10, 11, 12]
    assert torch.equal(rows, tokens.flatten(0, 1)[indices])
    assert (starts.tolist(), longest, used.tolist()) == ([0, 5, 9, 10], 5, [4, 4, 0])


def test_concatenated_sequences() -> None:
    tokens, _ = padded(5)
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0]])
    rows, indices, starts, longest = unpad_input_for_concatenated_sequences(tokens, lengths)
    assert indices.tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11, 12, 13]
    assert torch.equal(rows, tokens.flatten(0, 1)[indices])
    assert (starts.dtype, starts.tolist(), longest) == (torch.int32, [0, 2, 5, 11, 12, 13], 6)
    assert torch.equal(pad_input(rows, indices, 3, 6)[0, :5], tokens[0, :5])


def test_nothing_is_left() -> None:
    tokens, mask = padded(5)
    rows, indices, starts, longest, used = unpad_input(tokens, torch.zeros_like(mask))
    assert (rows.shape, indices.numel(), starts.tolist(), longest, used.tolist()) == (
        (0, 5), 0, [0, 0, 0, 0], 0, [0, 0, 0]
    )  # fmt: skip
    assert not pad_input(rows, indices, 3, 6).any()


def test_gradients_of_rows() -> None:
    rows = torch.randn(7, 2, 3, dtype=torch.float64, requires_grad=True)
    indices = torch.tensor([5, 0, 3])
    assert torch.equal(index_first_axis(rows, indices), rows[indices])
    assert torch.autograd.gradcheck(index_first_axis, (rows, indices))
    assert torch.autograd.gradgradcheck(index_first_axis, (rows, indices))
    values = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    put = index_put_first_axis(values, indices, 7)
    assert torch.equal(put[indices], values)
    assert int(put.count_nonzero()) == values.numel()
    assert torch.autograd.gradcheck(lambda v: index_put_first_axis(v, indices, 7), (values,))


def test_a_padded_batch_in_packed_calls() -> None:
    """Packed calls as flash-attn's users make them: attention of padded sequences without their padding."""
    torch.manual_seed(0)
    mask = torch.tensor([[1, 1, 1, 1, 0], [0, 1, 1, 1, 1]])
    qkv = torch.randn(2, 5, 3, 4, 8, requires_grad=True)
    rows, indices, starts, longest, _ = unpad_input(qkv, mask)
    out = flash_attn_varlen_func(*rows.unbind(1), starts, starts, longest, longest, causal=True)
    padded = pad_input(out, indices, 2, 5)
    loss = 0.0
    for b in range(2):
        real = mask[b].bool()
        wanted = flash_attention(*(t[None] for t in qkv[b, real].unbind(1)), causal=True)[0][0]
        torch.testing.assert_close(padded[b, real].double(), wanted, rtol=1e-5, atol=1e-5)
        loss = loss + wanted.square().sum()
    (gradient,) = torch.autograd.grad(padded.square().sum(), qkv, retain_graph=True)
    torch.testing.assert_close(gradient, torch.autograd.grad(loss, qkv)[0].float(), rtol=1e-4, atol=1e-5)
