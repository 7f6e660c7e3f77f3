"""Prefixes that sequences share, on the GPU: attention against float64, and a graph that finds another prefix."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen.build.pipeline import Prepared, prepare
from attngen.runtime.registry.lookup import Package, package_of_kernels
from attngen.schema import load_spec_text
from tests.gpu.family import compiled_kernels, known
from tests.gpu.test_decode import close
from tests.runtime.pages import starts_of

PACKAGE = "attngen_gpu_prefix"
SPEC = f"""
schema: 1
package: {PACKAGE}
arch: [sm90a]
kernels:
  - {{variant: [full, causal, causal_sink], head_dim: [64, 128], layout: paged, pack_gqa: true, split_kv: true}}
  - {{variant: full, head_dim: [64, 128], layout: paged, pack_gqa: true, tile: {{m: 128}}, split_kv: tiles}}
"""


def to_build() -> list[Prepared]:
    return [one for one in prepare(load_spec_text(SPEC)) if one.plan.direction in ("forward", "merge")]


@known
def kernels() -> tuple[list[Any], Package]:
    built = compiled_kernels(to_build())
    return built, package_of_kernels(built, "tests/gpu/test_shared_prefix")


@pytest.fixture(autouse=True)
def _known() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the spec is for Hopper")
    kernels()


class Sequences:
    """Sequences of a batch, of which some begin with the same pages; rows of pages beyond their keys are NaN."""

    def __init__(
        self, shared: int, own: list[int], others: int, page_size: int, head_dim: int, queries: int = 1
    ) -> None:
        torch.manual_seed(shared + len(own))
        batch, page = len(own) + others, page_size
        most = shared + max(own) + 1
        numbers = iter(torch.randperm(2 * shared + batch * most).tolist())
        trunk = [next(numbers) for _ in range(shared)]
        self.table = torch.full((batch, most), 2**31 - 1, dtype=torch.int32)
        self.pages = [torch.randn(2 * shared + batch * most, page, 2, head_dim).bfloat16() for _ in range(2)]
        keys = []
        for b in range(batch):
            chain = (trunk if b < len(own) else [next(numbers) for _ in range(b)]) + [
                next(numbers) for _ in range(own[b] if b < len(own) else 2)
            ]
            self.table[b, : len(chain)] = torch.tensor(chain, dtype=torch.int32)
            left = int(torch.randint(0, page - queries, ()))
            keys.append(page * len(chain) - left)
            for cache in self.pages:
                cache[chain[-1], page - left :] = torch.nan
        self.used = torch.tensor(keys, dtype=torch.int32)
        self.q = torch.randn(batch, queries, 8, head_dim).bfloat16()

    def wanted(self, **given: Any) -> tuple[Tensor, Tensor]:
        k, v = (one.double() for one in self.pages)
        result: tuple[Tensor, Tensor] = attngen.attention_paged(
            self.q.double(), k, v, self.table.clamp(max=len(k) - 1), self.used, return_lse=True, backend="reference",
            package=PACKAGE, **given,
        )  # fmt: skip
        return result


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("variant", ["causal", "full", "causal_sink"])
@pytest.mark.parametrize(
    ("shared", "own", "others", "page_size", "queries"),
    [(70, [3, 1, 9, 4, 30, 2], 3, 16, 1), (9, [2] * 40, 0, 64, 1), (40, [1, 2, 5], 9, 16, 3), (0, [3, 4], 2, 16, 1)],
)
def test_numbers(
    shared: int, own: list[int], others: int, page_size: int, queries: int, variant: str, head_dim: int
) -> None:
    made = Sequences(shared, own, others, page_size, head_dim, queries)
    given: dict[str, Any] = {"sinks": torch.randn(8)} if variant == "causal_sink" else {}
    wanted = made.wanted(variant=variant, **given)
    on_card = {name: tensor.cuda() for name, tensor in given.items()}
    prefix = attngen.shared_prefix(made.table.cuda(), made.used.cuda(), page_size, seqlen_q=queries)
    assert prefix.length.item() == shared * page_size
    close(
        prefix.attention(
            made.q.cuda(), *(one.cuda() for one in made.pages), variant=variant, package=PACKAGE, return_lse=True,
            **on_card,
        ),
        wanted,
    )  # fmt: skip


def test_packed_queries() -> None:
    made = Sequences(30, [3, 1, 9], 2, 16, 128, 2)
    starts = starts_of([2] * len(made.q)).cuda()
    packed = made.q.flatten(0, 1).cuda()
    prefix = attngen.shared_prefix(
        made.table.cuda(), made.used.cuda(), 16, cu_seqlens_q=starts, max_seqlen_q=2, total_q=len(packed)
    )
    out = prefix.attention(packed, *(one.cuda() for one in made.pages), package=PACKAGE)
    assert isinstance(out, Tensor)
    wanted, _ = made.wanted(variant="causal")
    error = (out.cpu().double().view(wanted.shape) - wanted).abs().max()
    assert error <= 2e-2, error


def test_a_graph_finds_another_prefix() -> None:
    """The graph holds the search and a layer; tables and lengths change in place, and nothing waits."""
    first, second = Sequences(30, [3, 1, 9], 2, 16, 128), Sequences(30, [3, 1, 9], 2, 16, 128)
    second.table[1:3] = second.table[1:3].flip(0)
    second.used = second.used.flip(0).clamp(max=16 * 3)
    q, pages = first.q.cuda(), [one.cuda() for one in first.pages]
    table, used = first.table.cuda(), first.used.cuda()

    def step() -> Tensor:
        out = attngen.shared_prefix(table, used, 16).attention(q, *pages, package=PACKAGE)
        assert isinstance(out, Tensor)
        return out

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for made in (first, second):
        table.copy_(made.table)
        used.copy_(made.used)
        graph.replay()
        made.pages, made.q = first.pages, first.q
        wanted, _ = made.wanted(variant="causal")
        assert not out.isnan().any()
        error = (out.cpu().double() - wanted).abs().max()
        assert error <= 2e-2, error
