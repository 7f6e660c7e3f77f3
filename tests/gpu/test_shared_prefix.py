"""Prefixes that sequences share, on the GPU: attention against float64, and a graph that finds another prefix."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen.build.pipeline import Prepared, prepare
from attngen.runtime.operations.shared_prefix.layer import SharedPrefixLayer
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
variants:
  softcap_full: {{score: "cap * tanh(s / cap)", scalars: {{cap: {{type: float32, min: 0.001}}}}}}
kernels:
  - {{variant: [full, causal, causal_sink], head_dim: [64, 128], layout: paged, pack_gqa: true, split_kv: true}}
  - {{variant: full, head_dim: [64, 128], layout: paged, pack_gqa: true, tile: {{m: 128}}, split_kv: tiles}}
  - {{variant: [full, causal], head_dim: 128, kv_dtype: fp8_e4m3, layout: paged, split_kv: true}}
  - {{variant: [softcap, softcap_full], head_dim: 128, layout: paged, split_kv: true}}
"""


def to_build() -> list[Prepared]:
    return [one for one in prepare(load_spec_text(SPEC)) if one.plan.direction in ("forward", "merge", "widen")]


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


def groups(page_size: int, queries: int = 1) -> Sequences:
    """Sequences that begin with one of three prefixes, one after the other, and two that do not."""
    made = Sequences(40, [3, 1, 9, 4, 30, 2, 5, 1, 1, 2, 8, 1], 2, page_size, 128, queries)
    free = made.table.new_tensor([page for page in range(len(made.pages[0])) if not (made.table == page).any()])
    for first in (1, 2):
        made.table[first:12:3, :40] = free[40 * first - 40 : 40 * first]
    return made


@pytest.mark.parametrize(("variant", "cache"), [("causal", 16), ("softcap", 16), ("causal", 8)])
@pytest.mark.parametrize("queries", [1, 2])
def test_several_prefixes(queries: int, variant: str, cache: int) -> None:
    made = groups(16, queries)
    given: dict[str, Any] = {"cap": 20.0} if variant == "softcap" else {}
    pages = [one.cuda() for one in made.pages]
    if cache == 8:
        pages = [one.to(torch.float8_e4m3fn) for one in pages]
        made.pages = [one.cpu().bfloat16() for one in pages]
        given |= {name: torch.tensor(scale) for name, scale in (("k_descale", 0.5), ("v_descale", 2.0))}
        made.pages = [one * scale for one, scale in zip(made.pages, (0.5, 2.0), strict=True)]
    wanted = made.wanted(variant=variant, **({} if cache == 8 else given))
    on_card = {name: one.cuda() if isinstance(one, Tensor) else one for name, one in given.items()}
    for prefixes in (3, 5, 2):
        prefix = attngen.shared_prefix(
            made.table.cuda(), made.used.cuda(), 16, prefixes=prefixes, seqlen_q=queries
        )  # fmt: skip
        assert prefix.length.tolist() == [640, 640, 640, 0, 0][:prefixes]
        close(
            prefix.attention(made.q.cuda(), *pages, variant=variant, package=PACKAGE, return_lse=True, **on_card),
            wanted,
        )


@pytest.mark.parametrize("prefixes", [1, 3])
def test_layers_repeat_launches(prefixes: int) -> None:
    """As ``attention`` gives them, in every step, and where another prefix is found."""
    made = groups(16, 2)
    starts, packed = starts_of([2] * len(made.q)).cuda(), made.q.flatten(0, 1).cuda()
    caches = [[one.cuda() * factor for one in made.pages] for factor in (1.0, 0.5, -1.0)]
    layers = [SharedPrefixLayer(*pages, variant="causal", softmax_scale=0.1) for pages in caches]
    for step in range(3):
        table = made.table.roll(step, 0).cuda()
        used = made.used.roll(step).cuda()
        shape = {"cu_seqlens_q": starts, "max_seqlen_q": 2}
        prefix = attngen.shared_prefix(table, used, 16, prefixes=prefixes, total_q=len(packed), **shape)
        for layer, pages in zip(layers, caches, strict=True):
            out = torch.empty_like(packed)
            layer(packed, out, prefix)
            wanted = attngen.attention_paged(packed, *pages, table, used, softmax_scale=0.1, package=PACKAGE, **shape)
            assert isinstance(wanted, Tensor)
            torch.testing.assert_close(out, wanted, rtol=2e-2, atol=2e-2)
    prefix = attngen.shared_prefix(table, used, 16, prefixes=prefixes, total_q=len(packed), **shape)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in layers[1:]:
            layer(packed, out, prefix)
    pages = caches[-1]
    table.copy_(made.table)
    used.copy_(made.used)
    prefix.update(attngen.shared_prefix(table, used, 16, prefixes=prefixes, total_q=len(packed), **shape))
    graph.replay()
    wanted = attngen.attention_paged(packed, *pages, table, used, softmax_scale=0.1, package=PACKAGE, **shape)
    assert isinstance(wanted, Tensor)
    torch.testing.assert_close(out, wanted, rtol=2e-2, atol=2e-2)


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
