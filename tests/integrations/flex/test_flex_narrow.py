"""Functions that compute with integers of 8 and 16 bits: torch wraps them around, and so does what they become."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attngen.errors import CallError
from attngen.integrations.flex import attention as ours
from tests.integrations.flex.flex_mods import BATCH, HEADS, LENGTH
from tests.integrations.flex.test_flex_attention import dense, qkv
from tests.sampling import sampled

Value = Callable[[Tensor, Tensor], Any]

VALUES: dict[str, Value] = {
    "sum": lambda x, y: x + y,
    "scaled sum": lambda x, y: torch.add(x, y, alpha=3),
    "difference": lambda x, y: x - y,
    "of a number": lambda x, y: 100 - x,
    "product": lambda x, y: x * y,
    "negative": lambda x, y: -x,
    "magnitude": lambda x, y: abs(x),
    "square": lambda x, y: x**2,
    "shift": lambda x, y: x << 3,
    "bits": lambda x, y: (~x & y) ^ 5,
    "nested": lambda x, y: (x + y) * 3 - y,
    "quotient": lambda x, y: (x + y) // 3,
    "remainder": lambda x, y: (x * y) % 7,
    "least": lambda x, y: torch.minimum(x + 100, y),
    "chosen": lambda x, y: torch.where(x > y, x + y, y),
    "narrowed": lambda x, y: (x.int() * y.int()).to(x.dtype),
    "widened": lambda x, y: x.int() * y.int(),
}


def tensors(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    info = torch.iinfo(dtype)
    x, y = (torch.randint(info.min, info.max + 1, (LENGTH,), dtype=dtype) for _ in range(2))
    x[:2] = torch.tensor([info.min, info.max], dtype=dtype)
    return x, y


@sampled(always=8, dtype=[torch.uint8, torch.int8, torch.int16], name=[*VALUES])
def test_they_wrap_around(name: str, dtype: torch.dtype) -> None:
    x, y = tensors(dtype)
    value = VALUES[name]

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Any:
        return value(x[q], y[kv]) > 3

    def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Any:
        return s + value(x[kv], y[q]) * 0.01

    q, k, v = (t.detach() for t in qkv())
    mask = ours.create_block_mask(mask_mod, BATCH, HEADS, LENGTH, LENGTH, device="cpu")
    out = ours.flex_attention(q, k, v, score_mod, mask)
    wanted, _ = dense(q, k, v, mask_mod, score_mod)
    assert torch.allclose(out, wanted, atol=2e-5, rtol=1e-4)


def test_an_index_that_wraps_to_a_negative_one_counts_from_the_end() -> None:
    x = torch.full((LENGTH,), 100, dtype=torch.int8)
    table = torch.randn(256)

    def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Any:
        return s + table[(x[q] + x[kv]).int() + kv]

    q, k, v = (t.detach() for t in qkv())
    out = ours.flex_attention(q, k, v, score_mod)
    assert torch.allclose(out, dense(q, k, v, None, score_mod)[0], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("300", lambda x: x > 300),
        ("-1", lambda x: torch.clamp(x, min=-1) > 4),
        ("256", lambda x: x + 256 > 3),
        ("1000", lambda x: x % 1000 > 3),
    ],
)
def test_a_number_beyond_them_is_refused(name: str, value: Callable[[Tensor], Tensor]) -> None:
    """Torch would take it modulo 2^8, compiled or not, or not at all."""
    x = torch.arange(LENGTH, dtype=torch.uint8)

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Any:
        return value(x[kv])

    told = rf"mask_mod .*{name} does not fit uint8, in which it computes; allowed: 0 to 255, or the tensor's \.int\(\)"
    with pytest.raises(CallError, match=told):
        ours.create_block_mask(mask_mod, BATCH, HEADS, LENGTH, LENGTH, device="cpu")


@pytest.mark.parametrize("compiled", [False, True])
def test_captured_tensors_stay_in_float64_beside_queries_in_float64(*, compiled: bool) -> None:
    """Numbers that float32 cannot tell apart decide the mask, and make the score."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 16, 8, dtype=torch.float64) for _ in range(3))
    near = 1 + torch.arange(16, dtype=torch.float64) * 2.0**-40
    bias = torch.randn(16, dtype=torch.float64).requires_grad_()
    mask = ours.create_block_mask(lambda b, h, q, kv: near[kv] <= near[q], None, None, 16, 16, device="cpu")

    def score(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return s + bias[kv] * near[q]

    call = torch.compile(ours.flex_attention, fullgraph=True, backend="aot_eager") if compiled else ours.flex_attention
    actual = call(q, k, v, score, mask)
    logits = q @ k.transpose(2, 3) / 8**0.5 + bias * near[:, None]
    wanted = logits.masked_fill(torch.ones(16, 16).triu(1).bool(), float("-inf")).softmax(-1) @ v
    torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-12)
    for one, other in zip(*(torch.autograd.grad(t.square().sum(), bias) for t in (actual, wanted)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


def _detached(kind: str, learned: Tensor) -> Any:
    def of_an_element(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return score + 2 * learned[h] - learned[h].detach()

    def of_the_score(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return score * torch.sigmoid(score.detach())

    def of_a_product(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return score + (score * 0.5 + 1).detach()

    return {"an element": of_an_element, "the score": of_the_score, "a product": of_a_product}[kind]


@pytest.mark.parametrize("kind", ["an element", "the score", "a product"])
def test_a_gradient_that_would_not_be_cut_is_refused(kind: str) -> None:
    q = torch.randn(1, 2, 8, 16)
    score = _detached(kind, torch.randn(2, requires_grad=True))
    with pytest.raises(CallError, match="detaches a value that has a gradient"):
        ours.flex_attention(q, q, q, score_mod=score)


def test_what_has_no_gradient_may_be_detached() -> None:
    q, bias = torch.randn(1, 2, 8, 16), torch.randn(2)
    out = ours.flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s + bias.detach()[h] + bias[h].detach())
    wanted = ours.flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s + 2 * bias[h])
    torch.testing.assert_close(out, wanted)
