"""Largest logits of calls: against float64, without a gradient, in compiled programs, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import attngen
from attngen.errors import CallError, NoKernelError
from attngen.runtime.registry.lookup import registry
from tests.runtime.gradient_driver import GradientDriver, build, close, leaves, taken_for_a_gpu


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[GradientDriver]:
    with taken_for_a_gpu(monkeypatch) as fake:
        yield fake


def tensors(*shape: int) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(shape) for _ in range(3)]


def attend(*given: Tensor, **options: Any) -> tuple[Tensor, ...]:
    result = attngen.attention(*given, **{"variant": "causal", "return_max_logits": True, **options})
    assert isinstance(result, tuple)
    return result


def logits(q: Tensor, k: Tensor) -> Tensor:
    """Scaled logits (b, h, q, k) in float64, causal from the last query on."""
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) / math.sqrt(q.shape[-1])
    return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1 + k.shape[1] - q.shape[1]), -math.inf)


def test_one_number_for_each_head_of_the_batch() -> None:
    q, k, v = tensors(2, 9, 3, 16)
    out, lse, largest = attend(q, k, v, return_lse=True)
    wanted = logits(q, k)
    torch.testing.assert_close(largest.double(), wanted.amax((0, 2, 3)), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(lse.double(), wanted.logsumexp(-1), rtol=1e-6, atol=1e-6)
    assert lse.is_contiguous()
    alone = attend(q, k, v)
    assert torch.equal(alone[0], out)
    assert torch.equal(alone[1], largest)
    assert torch.equal(attend(*(t.transpose(1, 2) for t in (q, k, v)), layout="bhsd")[1], largest)


def test_heads_that_see_nothing_and_rows_of_no_sequence() -> None:
    q, k, v = tensors(8, 3, 16)
    starts = torch.tensor([0, 3, 5], dtype=torch.int32)
    _, largest = attngen.attention_varlen(
        q, k, v, starts, starts, 3, 3, variant="causal", return_max_logits=True
    )  # rows 5 to 7 are of no sequence
    wanted = [logits(q[None, a:b], k[None, a:b]).amax((0, 2, 3)) for a, b in ((0, 3), (3, 5))]
    torch.testing.assert_close(largest.double(), torch.maximum(*wanted), rtol=1e-6, atol=1e-6)
    empty = torch.zeros(1, 0, 3, 16)
    assert attend(q[None], empty, empty)[1].eq(-math.inf).all()
    assert attend(empty, k[None], v[None])[1].eq(-math.inf).all()


def test_sinks_are_no_logits() -> None:
    q, k, v = tensors(1, 5, 2, 16)
    sunk = attngen.variant("kv <= q_pos", sink="9.0")
    assert torch.equal(attend(q, k, v, variant=sunk)[1], attend(q, k, v)[1])
    out, lse, largest = attend(q, k[:, :0], v[:, :0], variant=sunk, return_lse=True)
    assert lse.eq(9.0).all()
    assert largest.eq(-math.inf).all()
    assert not out.any()


def test_training_has_the_backward_of_calls_without(gpu: GradientDriver) -> None:
    build(more="max_logits: [false, true]")
    inputs = leaves()

    def loss(backend: str | None = None, **more: Any) -> Tensor:
        out, lse, *largest = attngen.attention(*inputs, variant="causal", return_lse=True, backend=backend, **more)
        assert not any(each.requires_grad for each in largest)
        return out.float().square().sum() + torch.where(lse.isinf(), 0.0, lse).sin().sum()

    ours = torch.autograd.grad(loss(return_max_logits=True), inputs)
    assert gpu.launches == ["forward", "preprocess", "dkdv", "dq"]
    theirs = torch.autograd.grad(loss(), inputs)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    close(ours, torch.autograd.grad(loss("reference", return_max_logits=True), inputs))
    again = torch.autograd.grad(loss(return_max_logits=True), inputs)  # its backward is known by now
    assert all(torch.equal(a, b) for a, b in zip(ours, again, strict=True))


def test_kernels_without_largest_logits_do_not_serve(gpu: GradientDriver) -> None:
    build(passes="[forward]")
    with pytest.raises(NoKernelError, match=r"(?s)causal_max_logits, .*variant: causal\n *max_logits: true"):
        attend(*(leaf.detach() for leaf in leaves()))


def test_transforms_and_second_derivatives() -> None:
    q, k, v = (tensor.double() for tensor in tensors(1, 6, 2, 8))
    both = torch.func.vmap(attend)(*(torch.stack([each, 2 * each]) for each in (q, k, v)))[1]
    assert torch.equal(both[1], attend(2 * q, 2 * k, 2 * v)[1])
    q.requires_grad_()

    def second(**more: Any) -> Tensor:
        out, lse, *_ = attngen.attention(q, k, v, variant="causal", return_lse=True, **more)
        (first,) = torch.autograd.grad((out.sum() + lse.sum()) ** 2, q, create_graph=True)
        return torch.autograd.grad(first.square().sum(), q)[0]

    assert torch.equal(second(return_max_logits=True), second())


@pytest.mark.exhaustive
def test_compiled_programs() -> None:
    q, k, v = tensors(2, 9, 3, 16)
    q.requires_grad_()
    program = torch.compile(attend, fullgraph=True, backend="aot_eager")
    out, lse, largest = program(q, k, v, return_lse=True)
    assert torch.equal(largest, attend(q, k, v)[1])
    assert not largest.requires_grad
    (gradient,) = torch.autograd.grad(out.sum() + lse.sum(), q)
    plain, sums = attngen.attention(q, k, v, variant="causal", return_lse=True)
    torch.testing.assert_close(gradient, torch.autograd.grad(plain.sum() + sums.sum(), q)[0])


def test_what_is_refused() -> None:
    q, k, v = tensors(1, 4, 2, 16)
    with pytest.raises(CallError, match="quantize goes with kernels in 8 bits, which give no largest logits"):
        attend(q, k, v, quantize="fp8")
    with pytest.raises(CallError, match="weights: sigmoid, whose kernels look for no largest logit"):
        attend(q, k, v, variant=attngen.variant(weights="sigmoid"))
    with pytest.raises(CallError, match="return_lse must be True or False, got 'max_logits'"):
        attend(q, k, v, return_lse="max_logits")
    name = registry.declare(attngen.variant("kv <= q_pos").value.with_max_logits())
    with pytest.raises(CallError, match="custom_max_logits goes with return_max_logits=True, beside the plain name"):
        attngen.attention(q, k, v, variant=name, return_lse=True)
    one = np.zeros((1, 2, 2, 16), np.float32)
    with pytest.raises(CallError, match="return_max_logits takes torch tensors"):
        attngen.attention(one, one, one, return_max_logits=True)  # type: ignore[arg-type]
