"""Dropout: kernels drop exactly what the reference drops; rates as SDPA's; graphs, programs and checkpoints."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import attngen
from attngen.build.pipeline import Prepared, plans
from attngen.lab.verify.gpu import try_pinned
from attngen.runtime.registry.lookup import Package, package_of_kernels
from attngen.schema import load_spec
from tests.gpu.family import Kernels, in_graph, known, rare, rendered, same, some_of

SPEC = Path(__file__).with_name("dropout.yaml")
PACKAGE = "attngen_gpu_dropout"
_PLANNED = {plan.name: (spec, plan) for spec, plan in plans(load_spec(SPEC))}
#: Near-duplicates, which only ``-m exhaustive`` compiles and runs.
LEFT_OUT = rare(
    {name: plan for name, (_, plan) in _PLANNED.items()},
    lambda name: "_bf16_d64_everything_varlen_" in name,  # of ``test_a_varlen_step``
)
FORWARDS = [name for name, (_, plan) in _PLANNED.items() if plan.direction == "forward"]
BACKWARDS = [name for name, (_, plan) in _PLANNED.items() if plan.direction == "backward"]
BACKENDS = ("triton", "cuda")


def to_build() -> list[Prepared]:
    return list(rendered(some_of(_PLANNED, LEFT_OUT)).values())


@known
def kernels() -> tuple[Kernels, Package]:
    """Return all kernels by their names in the plan, and make the package known."""
    by_label = Kernels(rendered(some_of(_PLANNED, LEFT_OUT)))
    return by_label, package_of_kernels(list(by_label.values()), "tests/gpu")


@pytest.mark.parametrize("name", FORWARDS)
def test_forwards_drop_what_the_reference_drops(name: str) -> None:
    kernel = kernels()[name]

    assert try_pinned(kernel, torch.device("cuda"), 70_000, small=False).problems == ()


@pytest.mark.parametrize("name", BACKWARDS)
def test_backwards_drop_the_same(name: str) -> None:
    kernel = kernels()[name]

    attempt = try_pinned(kernel, torch.device("cuda"), 71_000, small=False)
    assert attempt.problems == ()
    assert not [result.skipped for result in attempt.results if result.skipped]


# --- through the library ------------------------------------------------------------------------------------


def leaves(s: int = 200, keys: int = 260) -> list[Tensor]:
    kernels()
    torch.manual_seed(1)
    shapes = ((2, s, 4, 64), (2, keys, 2, 64), (2, keys, 2, 64))
    return [torch.randn(shape, device="cuda").bfloat16().requires_grad_() for shape in shapes]


def attention(*tensors: Tensor, variant: str = "causal_dropout", p: float = 0.3, **options: Any) -> Any:
    return attngen.attention(*tensors, variant=variant, package=PACKAGE, dropout_p=p, **options)


def close(ours: Any, theirs: Any, tolerance: float = 2e-2) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert float((a.double() - b.double()).abs().max()) <= tolerance * float(b.double().abs().max() + 1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_rates_are_those_of_sdpa(p: float, backend: str) -> None:
    """Equal logits and values of 1: the output counts what is kept, and its spread is that of as many coins."""
    kernels()
    keys = 1024
    q, k = (torch.zeros(2, n, 4, 64, device="cuda", dtype=torch.bfloat16) for n in (2048, keys))
    v = torch.ones_like(k)
    ours = attention(q, k, v, variant="full_dropout", p=p, backend=backend).float()[..., 0]
    theirs = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), dropout_p=p
    ).float()[..., 0]
    spread = math.sqrt(p / (1 - p) / keys)
    assert abs(float(ours.mean()) - 1) <= 5 * spread / math.sqrt(ours.numel()) + 2e-3  # and the rounding of outputs
    assert float(ours.std()) == pytest.approx(spread, rel=0.1)
    # SDPA's kernels may round the rate to a multiple of 1/256
    assert float(theirs.mean()) == pytest.approx(float(ours.mean()), rel=3e-2)
    assert float(theirs.std()) == pytest.approx(float(ours.std()), rel=0.1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_training_matches_the_reference_with_one_state(backend: str) -> None:
    inputs = leaves()
    state = torch.tensor([-5_000_000_000_000, 2**40 + 3], device="cuda")

    def loss(backend: str) -> Tensor:
        out, lse = attention(*inputs, rng_state=state, return_lse=True, backend=backend)
        return out.float().square().sum() + torch.where(lse.isinf(), 0.0, lse).sin().sum()

    gradients, wanted = (torch.autograd.grad(loss(b), inputs) for b in (backend, "reference"))
    close(gradients, wanted)
    assert same(gradients, torch.autograd.grad(loss(backend), inputs))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rate_of_zero_drops_nothing(backend: str) -> None:
    q, k, v = (t.detach() for t in leaves())
    out = attention(q, k, v, p=0.0, backend=backend, rng_state=torch.tensor([1, 2], device="cuda"))
    close([out], [attention(q, k, v, p=0.0, backend="reference")], 1e-2)


def test_a_varlen_step() -> None:
    kernels()
    torch.manual_seed(4)
    shapes = ((300, 4, 64), (400, 2, 64), (400, 2, 64))
    q, k, v = (torch.randn(shape, device="cuda").bfloat16().requires_grad_() for shape in shapes)
    slope = (torch.rand(4, device="cuda") / 50).requires_grad_()
    sinks = torch.randn(4, device="cuda").requires_grad_()
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([0, 100, 100, 290], [0, 50, 70, 380]))
    state = torch.tensor([11, 12], device="cuda")

    def loss(**options: Any) -> Tensor:
        out = attngen.attention_varlen(
            q, k, v, cu_q, cu_k, 190, 310, variant="everything", window=150, slope=slope, sinks=sinks, dropout_p=0.25,
            rng_state=state, package=PACKAGE, **options,
        )  # fmt: skip
        return out[:290].float().square().sum()

    inputs = (q, k, v, slope, sinks)
    close(torch.autograd.grad(loss(), inputs), torch.autograd.grad(loss(backend="reference"), inputs))


def test_numbers_are_drawn_from_torchs_generator() -> None:
    q, k, v = (t.detach() for t in leaves())
    torch.manual_seed(8)
    first, second = attention(q, k, v), attention(q, k, v)
    torch.manual_seed(8)
    assert torch.equal(attention(q, k, v), first)
    assert not torch.equal(first, second)


def test_activation_checkpointing_drops_the_same_again() -> None:
    inputs = leaves()
    torch.manual_seed(6)
    plain = torch.autograd.grad(attention(*inputs).float().square().sum(), inputs)
    torch.manual_seed(6)
    out = checkpoint(lambda q, k, v: attention(q, k, v), *inputs, use_reentrant=False)
    assert same(plain, torch.autograd.grad(out.float().square().sum(), inputs))


def test_replays_of_a_graph_draw_again_and_their_gradients_agree() -> None:
    q, k, v = leaves()
    above = torch.randn(2, 200, 4, 64, device="cuda").bfloat16()

    def step() -> tuple[Tensor, Tensor]:
        out = attention(q, k, v)
        return out, torch.autograd.grad(out, v, above)[0]

    graph, (out, dv) = in_graph(step)
    seen = []
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        seen.append((out.clone(), dv.clone()))
        # out is linear in v: <dO, O> = <dV, V>, for each KV head of each sequence, if both dropped the same
        left = (above.double() * out.double()).sum(dim=(1, 3)).view(2, 2, 2).sum(-1)
        right = (dv.double() * v.detach().double()).sum(dim=(1, 3))
        torch.testing.assert_close(left, right, rtol=3e-2, atol=3e-2 * float(left.abs().max()))
    assert not torch.equal(seen[0][0], seen[1][0])
    assert not torch.equal(seen[1][1], seen[2][1])


@pytest.mark.parametrize("compiled_at_call", [False, True])
def test_each_replay_of_a_training_step_has_gradients_of_its_own_pairs(compiled_at_call: bool) -> None:
    """With v the identity, the output shows which pairs were kept; the first step runs on the default stream."""
    rows = 64
    q, k, _ = (t[:, :rows].detach().repeat(1, 1, 4 // t.shape[2], 1).requires_grad_() for t in leaves())
    v = torch.eye(rows, device="cuda").bfloat16()[None, :, None].repeat(2, 1, 4, 1).requires_grad_()
    above = torch.randn_like(q)
    own: dict[str, Any] = {"variant": "causal_dropout"}
    if compiled_at_call:
        own = {"variant": attngen.variant("q_pos >= kv", dropout=True, name="dropped_in_graphs"), "package": None}

    def step() -> tuple[Tensor, ...]:
        out = attngen.attention(q, k, v, dropout_p=0.5, **{"package": PACKAGE, **own})
        return out, *torch.autograd.grad(out, (q, k, v), above)

    with attngen.jit(compiled_at_call):
        step()
        graph, (out, *gradients) = in_graph(step)
    seen = set()
    hidden = torch.ones(rows, rows, dtype=torch.bool, device="cuda").triu(1)
    for _ in range(5):
        graph.replay()
        torch.cuda.synchronize()
        kept = out.double() > 0
        seen.add(kept.cpu().numpy().tobytes())
        wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
        scores = torch.einsum("bqhd,bkhd->bhqk", *wide[:2]) / math.sqrt(64)
        p = torch.softmax(scores.masked_fill(hidden, -math.inf), -1) * kept.transpose(1, 2) * 2
        exact = torch.autograd.grad(torch.einsum("bhqk,bkhd->bqhd", p, wide[2]), wide, above.double())
        for one, other in zip(gradients, exact, strict=True):
            assert float((one.double() - other).norm()) <= 2e-2 * float(other.norm())
    assert len(seen) == 5


def test_a_program_is_compiled_whole() -> None:
    inputs = leaves()
    state = torch.tensor([21, 22], device="cuda")

    def loss(q: Tensor, k: Tensor, v: Tensor, state: Tensor | None) -> Tensor:
        return attention(q * 2, k, v, rng_state=state).float().square().sum()

    compiled = torch.compile(loss, fullgraph=True)
    ours, theirs = (torch.autograd.grad(f(*inputs, state), inputs) for f in (compiled, loss))
    close(ours, theirs, 1e-2)
    assert float(compiled(*inputs, None)) != float(compiled(*inputs, None))
