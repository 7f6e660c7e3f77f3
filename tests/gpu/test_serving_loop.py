"""The decode loop of docs/serving.md on a GPU, its graph, replayed while lengths grow, and steps of other sizes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import pytest
import torch

import attngen
from attngen import resources
from attngen.runtime.registry.lookup import package_of_kernels
from attngen.schema import load_spec
from attngen.tools.build.pipeline import Prepared, prepare
from tests.docs.blocks import ROOT, blocks
from tests.gpu.family import compiled_kernels, for_this_gpu, only_known


def to_build() -> list[Prepared]:
    """Return the causal kernels of ``specs/serving.yaml`` that read pages, of head dimension 128."""
    return [
        kernel for kernel in prepare(load_spec(resources.specs_dir() / "serving.yaml"))
        if kernel.plan.layout == "paged" and kernel.plan.variant.name == "causal" and "d128" in kernel.plan.name
    ]  # fmt: skip


@pytest.fixture
def kernels() -> Iterator[None]:
    """Make these kernels known, and no others."""
    wanted = [for_this_gpu(kernel) for kernel in to_build()]
    assert wanted
    with only_known(package_of_kernels(compiled_kernels(wanted), "tests/gpu")):
        yield


def test_the_loop_and_its_graph(kernels: None) -> None:
    shown: dict[str, Any] = {}
    exec(compile(blocks(ROOT / "docs/serving.md", "python")[0].text, "docs/serving.md", "exec"), shown)
    lengths = shown["lengths"]
    for turn in range(40):
        for name in "qkv":
            shown[name].normal_()
        shown["graph"].replay()
        assert lengths.tolist() == [5 + turn] * 4
        wanted = attngen.attention_paged(
            shown["q"], *shown["pages"], shown["page_table"], lengths, variant="causal", backend="reference"
        )
        torch.testing.assert_close(shown["out"].float(), wanted.float(), rtol=2e-2, atol=2e-2)


def test_steps_whose_sizes_never_repeat(kernels: None) -> None:
    """Decoding and chunks of prompts in one batch, which is padded by sequences without keys."""
    rng = random.Random(0)
    k, v = (torch.randn(600, 16, 2, 128, device="cuda").bfloat16() for _ in range(2))
    for step in range(30):
        rows = [1] * rng.randint(1, 40) + [rng.randint(1, 400)] * (step % 2)
        keys = [rng.randint(n, 1500) for n in rows]
        rows += [1] * (step % 5)
        keys += [0] * (step % 5)
        table = torch.randint(0, 600, (len(rows), -(-max(keys) // 16) + step % 3), dtype=torch.int32, device="cuda")
        lengths = torch.tensor(keys, dtype=torch.int32, device="cuda")
        starts = torch.tensor([0, *accumulate(rows)], dtype=torch.int32, device="cuda")
        q = torch.randn(sum(rows), 8, 128, device="cuda").bfloat16()
        out = torch.full_like(q, torch.nan)
        step_of = {"cu_seqlens_q": starts, "max_seqlen_q": max(rows), "variant": "causal", "return_lse": True}
        ours, lse = attngen.attention_paged(q, k, v, table, lengths, out=out, **step_of)
        wanted, wanted_lse = attngen.attention_paged(q, k, v, table, lengths, backend="reference", **step_of)
        torch.testing.assert_close(ours.float(), wanted.float(), rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(lse, wanted_lse, rtol=1e-3, atol=1e-3)
        step_of |= {"return_lse": False, "num_decodes": next((b for b, n in enumerate(rows) if n > 1), len(rows))}
        behind = next((b for b, n in enumerate(reversed(rows)) if n > 1), len(rows))
        for decodes in (*[step_of["num_decodes"]] * 3, -behind):  # the third is recognized by its tensors
            out = torch.full_like(q, torch.nan)
            step_of["num_decodes"] = decodes
            assert attngen.attention_paged(q, k, v, table, lengths, out=out, **step_of) is out
            torch.testing.assert_close(out.float(), wanted.float(), rtol=2e-2, atol=2e-2)
