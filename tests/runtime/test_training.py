"""Autograd through packing and launch of the backward, on a driver that computes each of its kernels in torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen.errors import CallError, NoKernelError
from tests.runtime.gradient_driver import GradientDriver, build, close, leaves, taken_for_a_gpu

LEARNED = (
    'variants:\n  own:\n    mask: "q_pos >= kv"\n    score: "s + slope[h] * gain"\n'
    "    scalars: {gain: {type: float32, grad: true}}\n"
    "    tensors: {slope: {dtype: float32, shape: [h], grad: true}, shift: {dtype: float32, shape: [h]}}\n"
)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[GradientDriver]:
    with taken_for_a_gpu(monkeypatch) as fake:
        yield fake


@pytest.mark.parametrize("seqlen_k", [70, 25])
@pytest.mark.parametrize("order", ["bshd", "bhsd"])
def test_gradients_of_outputs_and_log_sum_exps(gpu: GradientDriver, order: str, seqlen_k: int) -> None:
    build()
    inputs = leaves(order, seqlen_k)
    above = torch.randn(2, 40, 4, 64).transpose(1, 2) if order == "bhsd" else torch.randn(2, 40, 4, 64)

    def loss(backend: str | None, lse_too: bool) -> Tensor:
        out, lse = attngen.attention(*inputs, variant="causal", return_lse=True, layout=order, backend=backend)
        return (out.float() * above).sum() + (torch.where(lse.isinf(), 0.0, lse).sin().sum() if lse_too else 0)

    for lse_too in (False, True):
        ours = torch.autograd.grad(loss(None, lse_too), inputs)
        close(ours, torch.autograd.grad(loss("reference", lse_too), inputs))
        assert gpu.launches[-4:] == ["forward", "preprocess", "dkdv", "dq"]


def test_only_what_is_asked_for_is_returned(gpu: GradientDriver) -> None:
    build()
    q, k, v = leaves()
    out = attngen.attention(q, k.detach(), v, variant="causal")
    out.sum().backward()  # a gradient that autograd expands from one element
    wanted = torch.autograd.grad(attngen.attention(q, k, v, variant="causal", backend="reference").sum(), (q, v))
    assert q.grad is not None
    assert v.grad is not None
    assert k.grad is None
    close((q.grad, v.grad), wanted)
    with torch.no_grad():
        assert not attngen.attention(q, k, v, variant="causal").requires_grad


def test_gradients_of_the_variants_own_tensors(gpu: GradientDriver) -> None:
    build("own", LEARNED)
    q, k, v = leaves()
    slope, gain = torch.rand(4, requires_grad=True), torch.tensor(0.7, requires_grad=True)
    own = {"slope": slope, "gain": gain, "shift": torch.zeros(4)}

    def loss(backend: str | None = None, **more: Any) -> Tensor:
        return attngen.attention(q, k, v, variant="own", backend=backend, **{**own, **more}).float().square().sum()

    inputs = (q, k, v, slope, gain)
    ours, theirs = torch.autograd.grad(loss(), inputs), torch.autograd.grad(loss("reference"), inputs)
    close(ours[:3], theirs[:3])
    # a constant for a row changes nothing but rounding
    assert all(a.shape == b.shape and float(a.abs().max()) < 0.5 for a, b in zip(ours[3:], theirs[3:], strict=True))
    with pytest.raises(CallError, match="tensor 'shift' requires a gradient that its spec does not declare"):
        loss(shift=torch.zeros(4, requires_grad=True)).backward()
    with pytest.raises(CallError, match="tensor 'slope' is accumulated in no fixed order"):
        loss(deterministic=True).backward()
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(CallError, match="tensor 'slope' is accumulated in no fixed order"):
            loss().backward()
        torch.autograd.grad(loss(slope=slope.detach(), gain=gain.detach()), (q, k, v))
        torch.use_deterministic_algorithms(True, warn_only=True)
        with pytest.warns(UserWarning, match="no fixed order"):
            torch.autograd.grad(loss(), inputs)
    finally:
        torch.use_deterministic_algorithms(False)


def test_autocast(gpu: GradientDriver) -> None:
    build()
    q, k, v = (t.detach().float().requires_grad_() for t in leaves())
    torch.set_autocast_enabled("cuda", True)  # what torch.autocast does where there is a GPU
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        out = attngen.attention(q, k.to(torch.bfloat16), v, variant="causal")
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", torch.float16)
    assert out.dtype == torch.bfloat16
    gradients = torch.autograd.grad(out.float().square().sum(), (q, k, v))
    assert {gradient.dtype for gradient in gradients} == {torch.float32}
    assert gpu.launches == ["forward", "preprocess", "dkdv", "dq"]


@pytest.mark.exhaustive
def test_autocast_on_the_cpu() -> None:
    given = [t.detach().float().requires_grad_() for t in leaves()]
    wanted = attngen.attention(*(t.to(torch.bfloat16) for t in given), variant="causal")
    for places in ((), (2,), (0, 1)):  # those that are in bf16 before
        q, k, v = (t.to(torch.bfloat16) if i in places else t for i, t in enumerate(given))
        with torch.autocast("cpu", torch.bfloat16):
            out = attngen.attention(q, k, v, variant="causal")
            compiled = torch.compile(attngen.attention, backend="aot_eager")(q, k, v, variant="causal")
        torch.testing.assert_close(out, wanted, rtol=0, atol=0)
        torch.testing.assert_close(compiled, wanted, rtol=0, atol=0)
        gradients = torch.autograd.grad(out.float().square().sum(), given)
        assert {gradient.dtype for gradient in gradients} == {torch.float32}
    with torch.autocast("cpu", torch.bfloat16):
        assert attngen.attention(*(t.double() for t in given), variant="causal").dtype == torch.float64
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        assert attngen.attention(*given, variant="causal").dtype == torch.float32


def test_explain_tells_what_gives_the_gradients(gpu: GradientDriver) -> None:
    build()
    explanation = attngen.explain(*leaves(), variant="causal", direction="backward")
    assert explanation.kernel is not None
    assert explanation.kernel.direction == "backward"
    assert explanation.to_dict()["call"].startswith("backward, dense, bf16")
    assert str(explanation).endswith("preprocess, dkdv, dq, dQ added up in a fixed order")
    assert gpu.launches == []


def test_a_forward_alone_is_told_apart(gpu: GradientDriver) -> None:
    build(passes="[forward]")
    inputs = leaves()
    out = attngen.attention(*inputs, variant="causal")
    with pytest.raises(NoKernelError, match=r"(?s)causal, backward, dense.*passes: \[forward, backward\]"):
        out.sum().backward()


def test_a_transform_of_something_else_changes_nothing(gpu: GradientDriver) -> None:
    build()
    q, k, v = leaves()
    wanted = attngen.attention(q, k, v, variant="causal")
    out = torch.func.vmap(lambda scale: attngen.attention(q, k, v, variant="causal") * scale)(torch.ones(2))
    assert torch.equal(out[1].float(), wanted.float())
    assert gpu.launches == ["forward"] * 2


@pytest.mark.exhaustive
def test_a_compiled_program_differentiates(gpu: GradientDriver) -> None:
    build()
    inputs = leaves()

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = attngen.attention(q * 2, k, v, variant="causal", return_lse=True)
        return out.float().square().sum() + lse.sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    ours = torch.autograd.grad(compiled(*inputs), inputs)
    assert gpu.launches == ["forward", "preprocess", "dkdv", "dq"]
    close(ours, torch.autograd.grad(loss(*inputs), inputs))
