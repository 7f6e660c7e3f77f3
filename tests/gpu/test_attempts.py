"""The plan's other choices, for a first one that does not compile cleanly, are kernels that keep their contract.

Most of them are never needed: one of eight is compiled and run always, the others by ``-m exhaustive``.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest
import torch

from attngen.build.pipeline import BuiltKernel, Prepared, compile_kernels
from attngen.compile.triton import WRONG_CODE
from attngen.lab.verify.gpu import try_pinned
from attngen.plan.attempts import attempts
from attngen.render import render
from attngen.runtime.kernels.module import read_kernel
from attngen.schema import expand, load_spec
from attngen.store.store import Store
from tests.sampling import some

SPEC = Path(__file__).with_name("attempts.yaml")


PLANNED = {plan.name: (kernel, plan) for kernel in expand(load_spec(SPEC)) for plan in attempts(kernel)}
SAMPLE = list(PLANNED)[::8]


def to_build(names: Iterable[str] = SAMPLE) -> list[Prepared]:
    return [Prepared(kernel, plan, render(plan)) for kernel, plan in (PLANNED[name] for name in names)]


@cache
def compiled(*, sample: bool) -> dict[str, BuiltKernel | str]:
    """Compile the sample, or the rest, at once; an attempt that could not be compiled is there by its error."""
    names = SAMPLE if sample else [name for name in PLANNED if name not in SAMPLE]
    built, failures = compile_kernels(to_build(names), store=Store())
    return built | {failure.name: str(failure.error) for failure in failures}


@pytest.mark.parametrize("name", some(PLANNED, SAMPLE))
def test_every_attempt_keeps_its_contract(name: str) -> None:
    kernel = compiled(sample=name in SAMPLE)[name]
    assert not isinstance(kernel, str), kernel
    if kernel.refused:
        known = (WRONG_CODE, "shared memory")
        assert all(any(why in row["reason"] for why in known) for row in kernel.refused)
        pytest.skip(f"refused: {kernel.refused[0]['reason']}")
    trial = try_pinned(read_kernel(Store().path(kernel.key)), torch.device("cuda", 0), 30_000, small=True)
    assert trial.problems == ()
