"""The reference where autograd does not record: inside operators of torch.library, and in inference mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen.errors import CallError
from attngen.lang.check import compile_variant
from attngen.lang.variant import Tensor as Declared
from attngen.runtime.reference import eager

SLOPED = compile_variant(
    "sloped", "q_pos >= kv", "s + slope[h] * (kv - q_pos)", tensors=[
        Declared("slope", "fp32", ("h",), grad=True), Declared("sinks", "fp32", ("h",), grad=True),
    ], sink="sinks[h]",
)  # fmt: skip


def leaves() -> list[Tensor]:
    torch.manual_seed(0)
    shapes = (1, 5, 2, 16), (1, 7, 2, 16), (1, 7, 2, 16), (2,), (2,)
    return [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]


def call(q: Tensor, k: Tensor, v: Tensor, slope: Tensor, sinks: Tensor) -> Any:
    options: dict[str, Any] = {"variant": SLOPED, "backend": "reference", "return_lse": True}
    return attngen.attention(q, k, v, slope=slope, sinks=sinks, **options)


def gradients(results: tuple[Tensor, Tensor], given: list[Tensor]) -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    above = [torch.randn(result.shape, dtype=torch.float64) for result in results]
    return torch.autograd.grad(results, given, above)


@pytest.mark.parametrize("chunk", [eager.CHUNK_ELEMENTS["cpu"], 28])  # the smaller one recomputes each two rows
def test_gradients_inside_an_operator(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, slope, sinks = given = leaves()
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / 4
    distance = torch.arange(7) - torch.arange(5)[:, None] - 2
    scores = scores + slope[:, None, None] * distance
    scores = scores.masked_fill(distance > 0, -torch.inf)
    lse = torch.logsumexp(torch.cat([scores, sinks[:, None, None].expand(1, 2, 5, 1)], -1), -1)
    out = torch.einsum("bhqk,bkhd->bqhd", (scores - lse[..., None]).exp(), v)
    wanted = gradients((out, lse), given)
    monkeypatch.setitem(eager.CHUNK_ELEMENTS, "cpu", chunk)
    given = leaves()
    with torch._C._AutoDispatchBelowAutograd():
        got = gradients(call(*given), given)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_an_operator_that_differentiates_a_call() -> None:
    @torch.library.custom_op("below_autograd::step", mutates_args=())
    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.enable_grad():
            inputs = [t.detach().requires_grad_() for t in (q, k, v)]
            out = attngen.attention(*inputs, variant="causal", backend="reference")
            return torch.cat([t.flatten() for t in torch.autograd.grad(out, inputs, 2 * out.detach())])

    q, k, v, *_ = leaves()
    loss = torch.nn.functional.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (q, k, v)), attn_mask=torch.ones(5, 7, dtype=torch.bool).tril(2)
    ).square()
    wanted = torch.cat([t.flatten() for t in torch.autograd.grad(loss.sum(), (q, k, v))])
    torch.testing.assert_close(step(q, k, v), wanted)


def test_inference_mode_refuses_what_it_cannot_record() -> None:
    q, k, v, *_ = leaves()
    with torch.inference_mode():
        out = attngen.attention(q, k, v, variant="causal", backend="reference")
        with pytest.raises(RuntimeError, match="does not require grad"):
            torch.autograd.grad(out.sum(), q)
        asks = q.clone().requires_grad_()
        with torch.enable_grad(), pytest.raises(CallError, match=r"q requires a gradient, but was made in inference"):
            attngen.attention(asks, k, v, variant="causal", backend="reference")


def test_what_depends_on_no_input_has_gradients_of_zero() -> None:
    """Logits that are constant: the log-sum-exp depends on no input."""
    q, k, v, *_ = leaves()
    flat = compile_variant("flat", "q_pos >= kv", "0.25 * (kv - q_pos)")
    _, lse = attngen.attention(q, k, v, variant=flat, return_lse=True)
    assert not any(gradient.any() for gradient in torch.autograd.grad(lse.sum(), (q, k, v)))
