"""The decode loop of docs/serving.md on a GPU, and its graph, replayed while lengths grow."""

from __future__ import annotations

from collections.abc import Iterator
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
