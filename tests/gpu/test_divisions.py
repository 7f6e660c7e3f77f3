"""Quotients that decide are exact in kernels of both languages, with ``fast_math`` and without: at every boundary.

``x * (1 / n)`` is less than 1 at ``x == n`` for n = 41, 47, 55 and others: whole rows or keys are then wrong.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen.build.pipeline import Prepared, plans, prepare
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.registry.lookup import package_of_kernels
from attngen.schema import load_spec
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
_VARIANTS = sorted({plan.variant.name for plan in _PLANS})


def to_build() -> list[Prepared]:
    return prepare(load_spec(SPEC))


@cache
def kernels() -> dict[str, Kernel]:
    """Compile what the cache lacks, by the names of the plans for sm90a."""
    here = [for_this_gpu(kernel) for kernel in to_build()]
    return dict(zip((plan.name for plan in _PLANS), compiled_kernels(here), strict=True))


def pairs(variant: str) -> list[tuple[str, str]]:
    """A forward and a backward at a time: each kernel of a variant once, or again where there are more of the other."""
    forwards, backwards = (
        [plan.name for plan in _PLANS if (plan.variant.name, plan.direction) == (variant, direction)]
        for direction in ("forward", "backward")
    )
    count = max(len(forwards), len(backwards))
    return [(forwards[n % len(forwards)], backwards[n % len(backwards)]) for n in range(count)]


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("variant", _VARIANTS)
def test_every_divisor(variant: str, part: int) -> None:
    """A wrong decision changes a row, or a key of all rows, by far more than bf16 rounds."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, ROWS, 1, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    above = torch.randn_like(q)

    def results(n: int, **options: Any) -> list[Tensor]:
        given = [t.clone().requires_grad_() for t in (q, k, v)]
        out = attngen.attention(*given, variant=variant, n=n, **options)
        return [out, *torch.autograd.grad(out, given, above)]

    chosen = pairs(variant)
    assert {plan.name for plan in _PLANS if plan.variant.name == variant} == {name for pair in chosen for name in pair}
    packages = [
        package_of_kernels([kernels()[name] for name in pair], f"tests/gpu/divisions/{n}")
        for n, pair in enumerate(chosen)
    ]
    wanted = {}
    with only_known(packages[0]):
        for n in DIVISORS[part::2]:
            wanted[n] = results(n, backend="reference")
    for pair, package in zip(chosen, packages, strict=True):
        with only_known(package):
            for n, theirs in wanted.items():
                for actual, one in zip(results(n), theirs, strict=True):
                    torch.testing.assert_close(actual, one, rtol=0.05, atol=0.05, msg=f"n = {n}, {pair}")
