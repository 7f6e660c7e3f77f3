"""Triton forwards of narrow and unequal head dims: every one compiles, runs and meets checks 1 to 4."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from attngen.runtime.checked import Call
from attngen.runtime.module import read_kernel
from attngen.runtime.pinned import Buffers, Pinned
from attngen.schema import load_spec
from attngen.store.store import Store
from attngen.tools.build.pipeline import BuiltKernel, Prepared, compile_kernels, prepare
from attngen.tools.verify.trial import try_kernel
from tests.gpu.family import for_this_gpu

KERNELS = {kernel.plan.name: kernel for kernel in prepare(load_spec(Path(__file__).with_name("narrow.yaml")))}
SEED = 32_016


@cache
def compiled() -> tuple[dict[str, Prepared], dict[str, BuiltKernel], dict[str, str]]:
    """Compile what the cache lacks, all at once."""
    here = {name: for_this_gpu(kernel) for name, kernel in KERNELS.items()}
    built, failures = compile_kernels(list(here.values()), store=Store())
    return here, built, {failure.name: str(failure.error) for failure in failures}


@pytest.mark.parametrize("name", KERNELS)
def test_narrow_head_dims(name: str) -> None:
    here, built, errors = compiled()
    planned = here[name].plan.name
    assert planned not in errors, errors[planned]
    kernel = read_kernel(Store().path(built[planned].key))

    def launch(call: Call, buffers: Buffers) -> None:
        Pinned(kernel, call, buffers)()

    assert try_kernel(kernel, launch, "cuda", SEED, small=True).problems == ()
