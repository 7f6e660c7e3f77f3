"""Quotients that decide are exact in kernels of both languages, with ``fast_math`` and without: at every boundary.

``x * (1 / n)`` is less than 1 at ``x == n`` for n = 41, 47, 55 and others: whole rows or keys are then wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

import attngen
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.registry.lookup import package_of_kernels
from attngen.schema import load_spec
from attngen.tools.build.pipeline import Prepared, plans, prepare
from tests.gpu.family import compiled_kernels, for_this_gpu, only_known

SPEC = Path(__file__).with_name("divisions.yaml")
ROWS = 128


def _is_lossy(n: int) -> bool:
    """Whether a quotient by a reciprocal in float32 is on the wrong side of a whole number somewhere."""
    x = torch.arange(8 * ROWS, dtype=torch.float32)
    return bool(((x * (1 / torch.tensor(float(n)))).floor() != torch.arange(8 * ROWS) // n).any())


#: Those for which a reciprocal is not good enough, powers of two and their neighbours, the least and the greatest.
DIVISORS = [
    n for n in range(1, ROWS) if _is_lossy(n) or n < 8 or n > ROWS - 4 or any(abs(n - 2**e) <= 1 for e in range(8))
]
_PLANS = [plan for _, plan in plans(load_spec(SPEC))]
_PAIRS = [
    (forward.name, backward.name)
    for forward in _PLANS
    for backward in _PLANS
    if (forward.direction, backward.direction) == ("forward", "backward") and forward.variant == backward.variant
]


def to_build() -> list[Prepared]:
    return prepare(load_spec(SPEC))


@cache
def kernels() -> dict[str, Kernel]:
    """Compile what the cache lacks, by the names of the plans for sm90a."""
    here = [for_this_gpu(kernel) for kernel in to_build()]
    return dict(zip((plan.name for plan in _PLANS), compiled_kernels(here), strict=True))


@pytest.fixture
def only(request: pytest.FixtureRequest) -> Iterator[str]:
    """Make one forward and one backward known, and no other kernel."""
    package = package_of_kernels([kernels()[name] for name in request.param], "tests/gpu/divisions")
    with only_known(package):
        yield kernels()[request.param[0]].variant.name


@pytest.mark.parametrize("only", _PAIRS, indirect=True, ids=[" ".join(pair) for pair in _PAIRS])
def test_every_divisor(only: str) -> None:
    """A wrong decision changes a row, or a key of all rows, by far more than bf16 rounds."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, ROWS, 1, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    above = torch.randn_like(q)
    for n in DIVISORS:
        results = []
        for backend in (None, "reference"):
            given = [t.clone().requires_grad_() for t in (q, k, v)]
            out = attngen.attention(*given, variant=only, n=n, backend=backend)
            out.backward(above)
            results.append([out, *(t.grad for t in given)])
        for actual, wanted in zip(*results, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=0.05, atol=0.05, msg=f"n = {n}")
