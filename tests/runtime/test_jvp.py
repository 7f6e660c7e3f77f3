"""Forward-mode derivatives by kernels, which a driver computes in torch: launches, and what they compose with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, jvp, vmap

import attngen
from attngen.errors import CallError
from tests.runtime.gradient_driver import GradientDriver, build, taken_for_a_gpu
from tests.runtime.test_transforms import DERIVATIVES, causal, dense, near, rounded


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[GradientDriver]:
    with taken_for_a_gpu(monkeypatch) as fake:
        build(passes="[forward, backward, jvp]")
        yield fake


def small() -> list[Tensor]:
    return [t[:, :6].contiguous() for t in rounded()]


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize(
    ("moved", "launch"),
    [("qkv", "jvp"), ("q", "jvp_q"), ("k", "jvp"), ("qv", "jvp")],
)
def test_one_launch_gives_output_and_tangent(gpu: GradientDriver, moved: str, launch: str) -> None:
    given = dict(zip("qkv", rounded(), strict=True))
    directions = tuple(given[name].flip(1) for name in moved)

    def of(function: Callable[..., Tensor], dtype: torch.dtype) -> Any:
        own = {name: tensor.to(dtype) for name, tensor in given.items()}
        inputs = tuple(own[name] for name in moved)
        call = lambda *some: function(**{**own, **dict(zip(moved, some, strict=True))})  # noqa: E731
        return jvp(call, inputs, tuple(t.to(dtype) for t in directions))

    near(of(causal, torch.bfloat16), of(dense, torch.float64))
    assert gpu.launches == [launch]


def test_dual_tensors_and_gradients_of_the_output(gpu: GradientDriver) -> None:
    q, k, v = (t.requires_grad_() for t in rounded())
    with forward_ad.dual_level():
        dual = causal(forward_ad.make_dual(q, k.detach().repeat_interleave(2, 2)), k, v)
        out, tangent = forward_ad.unpack_dual(dual)
        (out.float() - tangent.detach().float()).square().sum().backward()
    assert gpu.launches == ["jvp_q", "preprocess", "dkdv", "dq"]
    assert all(t.grad is not None for t in (q, k, v))


def test_a_step_of_mean_flow(gpu: GradientDriver) -> None:
    """Its target holds the tangent, detached: the gradients are those of the output."""
    torch.manual_seed(1)
    q, k, v = rounded()
    weight = (torch.randn(64, 64) / 8).to(torch.bfloat16)

    def step(attend: Callable[..., Tensor], dtype: torch.dtype) -> Tensor:
        x, own = q.to(dtype), weight.to(dtype).requires_grad_()
        net = lambda x: attend(x @ own, k.to(dtype), v.to(dtype))  # noqa: E731
        u, dudt = jvp(net, (x,), (x.flip(1),))
        loss = (u - dudt.detach()).square().mean()
        return torch.autograd.grad(loss, own)[0]

    near(step(causal, torch.bfloat16), step(dense, torch.float64))
    assert gpu.launches == ["jvp_q", "preprocess", "dkdv", "dq"]


def test_what_a_detached_tangent_saved_is_freed(gpu: GradientDriver) -> None:
    """The output keeps no tangent of q, k and v alive."""
    import weakref

    given = [t.requires_grad_() for t in rounded()]
    with forward_ad.dual_level():
        moved = [t.detach().flip(1).contiguous() for t in given]
        kept = [weakref.ref(t) for t in moved]
        dual = causal(*(forward_ad.make_dual(t, d) for t, d in zip(given, moved, strict=True)))
        out = forward_ad.unpack_dual(dual).primal
        del dual, moved
    assert out.grad_fn is not None
    assert [one() for one in kept] == [None] * 3


def test_gradients_of_tangents_and_tangents_of_tangents(gpu: GradientDriver) -> None:
    """Those are of plain torch."""
    given = small()
    both = [*given, *(t.flip(1).contiguous() for t in given)]

    def of(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def loss(*both: Tensor) -> Tensor:
            out, tangent = jvp(function, both[:3], both[3:])
            return out.sin().sum() + tangent.square().sum()

        return loss

    every = tuple(range(6))
    near(grad(of(causal), every)(*both), grad(of(dense), every)(*(t.double() for t in both)))
    assert gpu.launches == ["jvp", "preprocess", "dkdv", "dq"]

    def twice(function: Callable[..., Tensor], both: list[Tensor]) -> Any:
        inputs, moved = tuple(both[:3]), tuple(both[3:])
        return jvp(lambda *some: jvp(function, some, moved), inputs, moved)

    near(twice(causal, both), twice(dense, [t.double() for t in both]))


def test_mapped_tangents_take_one_launch(gpu: GradientDriver) -> None:
    q, k, v = small()
    basis = torch.stack([q.flip(1), q.flip(2), q])
    push = lambda f, q, k, v: vmap(lambda d: jvp(lambda q: f(q, k, v), (q,), (d,))[1])  # noqa: E731
    near(push(causal, q, k, v)(basis), push(dense, q.double(), k.double(), v.double())(basis.double()))
    assert gpu.launches == ["jvp_q"]


def test_other_calls_are_computed_in_plain_torch_with_a_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    with taken_for_a_gpu(monkeypatch) as gpu:
        build(passes="[forward, backward]")
        given = rounded()
        with pytest.warns(UserWarning, match=r"(?s)computed by plain torch in float32.*passes: \[forward, jvp\]"):
            derived = DERIVATIVES["jvp"](causal, given)
        near(derived, DERIVATIVES["jvp"](dense, [t.double() for t in given]))
        assert gpu.launches == ["forward"]


def test_the_reference_is_asked_for(gpu: GradientDriver) -> None:
    q, k, v = rounded()
    call = lambda q: attngen.attention(q, k, v, variant="causal", backend="reference")  # noqa: E731
    near(jvp(call, (q,), (q,)), jvp(lambda q: dense(q, k.double(), v.double()), (q.double(),), (q.double(),)))
    assert gpu.launches == []


def test_heads_before_rows_and_the_tangent_of_a_log_sum_exp(gpu: GradientDriver) -> None:
    q, k, v = rounded()
    flipped = tuple(t.flip(1) for t in (q, k, v))

    def call(q: Tensor, k: Tensor, v: Tensor, backend: str | None = None) -> Any:
        given = (t.transpose(1, 2) for t in (q, k, v))
        out, lse = attngen.attention(*given, variant="causal", layout="bhsd", return_lse=True, backend=backend)
        return out.transpose(1, 2), lse

    derived = jvp(call, (q, k, v), flipped)
    assert gpu.launches == ["jvp"]
    exact = (tuple(t.double() for t in some) for some in ((q, k, v), flipped))
    near(derived, jvp(lambda *given: call(*given, backend="reference"), *exact))


BIASED = attngen.variant(
    "q_pos >= kv", "s + bias[h]", tensors={"bias": {"dtype": "fp32", "shape": ["h"], "grad": True}}, name="tilted"
)


@pytest.mark.filterwarnings("error::UserWarning")
def test_a_tangent_of_a_bias_is_of_plain_torch(gpu: GradientDriver) -> None:
    q, k, v = (t.float() for t in rounded())
    bias = torch.rand(4)
    call = lambda q, bias: attngen.attention(q, k, v, variant=BIASED, bias=bias, backend="reference")  # noqa: E731
    out, moved = jvp(call, (q, bias), (q, bias))
    near((out, moved), jvp(lambda q: dense(q, k.double(), v.double()), (q.double(),), (q.double(),)))
    assert gpu.launches == []


def test_facts_are_checked_in_a_debug_block(gpu: GradientDriver) -> None:
    q, k, v = rounded()
    used = torch.tensor([20, 21], dtype=torch.int32)
    with attngen.debug(), pytest.raises(CallError, match="seqused_k"):
        jvp(lambda q: attngen.attention(q, k, v, variant="causal", seqused_k=used), (q,), (q,))


def test_compiled_programs_refuse_tangents() -> None:
    """Torch would take 0 for them, and says nothing."""
    q, k, v = (t.float() for t in small())
    push = torch.compile(lambda q: jvp(lambda q: causal(q, k, v), (q,), (q,)), backend="eager")
    with pytest.raises(Exception, match=r"CallError: operators of compiled programs have no tangents.*torch.func.jvp"):
        push(q)
