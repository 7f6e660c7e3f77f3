"""Kernels that may start before the work ahead of them is done, in chains where each reads what the last one wrote."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import attngen
from attngen.build.pipeline import Prepared, build, prepare
from attngen.runtime.registry.lookup import registry
from attngen.schema import load_spec_text

SPEC = """
schema: 1
package: chains
arch: [sm90a]
kernels:
  - {variant: causal, head_dim: 128, dtype: bf16, layout: [dense, paged], pack_gqa: [false, true], split_kv: true}
"""
STEPS, PAGE = 24, 64


def to_build() -> list[Prepared]:
    return prepare(load_spec_text(SPEC, "chains.yaml"))


@pytest.fixture(scope="module", autouse=True)
def _built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    spec = tmp_path_factory.mktemp("chains") / "chains.yaml"
    Path(spec).write_text(SPEC)
    assert build(spec).failures == ()
    registry.clear()
    yield
    registry.clear()


class Chain:
    """Queries that are the results of the step before; over pages, each step first appends keys and values."""

    def __init__(self, batch: int, seqlen_k: int, heads: int, kv_heads: int, seqlen_q: int, paged: bool) -> None:
        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, 128, device="cuda", dtype=torch.bfloat16)

        self.q, self.paged = random(batch, seqlen_q, heads), paged
        rows = (batch * seqlen_k // PAGE, PAGE) if paged else (batch, seqlen_k)
        self.k, self.v = random(*rows, kv_heads), random(*rows, kv_heads)
        self.new_k, self.new_v = random(batch, seqlen_q, kv_heads), random(batch, seqlen_q, kv_heads)
        self.lengths = torch.full((batch,), seqlen_k - seqlen_q, device="cuda", dtype=torch.int32)
        pages = torch.randperm(batch * seqlen_k // PAGE, device="cuda").int()
        self.page_table = pages.view(batch, -1)

    def run(self, wait: bool = False) -> Tensor:
        x, steps = self.q, []
        for i in range(STEPS):
            if self.paged:
                attngen.append_kv(self.new_k + i, self.new_v, self.k, self.v, self.lengths, page_table=self.page_table)
                x = attngen.attention_paged(
                    x, self.k, self.v, self.page_table, self.lengths + x.shape[1], package="chains"
                )
            else:
                x = attngen.attention(x, self.k, self.v, seqused_k=self.lengths, variant="causal", package="chains")
            steps.append(x)
            if wait:
                torch.cuda.synchronize()
        return torch.stack(steps)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("seqlen_q", [1, 4, 40, 200])
@pytest.mark.parametrize(
    ("batch", "seqlen_k", "heads", "kv_heads"),
    [(1, 1024, 32, 8), (1, 8192, 32, 8), (8, 4096, 32, 8), (32, 2048, 32, 8), (4, 640, 16, 1), (3, 512, 8, 8)],
)
def test_a_chain_has_the_bits_of_one_step_at_a_time(
    batch: int, seqlen_k: int, heads: int, kv_heads: int, seqlen_q: int, paged: bool
) -> None:
    chain = Chain(batch, seqlen_k, heads, kv_heads, seqlen_q, paged)
    expected = chain.run(wait=True)
    assert torch.isfinite(expected).all()
    assert torch.equal(chain.run(), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = chain.run()
    for _ in range(5):
        outputs.zero_()
        graph.replay()
    assert torch.equal(outputs, expected)
