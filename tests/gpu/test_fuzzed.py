"""Fuzzed specs, a third of a hundred always, and those that were wrong once keep the forward contract."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from attngen.build.pipeline import Prepared, compile_kernels
from attngen.compile.triton import WRONG_CODE
from attngen.lab.verify.gpu import try_pinned
from attngen.runtime.kernels.module import Kernel, read_kernel
from attngen.schema import load_spec
from attngen.store.store import Store
from tests.fuzz.specs import REGRESSIONS, SEEDS, prepared, regressions
from tests.gpu.family import for_this_gpu
from tests.sampling import exhaustive, some

OFTEN = (*(f"fuzzed_{seed}" for seed in SEEDS[::3]), *load_spec(REGRESSIONS).variants)
LABELS = (*OFTEN, *(f"fuzzed_{seed}" for seed in SEEDS if f"fuzzed_{seed}" not in OFTEN))
SEED = 30_000


def to_build() -> list[Prepared]:
    """Return the sample, or all of them in an exhaustive run."""
    return [*map(prepared, SEEDS if exhaustive() else SEEDS[::3]), *regressions()]


@cache
def kernels() -> dict[str, Kernel | str]:
    """Compile what the cache lacks, all at once; a kernel that could not be compiled is there by its error."""
    here = {kernel.plan.variant.name: for_this_gpu(kernel) for kernel in to_build()}
    store = Store()
    built, failures = compile_kernels(list(here.values()), store=store)
    errors = {failure.name: str(failure.error) for failure in failures}
    return {
        name: errors.get(kernel.plan.name) or read_kernel(store.path(built[kernel.plan.name].key))
        for name, kernel in here.items()
    }


@pytest.mark.parametrize("name", some(LABELS, OFTEN))
def test_fuzzed_specs_keep_the_contract(name: str) -> None:
    kernel = kernels()[name]
    if isinstance(kernel, str) and WRONG_CODE in kernel:
        pytest.skip(f"refused: {kernel}")  # the sample fixes tiles, so that nothing else may be tried
    assert not isinstance(kernel, str), kernel

    assert try_pinned(kernel, torch.device("cuda"), SEED, small=True).problems == ()
