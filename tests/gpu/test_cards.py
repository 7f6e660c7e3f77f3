"""Kernels by mma.sync for cards without wgmma, planned for the GPU that is here and compared with float64."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import pytest
import torch

from attngen.runtime.kernels.module import read_kernel
from attngen.schema import load_spec
from attngen.store.store import Store
from attngen.tools.build.pipeline import Prepared, compile_kernels, prepare
from attngen.tools.verify.gpu import try_pinned
from tests.gpu.family import for_this_gpu

SPEC = Path(__file__).with_name("cards.yaml")
SCHEDULES = ("mma_forward", "mma_decode", "mma_backward")


@cache
def to_build() -> list[Prepared]:
    kernels = [for_this_gpu(kernel) for kernel in prepare(load_spec(SPEC))]
    return [kernel for kernel in kernels if kernel.plan.schedule in SCHEDULES]


@cache
def built() -> dict[str, Path]:
    """Folder of each kernel in the cache, by name."""
    kernels, failures = compile_kernels(to_build(), store=Store())
    assert not failures, "\n".join(f"{failure.name}: {failure.error}" for failure in failures)
    return {name: Store().path(kernel.key) for name, kernel in kernels.items()}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_kernels_of_other_cards(schedule: str) -> None:
    names = [kernel.plan.name for kernel in to_build() if kernel.plan.schedule == schedule]
    assert len(names) >= 3
    problems = []
    for name in names:
        trial = try_pinned(read_kernel(built()[name]), torch.device("cuda", 0), random.randrange(2**31), small=True)
        problems += [f"{name}: {problem}" for problem in trial.problems]
        assert not trial.broken, "\n".join(problems)
        assert trial.results
    assert not problems, "\n".join(problems)
