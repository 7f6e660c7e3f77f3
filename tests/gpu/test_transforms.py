"""Transforms of torch.func, tangents and second derivatives of kernels in bf16, beside dense attention in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, jvp, vjp, vmap
from torch.utils._pytree import tree_leaves

import attngen
from attngen.runtime.registry.lookup import registry
from tests.runtime.test_transforms import DERIVATIVES, causal, dense


@pytest.fixture(scope="module", autouse=True)
def _compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache for this file, in which the kernels that calls lack are compiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATTNGEN_CACHE", str(tmp_path_factory.mktemp("cache")))
        registry.clear()
        with attngen.jit():
            yield
    registry.clear()


def rounded(batch: int = 2, seqlen: int = 150) -> list[Tensor]:
    torch.manual_seed(2)
    return [torch.randn(batch, seqlen, heads, 64, device="cuda").to(torch.bfloat16) for heads in (4, 2, 2)]


def near(actual: Any, wanted: Any, share: float = 0.03) -> None:
    for one, other in zip(tree_leaves(actual), tree_leaves(wanted), strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(one.double(), other, rtol=0, atol=share * float(other.abs().max()))


@pytest.fixture(autouse=True)
def _on_the_card() -> Iterator[None]:
    """Dense attention makes its positions on the default device."""
    with torch.device("cuda"):
        yield


@pytest.mark.parametrize("name", ["grad", "vjp", "jvp", "for each sample"])
def test_derivatives(name: str) -> None:
    given = rounded()
    near(DERIVATIVES[name](causal, given), DERIVATIVES[name](dense, [t.double() for t in given]))


def test_a_mapped_dimension_and_its_gradients() -> None:
    given = [torch.stack([t, t.flip(0)], 1) for t in rounded()]
    doubles = [t.double() for t in given]
    mapped: Callable[..., Tensor] = vmap(causal, (1, 1, 1))
    plain: Callable[..., Tensor] = vmap(dense, (1, 1, 1))
    near(mapped(*given), plain(*doubles))
    every = (0, 1, 2)
    near(
        grad(lambda *a: mapped(*a).float().sin().sum(), every)(*given),
        grad(lambda *a: plain(*a).sin().sum(), every)(*doubles),
    )


def test_second_derivatives_and_tangents() -> None:
    given = [t.requires_grad_() for t in rounded()]
    doubles = [t.detach().double().requires_grad_() for t in given]

    def twice(function: Callable[..., Tensor], inputs: list[Tensor]) -> Any:
        first = torch.autograd.grad(function(*inputs).sin().sum(), inputs, create_graph=True)
        return torch.autograd.grad(first[0].square().sum() + first[2].sum(), inputs)

    near(twice(causal, given), twice(dense, doubles), 0.05)
    q, k, v = (t.detach() for t in given)
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(causal(forward_ad.make_dual(q, q), k, v)).tangent
    near(tangent, jvp(lambda q: dense(q, k.double(), v.double()), (q.double(),), (q.double(),))[1])


def test_packed_sequences() -> None:
    q, k, v = (t.flatten(0, 1) for t in rounded())
    starts = torch.tensor([0, 150, 300], dtype=torch.int32)
    packed = lambda q, k, v: attngen.attention_varlen(  # noqa: E731
        q, k, v, starts, starts, 150, 150, variant="causal"
    )
    plain = lambda q, k, v: dense(*(t.unflatten(0, (2, 150)) for t in (q, k, v))).flatten(0, 1)  # noqa: E731
    doubles = [t.double() for t in (q, k, v)]
    near(vjp(packed, q, k, v)[1](q), vjp(plain, *doubles)[1](doubles[0]))
    twice = torch.stack([q, q.flip(0)])
    near(vmap(packed, (0, None, None))(twice, k, v), vmap(plain, (0, None, None))(twice.double(), *doubles[1:]))
