"""Kernels that merge results over two parts of the keys, against float64."""

from __future__ import annotations

from functools import cache

import torch

from attngen.formats import MERGE
from attngen.runtime.kernels.module import Kernel
from attngen.schema import load_spec_text
from attngen.tools.build.pipeline import Prepared, prepare
from attngen.tools.verify.gpu import try_pinned
from tests.gpu.family import compiled_kernels, for_this_gpu
from tests.runtime.host_kernels import SPEC_OF_LISTS


def to_build() -> list[Prepared]:
    return [one for one in prepare(load_spec_text(SPEC_OF_LISTS)) if one.plan.direction == MERGE]


@cache
def kernels() -> list[Kernel]:
    return compiled_kernels([for_this_gpu(one) for one in to_build()])


def test_against_float64() -> None:
    assert [kernel.dtype for kernel in kernels()] == ["bf16", "fp16"]
    for kernel in kernels():
        trial = try_pinned(kernel, torch.device("cuda"), 3, small=False)
        assert trial.problems == ()
        assert len(trial.results) == 24
