"""Triton forward kernels of narrow and unequal head dims: every one compiles, runs and keeps the forward contract."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest
import torch

from attngen.build.pipeline import BuiltKernel, Prepared, compile_kernels, plans
from attngen.lab.verify.gpu import try_pinned
from attngen.runtime.kernels.module import read_kernel
from attngen.schema import load_spec
from attngen.store.store import Store
from tests.gpu.family import for_this_gpu, rare, rendered
from tests.sampling import some

PLANNED = {plan.name: (spec, plan) for spec, plan in plans(load_spec(Path(__file__).with_name("narrow.yaml")))}
#: Each head dim, mask, dtype and layout is in it.
_RARE = rare({name: plan for name, (_, plan) in PLANNED.items()})
SAMPLE = [name for name in PLANNED if name not in _RARE]
SEED = 32_016


def to_build(names: Iterable[str] = SAMPLE) -> list[Prepared]:
    return list(rendered({name: PLANNED[name] for name in names}).values())


@cache
def compiled(*, sample: bool) -> tuple[dict[str, Prepared], dict[str, BuiltKernel], dict[str, str]]:
    """Compile what the cache lacks of the sample, or of the rest, all at once."""
    names = SAMPLE if sample else [name for name in PLANNED if name not in SAMPLE]
    here = {name: for_this_gpu(kernel) for name, kernel in rendered({name: PLANNED[name] for name in names}).items()}
    built, failures = compile_kernels(list(here.values()), store=Store())
    return here, built, {failure.name: str(failure.error) for failure in failures}


@pytest.mark.parametrize("name", some(PLANNED, SAMPLE))
def test_narrow_head_dims(name: str) -> None:
    here, built, errors = compiled(sample=name in SAMPLE)
    planned = here[name].plan.name
    assert planned not in errors, errors[planned]
    kernel = read_kernel(Store().path(built[planned].key))

    assert try_pinned(kernel, torch.device("cuda"), SEED, small=True).problems == ()
