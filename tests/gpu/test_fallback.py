"""Kernels for ``ptx80``, which the driver compiles for the GPU that is here, compared with float64."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import pytest
import torch

import attngen
from attngen.build.pipeline import Prepared, plans, prepare
from attngen.lab.verify.gpu import try_pinned
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.registry.lookup import package_of_kernels
from attngen.schema import load_spec
from tests.gpu.family import compiled_kernels, only_known

SPEC = Path(__file__).with_name("fallback.yaml")


@cache
def to_build() -> list[Prepared]:
    return [kernel for kernel in prepare(load_spec(SPEC)) if kernel.plan.arch.portable]


@cache
def kernels() -> dict[str, Kernel]:
    return {kernel.name: kernel for kernel in compiled_kernels(to_build())}


@pytest.mark.parametrize("name", [plan.name for _, plan in plans(load_spec(SPEC)) if plan.arch.portable])
def test_the_driver_compiles_it_right(name: str) -> None:
    trial = try_pinned(kernels()[name], torch.device("cuda", 0), random.randrange(2**31), small=True)
    assert not trial.problems
    assert trial.results


def test_a_call_takes_it_where_there_is_no_other() -> None:
    q, k, v = (torch.randn(1, 100, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    with only_known(package_of_kernels(list(kernels().values()), "fallback")):
        out = attngen.attention(q, k, v, variant="causal")
    wanted = attngen.attention(q.float().cpu(), k.float().cpu(), v.float().cpu(), variant="causal", backend="reference")
    torch.testing.assert_close(out.float().cpu(), wanted, atol=2e-2, rtol=2e-2)
