"""Programs that torch compiles and graphs that CUDA replays, on kernels with a backward: docs/runtime.md."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import attngen
from attngen.runtime.operations.attention.operators import operators_of
from attngen.runtime.registry.lookup import Package
from tests.gpu.family import same
from tests.gpu.packages import only_package

#: Forward and backward kernels in CUDA.
PACKAGE = "attngen_flash_attn"
HEADS, KV_HEADS, DIM = 4, 2, 64

pytestmark = only_package("flash_attn")


@pytest.fixture(autouse=True)
def _known(only: Package) -> None:
    """Every test of this file runs on these kernels."""
    torch._dynamo.reset()


def inputs_of(batch: int, length: int, *, learns: bool = False) -> list[Tensor]:
    torch.manual_seed(length)
    shapes = [(batch, length, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [torch.randn(shape, device="cuda").bfloat16().requires_grad_(learns) for shape in shapes]


def dense(q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, longest: int) -> Any:
    return attngen.attention(q, k, v, variant="causal", package=PACKAGE)


def packed(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int) -> Any:
    return attngen.attention_varlen(
        q, k, v, starts, starts, longest, longest, variant="window", package=PACKAGE, left=30, right=0
    )


def starts_of(batch: int, length: int) -> Tensor:
    return length * torch.arange(batch + 1, dtype=torch.int32, device="cuda")


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("call", [dense, packed])
def test_lengths_and_batches_that_change_are_compiled_once(call: Any, learns: bool) -> None:
    def program(q: Tensor, *rest: Any) -> Any:
        return call(q * 2, *rest).float().sin()

    compiled = torch.compile(program, fullgraph=True, dynamic=True)
    for turn, (batch, length) in enumerate(((6, 130), (3, 64), (9, 33), (5, 257))):
        inputs = inputs_of(batch, length, learns=learns)
        given = [t.flatten(0, 1) for t in inputs] if call is packed else inputs
        with torch._dynamo.config.patch(error_on_recompile=turn > 0):
            ours = compiled(*given, starts_of(batch, length), length)
        theirs = program(*given, starts_of(batch, length), length)
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
        if learns:
            for one, other in zip(*(torch.autograd.grad(t.sum(), inputs) for t in (ours, theirs)), strict=True):
                assert float((one - other).abs().max()) <= 2e-2 * float(other.abs().max())


def test_dimensions_that_are_marked_dynamic() -> None:
    compiled = torch.compile(dense, fullgraph=True)
    for turn, (batch, length) in enumerate(((6, 130), (3, 64), (9, 33))):
        inputs = inputs_of(batch, length)
        if not turn:
            for tensor in inputs:
                torch._dynamo.mark_dynamic(tensor, 0)
                torch._dynamo.mark_dynamic(tensor, 1)
        with torch._dynamo.config.patch(error_on_recompile=turn > 0):
            assert torch.equal(compiled(*inputs, None, 0), dense(*inputs, None, 0))


@pytest.mark.parametrize("call", [dense, packed])
def test_opcheck(call: Any) -> None:
    inputs = inputs_of(3, 70, learns=True)
    if call is packed:
        namespace, name, signature = operators_of(f"{PACKAGE}/window")
        operator = getattr(getattr(torch.ops, namespace), f"{name}__varlen").default
        flat = [t.detach().flatten(0, 1).requires_grad_() for t in inputs]
        own = [{"left": 30, "right": 0}[scalar] for scalar in signature.scalars]
        given = (*flat, *[starts_of(3, 70)] * 2, 70, 70, *own, None, None, None, "varlen", None)
    else:
        namespace, name, _ = operators_of(f"{PACKAGE}/causal")
        operator = getattr(getattr(torch.ops, namespace), name).default
        given = (*inputs, 0.1, None, None, "bshd", None)
    torch.library.opcheck(operator, given)


def test_reduced_overhead() -> None:
    """Inductor captures the compiled program in CUDA graphs, forward and backward, and replays them."""
    inputs = inputs_of(2, 130, learns=True)

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return dense(q * 2, k, v, None, 0).float().square().mean()

    compiled = torch.compile(program, fullgraph=True, mode="reduce-overhead")
    for turn in range(5):
        with torch.no_grad():
            for tensor in inputs:
                tensor.copy_(torch.randn_like(tensor))
        torch.compiler.cudagraph_mark_step_begin()
        gradients = [gradient.clone() for gradient in torch.autograd.grad(compiled(*inputs), inputs)]
        for one, other in zip(gradients, torch.autograd.grad(program(*inputs), inputs), strict=True):
            assert float((one - other).abs().max()) <= 2e-2 * float(other.abs().max()), turn


def test_a_captured_training_step() -> None:
    """A whole step in a graph, with weights that an optimizer changes: replays go on training as eager steps do."""

    def make() -> tuple[list[Tensor], torch.optim.Optimizer]:
        torch.manual_seed(0)
        weights = [
            torch.nn.Parameter(torch.randn(96, n * DIM, device="cuda") / 10) for n in (HEADS, KV_HEADS, KV_HEADS)
        ]
        return weights, torch.optim.SGD(weights, lr=0.5)

    x = torch.randn(2, 130, 96, device="cuda")

    def step(weights: list[Tensor], optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=False)
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            q, k, v = ((x @ weight).unflatten(-1, (-1, DIM)) for weight in weights)
            out = dense(q, k, v, None, 0)
        out.float().square().mean().backward()
        optimizer.step()

    eager, optimizer = make()
    for weight in eager:
        weight.grad = torch.zeros_like(weight)
    for _ in range(3 + 4):
        step(eager, optimizer)

    captured, optimizer = make()
    for weight in captured:
        weight.grad = torch.zeros_like(weight)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(captured, optimizer)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(captured, optimizer)
    for _ in range(4):
        graph.replay()
    torch.cuda.synchronize()
    for one, other in zip(captured, eager, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_compiled_and_eager_calls_give_the_same_bits() -> None:
    inputs = inputs_of(2, 257)
    out = torch.compile(dense, fullgraph=True)(*inputs, None, 0)
    assert same((out,), (dense(*inputs, None, 0),))


@pytest.mark.parametrize(("policy", "runs"), [(CheckpointPolicy.MUST_SAVE, 1), (CheckpointPolicy.PREFER_RECOMPUTE, 2)])
def test_a_selective_checkpoint_saves_attention(policy: CheckpointPolicy, runs: int) -> None:
    def keep(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        return policy if operator.namespace.startswith("attngen") else CheckpointPolicy.PREFER_RECOMPUTE

    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attngen.attention(q.sin(), k, v, variant="causal", package=PACKAGE).float().cos()

    theirs = inputs_of(2, 300, learns=True)
    block(*theirs).sum().backward()
    ours = inputs_of(2, 300, learns=True)
    contexts = partial(create_selective_checkpoint_contexts, keep)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        checkpoint(block, *ours, use_reentrant=False, context_fn=contexts).sum().backward()
        torch.cuda.synchronize()
    assert sum(event.count for event in seen.key_averages() if event.key.startswith("fwd_")) == runs
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("axis", ["heads", "batch", "queries"])
def test_expanded_tensors(axis: str) -> None:
    """Strides of 0 give what copies give, and gradients that add up over what was expanded."""
    torch.manual_seed(0)
    size = {"heads": (2, 200, 1, DIM), "batch": (1, 200, HEADS, DIM), "queries": (2, 1, HEADS, DIM)}[axis]
    bases = [torch.randn(size, device="cuda").bfloat16() for _ in range(3)]
    if axis == "heads":  # q keeps its own
        bases[0] = torch.randn(2, 200, HEADS, DIM, device="cuda").bfloat16()
    above = torch.randn(2, 200, HEADS, DIM, device="cuda").bfloat16()

    def run(copied: bool) -> list[Tensor]:
        leaves = [one.detach().requires_grad_() for one in bases]
        given = [one.expand(2, 200, HEADS, DIM) for one in leaves]
        out = attngen.attention(
            *((one.contiguous() for one in given) if copied else given), variant="causal", package=PACKAGE
        )
        return [out, *torch.autograd.grad(out, leaves, above)]

    for one, other in zip(run(False), run(True), strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2 * float(other.abs().max()))
