"""NATTEN's functions on kernels, beside attention over coordinates of tokens in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from attngen.integrations.natten import na1d, na2d, na3d
from attngen.integrations.natten.functions import Axis, orders_of
from attngen.runtime.launch.map_cache import kept_maps
from attngen.runtime.registry.lookup import Package
from tests.gpu.packages import no_worse, only_package
from tests.gpu.test_integration_gradients import no_worse_gradients
from tests.integrations.natten.neighbourhoods import Neighbourhood, dense

pytestmark = only_package("natten")

FUNCTIONS: dict[int, Callable[..., Any]] = {1: na1d, 2: na2d, 3: na3d}

CASES = {
    "1d": Neighbourhood((1000,), (129,), (1,), (1,), (False,)),
    "1d, dilated, causal": Neighbourhood((901,), (33,), (5,), (4,), (True,)),
    "2d": Neighbourhood((32, 40), (12, 15), (1, 1), (1, 1), (False, False)),
    "2d, strides of boxes": Neighbourhood((32, 48), (16, 16), (8, 16), (1, 1), (False, False)),
    "2d, dilated, causal": Neighbourhood((31, 45), (9, 13), (4, 1), (2, 3), (True, False)),
    "2d, all": Neighbourhood((20, 30), (20, 30), (1, 1), (1, 1), (False, False)),
    "3d": Neighbourhood((8, 12, 14), (5, 6, 7), (1, 1, 1), (1, 1, 1), (False, False, False)),
    "3d, strides, dilated, causal": Neighbourhood((7, 10, 18), (4, 5, 6), (2, 3, 2), (1, 1, 2), (True, False, False)),
}


def leaves(of: Neighbourhood, dim: int, keys: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    """Random q, k and v of a grid, and keys and values that all queries see."""
    torch.manual_seed(len(of.grid) * dim + keys)
    shapes = [(2, *of.grid, heads, dim) for heads in (4, 2, 2)] + [(2, keys, 2, dim)] * 2
    made = [torch.randn(shape, device="cuda").bfloat16().requires_grad_() for shape in shapes]
    return made[:3], made[3:] if keys else []


def poison(like: Tensor) -> None:
    """Leave NaN in the memory that the next tensors take."""
    for _ in range(4):
        torch.full((4 * like.numel(),), torch.nan, dtype=like.dtype, device=like.device)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients(name: str, dim: int, only: Package) -> None:
    check(CASES[name], *leaves(CASES[name], dim))


@pytest.mark.parametrize("name", ["1d", "2d", "2d, all", "3d, strides, dilated, causal"])
def test_further_keys(name: str, only: Package) -> None:
    check(CASES[name], *leaves(CASES[name], 64, keys=77))


def check(of: Neighbourhood, inputs: Sequence[Tensor], more: Sequence[Tensor]) -> None:
    """Compare three calls: the first makes tile maps, the second adds the bits of partial tiles."""
    own = dict(zip(("additional_keys", "additional_values"), more, strict=bool(more)))
    every = [*inputs, *more]
    wide = [given.detach().double().requires_grad_() for given in every]
    precise, lse_precise = dense(*wide[:3], of, wide[3:])
    plain, _ = dense(*inputs, of, more, compute=torch.bfloat16)
    weights = torch.randn_like(plain)
    exact = torch.autograd.grad(precise, wide, weights.double())
    plain_gradients = torch.autograd.grad(plain, every, weights)
    for _ in range(3):
        poison(inputs[0])
        out, lse = FUNCTIONS[len(of.grid)](*inputs, **of.options, **own, return_lse=True)
        no_worse(out.detach(), plain.detach(), precise.detach())
        torch.testing.assert_close(lse.double(), lse_precise, rtol=1e-3, atol=1e-3)
        poison(inputs[0])
        no_worse_gradients(torch.autograd.grad(out, every, weights), plain_gradients, exact)


@pytest.mark.parametrize("name", ["2d, strides of boxes", "3d", "3d, strides, dilated, causal"])
def test_kernels_visit_the_tiles_that_were_counted(name: str, only: Package) -> None:
    of = CASES[name]
    missing = [Axis(1, 1, 1, 1, causal=False)] * (3 - len(of.grid))
    first, second, third = [*missing, *(Axis(*axis) for axis in zip(*of, strict=True))]
    boxes = orders_of((first, second, third)).boxes
    inputs, _ = leaves(of, 128)
    before = set(kept_maps())
    with torch.no_grad():
        for _ in range(2):
            FUNCTIONS[len(of.grid)](*inputs, **of.options)
    ((_, entry),) = ((key, entry) for key, entry in kept_maps().items() if key not in before)
    counted = entry.summary()
    assert counted.full + counted.partial == boxes.visited
    assert counted.full <= boxes.full  # places without a token are hidden keys
    assert counted.has_bits == (counted.partial > 0)


def test_a_graph_takes_the_kept_map(only: Package) -> None:
    of = CASES["3d"]
    inputs, _ = leaves(of, 64)
    given = [each.detach().clone() for each in inputs]
    call = lambda: na3d(*given, **of.options)  # noqa: E731
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for place, each in enumerate(given):
        each.copy_(torch.randn_like(each) * (place + 1))
    graph.replay()
    torch.testing.assert_close(out, call(), rtol=0, atol=0)
    no_worse(out, dense(*given, of, compute=torch.bfloat16)[0], dense(*given, of)[0])


def test_a_compiled_program(only: Package) -> None:
    of = CASES["2d, dilated, causal"]
    inputs, _ = leaves(of, 64)
    call = lambda *given: na2d(*given, **of.options)  # noqa: E731
    compiled = torch.compile(call, fullgraph=True)
    out, wanted = compiled(*inputs), call(*inputs)
    torch.testing.assert_close(out, wanted, rtol=0, atol=0)
    weights = torch.randn_like(out)
    pairs = (torch.autograd.grad(each, inputs, weights) for each in (out, wanted))
    for one, other in zip(*pairs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)
