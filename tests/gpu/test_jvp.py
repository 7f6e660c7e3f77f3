"""Outputs and tangents by one kernel, beside dense attention in float64, and a step of MeanFlow."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import jvp

import attngen
from attngen.build.pipeline import Prepared, compile_kernels
from attngen.lab.verify.gpu import try_pinned
from attngen.plan import plan
from attngen.runtime.kernels.module import read_kernel
from attngen.runtime.registry.lookup import registry
from attngen.schema import expand, load_spec_text
from attngen.store import Store
from tests.gpu.family import for_this_gpu
from tests.runtime.test_transforms import causal, dense

SPEC = """
schema: 1
package: derived
arch: [sm90a]
kernels:
  - {variant: [causal, full], head_dim: [64, 128], passes: jvp}
  - {variant: [softcap_window, causal_sink, allowed], head_dim: 64, dtype: fp16, passes: jvp}
  - {variant: causal, head_dim: [{qk: 96, v: 80}, 256], layout: varlen, passes: jvp}
  - {variant: causal, head_dim: 64, dtype: fp32, loads: pointer, passes: jvp}
"""


def to_build() -> list[Prepared]:
    """Kernels of this module."""
    return [Prepared(spec, plan(spec)) for spec in expand(load_spec_text(SPEC, "derived.yaml"))]


@pytest.mark.parametrize("kernel", to_build(), ids=lambda one: one.plan.name)
def test_contract(kernel: Prepared) -> None:
    built, failures = compile_kernels([for_this_gpu(kernel)], store=Store(), jobs=1)
    assert not failures
    (one,) = built.values()
    trial = try_pinned(read_kernel(Store().path(one.key)), torch.device("cuda", 0), 3, small=False)
    assert trial.problems == ()


@pytest.fixture
def _called(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache in which the kernels that calls lack are compiled, and no tangent by plain torch."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(), torch.device("cuda"):
        patch.setenv("ATTNGEN_CACHE", str(tmp_path_factory.getbasetemp() / "jvp"))
        warnings.filterwarnings("error", message="the tangent is computed by plain torch")
        registry.clear()
        with attngen.jit():
            yield
    registry.clear()


def near(actual: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(actual.double(), wanted, rtol=0, atol=0.03 * float(wanted.abs().max()))


@pytest.mark.usefixtures("_called")
def test_a_step_of_mean_flow() -> None:
    """Gradients through the output alone, whose target holds the tangent."""
    torch.manual_seed(5)
    x, moved = (torch.randn(2, 300, 4, 64).to(torch.bfloat16) for _ in range(2))
    weights = [(torch.randn(64, 64) / 8).to(torch.bfloat16).requires_grad_() for _ in range(3)]
    doubles = [w.detach().double().requires_grad_() for w in weights]

    def step(attend: Any, x: Tensor, moved: Tensor, weights: list[Tensor]) -> tuple[Tensor, Tensor, list[Tensor]]:
        u, dudt = jvp(lambda x: attend(*(x @ w for w in weights)), (x,), (moved,))
        loss = (u - dudt.detach()).square().mean()
        return u, dudt, list(torch.autograd.grad(loss, weights))

    ours = step(causal, x, moved, weights)
    theirs = step(dense, x.double(), moved.double(), doubles)
    near(ours[0], theirs[0])
    near(ours[1], theirs[1])
    for one, other in zip(ours[2], theirs[2], strict=True):
        near(one, other)


@pytest.mark.usefixtures("_called")
def test_a_tangent_of_queries_alone_and_of_expanded_keys() -> None:
    torch.manual_seed(6)
    q, dq = (torch.randn(1, 333, 4, 64).to(torch.bfloat16) for _ in range(2))
    k, v, dv = (torch.randn(1, 1, 2, 64).to(torch.bfloat16).expand(1, 333, 2, 64) for _ in range(3))
    k, v, dv = (t + 0.1 * torch.randn(1, 333, 2, 64).to(torch.bfloat16) for t in (k, v, dv))
    wanted = jvp(lambda q: dense(q, k.double(), v.double()), (q.double(),), (dq.double(),))
    for actual, other in zip(jvp(lambda q: causal(q, k, v), (q,), (dq,)), wanted, strict=True):
        near(actual, other)
    ones = torch.ones(1, 1, 2, 64, dtype=torch.bfloat16).expand_as(v)
    wanted = jvp(lambda v: dense(q.double(), k.double(), v), (v.double(),), (ones.double(),))
    for actual, other in zip(jvp(lambda v: causal(q, k, v), (v,), (ones,)), wanted, strict=True):
        near(actual, other)


@pytest.mark.usefixtures("_called")
def test_packed_sequences() -> None:
    torch.manual_seed(7)
    lengths = (130, 1, 77)
    starts = torch.tensor([0, 130, 131, 208], dtype=torch.int32)
    given, moved = (
        tuple(torch.randn(sum(lengths), heads, 64).to(torch.bfloat16) for heads in (4, 2, 2)) for _ in range(2)
    )

    def packed(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return attngen.attention_varlen(q, k, v, starts, starts, 130, 130, variant="causal", return_lse=True)

    (out, lse), (dout, dlse) = jvp(packed, given, moved)
    assert torch.isfinite(lse).all()
    assert torch.isfinite(dlse).all()
    for one in zip(*(t.split(lengths) for t in (*given, *moved, out, dout)), strict=True):
        *inputs, actual, tangent = (t[None].double() for t in one)
        wanted = jvp(dense, tuple(inputs[:3]), tuple(inputs[3:]))
        near(actual, wanted[0])
        near(tangent, wanted[1])
