"""Calls while a dispatch mode is active: the mode sees one operator, and can keep its results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import attngen
from attngen.errors import CallError
from attngen.integrations import sdpa
from attngen.lang.variant import Tensor as Declared
from attngen.runtime.operations.attention import dispatch
from attngen.schema import preset
from tests.runtime.gradient_driver import GradientDriver, build, close, leaves, taken_for_a_gpu
from tests.runtime.support import variant


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[GradientDriver]:
    with taken_for_a_gpu(monkeypatch) as fake:
        yield fake


class Seen(TorchDispatchMode):
    """A mode that lists the operators which it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))

    @property
    def own(self) -> list[str]:
        """Operators of attngen, without their overloads."""
        return [name.removesuffix(".default") for name in self.names if name.startswith("attngen")]


def inputs(**options: Any) -> list[Tensor]:
    torch.manual_seed(3)
    return [torch.randn(2, 9, heads, 8, **options) for heads in (4, 2, 2)]


def keep(policy: CheckpointPolicy, context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    """Save what attngen computes, or recompute it, as ``policy`` says."""
    return policy if operator.namespace.startswith("attngen") else CheckpointPolicy.PREFER_RECOMPUTE


def checkpointed(function: Callable[..., Tensor], *given: Tensor, policy: CheckpointPolicy) -> Tensor:
    contexts = partial(create_selective_checkpoint_contexts, partial(keep, policy))
    out: Tensor = checkpoint(function, *given, use_reentrant=False, context_fn=contexts)
    return out


@pytest.mark.parametrize(("policy", "runs"), [(CheckpointPolicy.MUST_SAVE, 1), (CheckpointPolicy.PREFER_RECOMPUTE, 2)])
def test_a_selective_checkpoint_keeps_what_the_reference_computed(
    policy: CheckpointPolicy, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    forwards: list[bool] = []
    run_reference = dispatch._run_reference

    def counted(*given: Any) -> Any:
        forwards.append(torch.is_grad_enabled())  # a backward of the reference records a forward of its own
        return run_reference(*given)

    monkeypatch.setattr(dispatch, "_run_reference", counted)

    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attngen.attention(q.sin(), k, v, variant="causal").cos()

    ours, theirs = inputs(requires_grad=True), inputs(requires_grad=True)
    checkpointed(block, *ours, policy=policy).sum().backward()
    assert forwards.count(False) == runs
    block(*theirs).sum().backward()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize(("policy", "runs"), [(CheckpointPolicy.MUST_SAVE, 1), (CheckpointPolicy.PREFER_RECOMPUTE, 2)])
def test_a_selective_checkpoint_keeps_what_a_kernel_computed(
    gpu: GradientDriver, policy: CheckpointPolicy, runs: int
) -> None:
    build()

    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attngen.attention(q * 1, k, v, variant="causal").float().cos()

    ours = leaves()
    checkpointed(block, *ours, policy=policy).sum().backward()
    assert sorted(gpu.launches) == sorted(["forward"] * runs + ["preprocess", "dkdv", "dq"])
    theirs = leaves()
    block(*theirs).sum().backward()
    close([t.grad for t in ours if t.grad is not None], [t.grad for t in theirs if t.grad is not None])


def test_calls_of_each_form_are_one_operator() -> None:
    q, k, v = inputs()
    starts = torch.tensor([0, 4, 9], dtype=torch.int32)
    table, used = torch.tensor([[0], [1]], dtype=torch.int32), torch.tensor([9, 5], dtype=torch.int32)
    packed, packing = (q[0], k[0], v[0]), (starts, starts, 5, 5)
    calls: dict[str, Callable[[], Any]] = {
        "attngen_variants.causal": lambda: attngen.attention(q, k, v, variant="causal", return_lse=True),
        "attngen_variants.sliding_window": lambda: attngen.attention(q, k, v, variant="sliding_window", window=3),
        "attngen_variants.causal__varlen": lambda: attngen.attention_varlen(*packed, *packing, variant="causal"),
        "attngen_variants.causal__paged": lambda: attngen.attention_paged(q, k, v, table, used),
        "attngen_variants.causal__paged_out": lambda: attngen.attention_paged(
            q, k, v, table, used, out=torch.empty_like(q)
        ),
        "attngen.kv__append": lambda: attngen.append_kv(q, q, torch.zeros_like(q), torch.zeros_like(q), used * 0),
    }
    for name, call in calls.items():
        with Seen() as seen:
            out = call()
        assert seen.own == [name]
        torch.testing.assert_close(out, call())
    with Seen() as seen:
        attngen.quantize(q, k, v)
    assert seen.own == ["attngen.qkv__quantize"]


def test_variants_that_are_values_are_operators_too() -> None:
    given = inputs()
    for chosen in (preset("causal"), attngen.variant("q_pos >= kv", name="mine")):
        with Seen() as seen:
            out = attngen.attention(*given, variant=chosen)
        assert len(seen.own) == 1
        torch.testing.assert_close(out, attngen.attention(*given, variant="causal"))


def test_a_drop_in_is_an_operator() -> None:
    q, k, v = (t.transpose(1, 2) for t in inputs())
    with sdpa(backend="reference") as routed, Seen() as seen:
        torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    assert routed.routed == len(seen.own) == 1


def test_calls_that_an_operator_cannot_express_still_work() -> None:
    """Second derivatives, those of tensors that no spec declares, tangents, transforms, and pages."""
    q, k, v = inputs(requires_grad=True)
    bias = torch.randn(4, 9, 9, requires_grad=True)
    biased = variant("biased", None, score="s + bias[h, q, kv]",
                     tensors=[Declared("bias", "fp32", ("h", "seqlen_q", "seqlen_k"))])  # fmt: skip
    table, used = torch.tensor([[0], [1]], dtype=torch.int32), torch.tensor([9, 5], dtype=torch.int32)

    def penalty() -> Tensor:
        (first,) = torch.autograd.grad(
            attngen.attention(q, k, v, variant="causal").square().sum(), q, create_graph=True
        )
        return torch.autograd.grad(first.square().sum(), k)[0]

    def undeclared() -> Tensor:
        return torch.autograd.grad(attngen.attention(q, k, v, variant=biased, bias=bias).square().sum(), bias)[0]

    def tangent() -> Any:
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(q.detach(), torch.ones_like(q))
            return forward_ad.unpack_dual(attngen.attention(dual, k, v, variant="causal")).tangent

    def mapped() -> Any:
        return torch.func.vmap(lambda q: attngen.attention(q, k, v, variant="causal"))(q.expand(3, *q.shape))

    def paged() -> Tensor:
        return torch.autograd.grad(attngen.attention_paged(q, k, v, table, used).square().sum(), k)[0]

    for call in (penalty, undeclared, tangent, mapped, paged):
        with Seen() as seen:
            out = call()
        assert seen.names
        torch.testing.assert_close(out, call())


def test_float64_stays_float64() -> None:
    given = inputs(dtype=torch.float64)
    with Seen() as seen:
        results = attngen.attention(*given, variant="causal", return_lse=True)
    assert seen.own == ["attngen_variants.causal"]
    torch.testing.assert_close(results, attngen.attention(*given, variant="causal", return_lse=True), rtol=0, atol=0)


def test_dropout_is_drawn_before_the_operator() -> None:
    chosen, given = variant("dropped", "q_pos >= kv", dropout=True), inputs()
    torch.manual_seed(7)
    wanted = attngen.attention(*given, variant=chosen, dropout_p=0.5)
    torch.manual_seed(7)
    with Seen() as seen:
        out = attngen.attention(*given, variant=chosen, dropout_p=0.5)
    assert len(seen.own) == 1
    torch.testing.assert_close(out, wanted)


@pytest.mark.parametrize("change", [{"window": "a"}, {"window": 2.5}, {"windw": 3}, {}, {"window": 3, "layout": "x"}])
def test_errors_are_those_of_other_calls(change: dict[str, Any]) -> None:
    told = []
    for mode in (Seen(), torch.no_grad()):
        with mode, pytest.raises(CallError) as error:
            attngen.attention(*inputs(), variant="sliding_window", **change)
        told.append(str(error.value))
    assert told[0] == told[1]


def test_flops_are_counted() -> None:
    """All pairs of queries and keys, as torch counts its own attention."""
    q, k, v = inputs(requires_grad=True)
    starts = torch.tensor([0, 4, 9], dtype=torch.int32)
    with FlopCounterMode(display=False) as counter:
        out = attngen.attention(q, k, v, variant="causal")
        assert counter.get_total_flops() == 2 * (2 * 4 * 9 * 9) * (8 + 8)
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
        assert counter.get_total_flops() == 2 * (2 * 4 * 9 * 9) * (3 * 8 + 2 * 8)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        attngen.attention_varlen(q[0], k[0], v[0], starts, starts, 5, 5, variant="causal")
        assert counter.get_total_flops() == 2 * 4 * (4 * 4 + 5 * 5) * (8 + 8)
    table, used = torch.tensor([[0], [1]], dtype=torch.int32), torch.tensor([9, 5], dtype=torch.int32)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        attngen.attention_paged(q, k, v, table, used)
        assert counter.get_total_flops() == 2 * 4 * 9 * (9 + 5) * (8 + 8)
