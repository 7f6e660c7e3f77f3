"""Triton forward kernels of narrow and unequal head dims: every one compiles, runs and keeps the forward contract."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest
import torch

from attngen.runtime.kernels.module import read_kernel
from attngen.schema import load_spec
from attngen.store.store import Store
from attngen.tools.build.pipeline import BuiltKernel, Prepared, compile_kernels, prepare
from attngen.tools.verify.gpu import try_pinned
from tests.gpu.family import for_this_gpu, rare
from tests.sampling import some

KERNELS = {kernel.plan.name: kernel for kernel in prepare(load_spec(Path(__file__).with_name("narrow.yaml")))}
#: Each head dim, mask, dtype and layout is in it.
_RARE = rare({name: kernel.plan for name, kernel in KERNELS.items()})
SAMPLE = [name for name in KERNELS if name not in _RARE]
SEED = 32_016


def to_build(names: Iterable[str] = SAMPLE) -> list[Prepared]:
    return [KERNELS[name] for name in names]


@cache
def compiled(*, sample: bool) -> tuple[dict[str, Prepared], dict[str, BuiltKernel], dict[str, str]]:
    """Compile what the cache lacks of the sample, or of the rest, all at once."""
    names = SAMPLE if sample else [name for name in KERNELS if name not in SAMPLE]
    here = {name: for_this_gpu(KERNELS[name]) for name in names}
    built, failures = compile_kernels(list(here.values()), store=Store())
    return here, built, {failure.name: str(failure.error) for failure in failures}


@pytest.mark.parametrize("name", some(KERNELS, SAMPLE))
def test_narrow_head_dims(name: str) -> None:
    here, built, errors = compiled(sample=name in SAMPLE)
    planned = here[name].plan.name
    assert planned not in errors, errors[planned]
    kernel = read_kernel(Store().path(built[planned].key))

    assert try_pinned(kernel, torch.device("cuda"), SEED, small=True).problems == ()
