"""A schedule that attngen does not know, with two launches and workspaces, on this GPU."""

from __future__ import annotations

import pytest
import torch

import attngen
from attngen.arch import arch_of
from attngen.build.pipeline import compile_kernels, prepare
from attngen.plan.catalogue import with_schedule
from attngen.runtime.kernels.module import read_kernel
from attngen.runtime.registry.lookup import package_of_kernels, registry
from attngen.schema import load_spec_text
from attngen.store.store import Store
from tests.outside.split_keys import SCHEDULE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (40, 72)])
def test_splits_are_merged(dims: tuple[int, int], dtype: torch.dtype) -> None:
    major, minor = torch.cuda.get_device_capability()
    arch, name = arch_of(10 * major + minor), {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    assert arch is not None
    row = f"{{variant: full, dtype: {name}, head_dim: {{qk: {dims[0]}, v: {dims[1]}}}}}"
    text = f"schema: 1\npackage: outside\narch: [{arch.name}]\nkernels:\n  - {row}\n"
    store = Store()
    with with_schedule(SCHEDULE, before="hopper_forward"):
        prepared = prepare(load_spec_text(text))
        built, failures = compile_kernels(prepared, store=store, jobs=1)
    assert not failures, failures
    (kernel,) = built.values()
    registry.add(package_of_kernels([read_kernel(store.path(kernel.key))], "outside"))
    generator = torch.Generator("cuda").manual_seed(0)
    for rows, keys in ((1, 1), (5, 48), (7, 1000), (130, 333)):
        q, k, v = (
            torch.randn(2, seqlen, heads, dim, device="cuda", generator=generator).to(dtype)
            for seqlen, heads, dim in ((rows, 6, dims[0]), (keys, 3, dims[0]), (keys, 3, dims[1]))
        )
        used = torch.tensor([keys, keys // 2], dtype=torch.int32, device="cuda")
        out, lse = attngen.attention(q, k, v, variant="full", package="outside", seqused_k=used, return_lse=True)
        wanted, wanted_lse = attngen.attention(
            q.double(), k.double(), v.double(), variant="full", seqused_k=used, return_lse=True, backend="reference",
            package="outside",
        )  # fmt: skip
        torch.testing.assert_close(out.double(), wanted, rtol=0, atol=4e-3 if dtype is torch.float16 else 2e-2)
        torch.testing.assert_close(lse.double(), wanted_lse.double(), rtol=0, atol=1e-4)
