"""Sinks: every kernel of ``sinks.yaml`` keeps its contract, with sinks of any size; training through the library."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen.build.pipeline import Prepared, plans
from attngen.inspect.cases import Case
from attngen.inspect.contract import deviation, expected
from attngen.lab.verify.gpu import try_pinned
from attngen.lab.verify.inputs import Element, Inputs, make_inputs
from attngen.lab.verify.poison import poisoned
from attngen.lab.verify.trial import Trial
from attngen.runtime.launch.pinned import Pinned
from attngen.runtime.registry.lookup import Package, package_of_kernels
from attngen.schema import load_spec
from tests.gpu.family import Kernels, in_graph, known, rare, rendered, same, some_of

SPEC = Path(__file__).with_name("sinks.yaml")
PACKAGE = "attngen_gpu_sinks"
_PLANNED = {plan.name: (spec, plan) for spec, plan in plans(load_spec(SPEC))}
#: Near-duplicates, which only ``-m exhaustive`` compiles and runs.
LEFT_OUT = rare(
    {name: plan for name, (_, plan) in _PLANNED.items()},
    lambda name: "_bf16_d64_by_sequence_varlen_" in name,  # of ``test_a_varlen_call_with_sinks_of_its_sequences``
)
FORWARDS = [name for name, (_, plan) in _PLANNED.items() if plan.direction == "forward"]
BACKWARDS = [name for name, (_, plan) in _PLANNED.items() if plan.direction == "backward"]


def to_build() -> list[Prepared]:
    return list(rendered(some_of(_PLANNED, LEFT_OUT)).values())


@known
def kernels() -> tuple[Kernels, Package]:
    """Return all kernels by their names in the plan, and make the package known."""
    by_label = Kernels(rendered(some_of(_PLANNED, LEFT_OUT)))
    return by_label, package_of_kernels(list(by_label.values()), "tests/gpu")


@pytest.mark.parametrize("name", FORWARDS)
def test_forwards_keep_the_contract(name: str) -> None:
    kernel = kernels()[name]

    attempt = try_pinned(kernel, torch.device("cuda"), 60_000, small=False)
    assert attempt.problems == ()
    assert attempt.tally.dead_rows > 0


@cache
def trial(name: str) -> Trial:
    kernel = kernels()[name]

    return try_pinned(kernel, torch.device("cuda"), 61_000, small=False)


@pytest.mark.parametrize("name", BACKWARDS)
def test_backwards_keep_the_contract(name: str) -> None:
    attempt = trial(name)
    assert attempt.problems == ()
    assert not [result.skipped for result in attempt.results if result.skipped]
    assert attempt.tally.dead_rows > 0


@pytest.mark.parametrize("size", [0.0, 40.0, -40.0, 1e4, -1e4, 1e30, -1e30, -math.inf])
@pytest.mark.parametrize("name", [name for name in FORWARDS if "causal_sink" in name])
def test_sinks_of_any_size(name: str, size: float) -> None:
    """Far above all logits, far below, and none; the first rows see no key."""
    kernel = kernels()[name]
    lengths = ((140,) * 2, (90,) * 2)
    case = Case("any", *lengths, heads=8, kv_heads=2)
    element = Element(kernel.dtype, kernel.head_dim_qk, kernel.head_dim_v)
    made = make_inputs(kernel.variant, case, kernel.layout, element, "cuda", 3)
    sinks = size * (1 + torch.arange(8, device="cuda") / 64) if math.isfinite(size) else torch.full((8,), size).cuda()
    inputs = Inputs(made.q, made.k, made.v, made.packing, None, {**made.arguments, "sinks": sinks.float()})
    call = inputs.bind(kernel.variant)
    wanted = expected(call, made.q, made.k, made.v)
    memory = poisoned(kernel, call, made.q, made.k, made.v)
    Pinned(kernel, call, memory.buffers)()
    assert memory.buffers.lse is not None
    errors = deviation(call, memory.buffers.out, memory.buffers.lse, wanted)
    assert errors.wrong + memory.overrun() == ()
    assert errors.max_error <= errors.max_allowed
    assert errors.lse_error <= errors.lse_allowed
    assert errors.dead_rows == 2 * 8 * 50


@pytest.mark.parametrize("group", [1, 2, 4, 8, 16, 64])
@pytest.mark.parametrize("name", [name for name in FORWARDS if name.endswith("pack")])
def test_packed_rows_have_the_sinks_of_their_heads(name: str, group: int) -> None:
    kernel = kernels()[name]
    kv_heads = 2 if group < 16 else 1
    for rows in (1, 3, 17, 129):
        if kernel.layout == "varlen":
            shapes = ((rows, 1, 0, 5), (300, 139, 20, 3), (260, 0, 0, 1))
        else:
            shapes = ((rows,) * 3, (300,) * 3, (300, 77, 0))
        case = Case("few", shapes[0], shapes[1], heads=group * kv_heads, kv_heads=kv_heads, used=shapes[2])
        element = Element(kernel.dtype, kernel.head_dim_qk, kernel.head_dim_v)
        inputs = make_inputs(kernel.variant, case, kernel.layout, element, "cuda", rows)
        call = inputs.bind(kernel.variant)
        memory = poisoned(kernel, call, inputs.q, inputs.k, inputs.v)
        Pinned(kernel, call, memory.buffers)()
        assert memory.buffers.lse is not None
        wanted = expected(call, inputs.q, inputs.k, inputs.v)
        errors = deviation(call, memory.buffers.out, memory.buffers.lse, wanted)
        assert errors.ok, errors


# --- through the library ------------------------------------------------------------------------------------


def leaves() -> list[Tensor]:
    kernels()
    torch.manual_seed(2)
    shapes = ((2, 230, 4, 64), (2, 180, 2, 64), (2, 180, 2, 64))
    tensors = [torch.randn(shape, device="cuda").bfloat16() for shape in shapes]
    return [tensor.requires_grad_() for tensor in (*tensors, torch.randn(4, device="cuda"))]


def attention(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, **options: Any) -> Any:
    return attngen.attention(q, k, v, variant="causal_sink", sinks=sinks, package=PACKAGE, **options)


def close(ours: Any, theirs: Any, tolerance: float = 2e-2) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert float((a.double() - b.double()).abs().max()) <= tolerance * float(b.double().abs().max() + 1e-6)


@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_autograd_and_the_same_bits(backend: str) -> None:
    """Fifty queries see no key: theirs is a log-sum-exp that is the sink, and has a gradient."""
    inputs = leaves()

    def loss(backend: str) -> Tensor:
        out, lse = attention(*inputs, return_lse=True, backend=backend)
        return out.float().square().sum() + lse.sin().sum()

    wanted = torch.autograd.grad(loss("reference"), inputs)
    torch.use_deterministic_algorithms(True)
    try:
        first, again = (torch.autograd.grad(loss(backend), inputs) for _ in "ab")
    finally:
        torch.use_deterministic_algorithms(False)
    close(first, wanted)
    assert same(first, again)


def test_a_varlen_call_with_sinks_of_its_sequences() -> None:
    kernels()
    torch.manual_seed(4)
    shapes = ((300, 4, 64), (400, 2, 64), (400, 2, 64))
    q, k, v = (torch.randn(shape, device="cuda").bfloat16().requires_grad_() for shape in shapes)
    slope = (torch.rand(4, device="cuda") / 50).requires_grad_()
    table = torch.randn(3, 2, device="cuda").requires_grad_()
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([0, 100, 100, 290], [0, 50, 70, 380]))

    def loss(**options: Any) -> Tensor:
        out, lse = attngen.attention_varlen(
            q, k, v, cu_q, cu_k, 190, 310, variant="by_sequence", slope=slope, table=table, package=PACKAGE,
            return_lse=True, **options,
        )  # fmt: skip
        return out[:290].float().square().sum() + lse[:, :290].cos().sum()

    inputs = (q, k, v, slope, table)
    close(torch.autograd.grad(loss(), inputs), torch.autograd.grad(loss(backend="reference"), inputs))


def test_without_keys_the_sinks_are_what_is_left() -> None:
    q, k, v, sinks = leaves()
    k, v = (t.detach()[:, :0].requires_grad_() for t in (k, v))
    out, lse = attention(q, k, v, sinks, return_lse=True)
    assert not out.any()
    assert torch.equal(lse, sinks[None, :, None].expand_as(lse))
    dq, gradient = torch.autograd.grad(out.float().sum() + 2 * lse.sum(), (q, sinks))
    assert not dq.any()
    torch.testing.assert_close(gradient, torch.full_like(gradient, 2.0 * 2 * 230))


def test_a_program_is_compiled_whole() -> None:
    inputs = leaves()

    def loss(*given: Tensor) -> Tensor:
        return attention(*given).float().square().sum()

    plain = torch.autograd.grad(loss(*inputs), inputs)
    compiled = torch.compile(loss, fullgraph=True)
    close(torch.autograd.grad(compiled(*inputs), inputs), plain, 1e-2)


def test_a_step_is_captured() -> None:
    inputs = leaves()
    above = torch.randn(2, 230, 4, 64, device="cuda").bfloat16()

    def step() -> tuple[Tensor, ...]:
        return torch.autograd.grad(attention(*inputs), inputs, above)

    graph, captured = in_graph(step)
    with torch.no_grad():
        for tensor in inputs:
            tensor.copy_(torch.randn_like(tensor))
    graph.replay()
    torch.cuda.synchronize()
    assert same(captured, step())
