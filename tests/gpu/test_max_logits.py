"""Largest logits: every kernel of ``max_logits.yaml`` gives them, and calls through the library return them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import attngen
from attngen.build.pipeline import Prepared, plans
from attngen.lab.verify.gpu import try_pinned
from attngen.runtime.registry.lookup import Package, package_of_kernels
from attngen.schema import load_spec
from tests.gpu.family import Kernels, known, rendered

PACKAGE = "attngen_gpu_max_logits"
_PLANNED = {
    plan.name: (spec, plan)
    for spec, plan in plans(load_spec(Path(__file__).with_name("max_logits.yaml")))
    if plan.variant.max_logits
}


def to_build() -> list[Prepared]:
    return list(rendered(_PLANNED).values())


@known
def kernels() -> tuple[Kernels, Package]:
    """Return all kernels by their names in the plan, and make the package known."""
    by_label = Kernels(rendered(_PLANNED))
    return by_label, package_of_kernels(list(by_label.values()), "tests/gpu")


@pytest.mark.parametrize("name", _PLANNED)
def test_kernels_keep_the_contract(name: str) -> None:
    assert try_pinned(kernels()[name], torch.device("cuda"), 61_000, small=False).problems == ()


@pytest.mark.parametrize("causal", [False, True])
def test_calls_return_the_largest_of_each_head(causal: bool) -> None:
    kernels()
    q, k, v = (torch.randn(2, 700, heads, 128, device="cuda", dtype=torch.bfloat16) for heads in (8, 2, 2))
    given = {"variant": "causal" if causal else "full", "return_max_logits": True}
    out, lse, largest = attngen.attention(q, k, v, **given, return_lse=True)
    wanted = attngen.attention(q.double(), k.double(), v.double(), **given, backend="reference")
    torch.testing.assert_close(largest.double(), wanted[1], rtol=1e-5, atol=1e-5)
    compiled = torch.compile(lambda *tensors: attngen.attention(*tensors, **given), fullgraph=True)
    for again in (attngen.attention(q, k, v, **given), compiled(q, k, v)):
        assert torch.equal(again[0], out)
        assert torch.equal(again[1], largest)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attngen.attention(q, k, v, **given)
    graph.replay()
    assert torch.equal(captured[1], largest)
    assert lse.shape == (2, 8, 700)
