"""Weights that are sigmoids: every kernel of ``weights.yaml`` keeps its contract; training through the library."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

import attngen
from attngen.build.pipeline import Prepared, plans
from attngen.errors import CallError
from attngen.lab.verify.gpu import try_pinned
from attngen.lab.verify.trial import Trial
from attngen.runtime.registry.lookup import Package, package_of_kernels
from attngen.schema import load_spec
from tests.gpu.family import Kernels, in_graph, known, rendered

SPEC = Path(__file__).with_name("weights.yaml")
PACKAGE = "attngen_gpu_weights"
_PLANNED = {
    plan.name: (spec, plan) for spec, plan in plans(load_spec(SPEC)) if plan.direction in ("forward", "backward")
}
FORWARDS = [name for name, (_, plan) in _PLANNED.items() if plan.direction == "forward"]
BACKWARDS = [name for name, (_, plan) in _PLANNED.items() if plan.direction == "backward"]


def to_build() -> list[Prepared]:
    return list(rendered(_PLANNED).values())


@known
def kernels() -> tuple[Kernels, Package]:
    """Return all kernels by their names in the plan, and make the package known."""
    by_label = Kernels(rendered(_PLANNED))
    return by_label, package_of_kernels(list(by_label.values()), "tests/gpu")


@cache
def trial(name: str) -> Trial:
    return try_pinned(kernels()[name], torch.device("cuda"), 62_000, small=False)


@pytest.mark.parametrize("name", FORWARDS + BACKWARDS)
def test_kernels_keep_the_contract(name: str) -> None:
    attempt = trial(name)
    assert attempt.problems == ()
    assert not [result.skipped for result in attempt.results if result.skipped]


@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_autograd_and_the_same_bits(backend: str) -> None:
    kernels()
    torch.manual_seed(2)
    shapes = ((2, 230, 4, 64), (2, 180, 2, 64), (2, 180, 2, 64))
    tensors = [torch.randn(shape, device="cuda").bfloat16() for shape in shapes]
    bias = torch.full((4,), -5.0, device="cuda")
    leaves = [tensor.requires_grad_() for tensor in (*tensors, bias)]

    def results(backend: str) -> list[torch.Tensor]:
        q, k, v, bias = leaves
        out = attngen.attention(q, k, v, variant="learned_sigmoid", bias=bias, package=PACKAGE, backend=backend)
        return [out, *torch.autograd.grad(out, leaves, torch.ones_like(out))]

    ours, again, theirs = results(backend), results(backend), results("reference")
    for one, exact in zip(ours, theirs, strict=True):
        assert float((one - exact).abs().max()) <= 2e-2 * float(exact.abs().max() + 1e-6)
    assert all(map(torch.equal, ours[:4], again[:4]))  # that of the bias is accumulated in no fixed order


def test_no_log_sum_exp_and_graphs() -> None:
    kernels()
    q = torch.randn(1, 256, 2, 64, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(CallError, match="no log-sum-exp"):
        attngen.attention(q, q, q, variant="causal_sigmoid", package=PACKAGE, return_lse=True)
    out = attngen.attention(q, q, q, variant="causal_sigmoid", package=PACKAGE)
    graph, captured = in_graph(lambda: attngen.attention(q, q, q, variant="causal_sigmoid", package=PACKAGE))
    graph.replay()
    assert torch.equal(out, captured)
