"""Keys by index against float64: lists with wrong entries, short and empty ones, heads and splits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen.build.pipeline import Prepared, prepare_each
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.registry.lookup import Package, package_of_kernels
from attngen.schema import load_spec
from tests.gpu.family import compiled_kernels, known
from tests.gpu.test_decode import close, on_gpu
from tests.runtime.pages import cache as pages_of
from tests.runtime.pages import starts_of

PACKAGE = "indexed_tests"
VALUES = 512


def to_build() -> list[Prepared]:
    spec = load_spec(Path(__file__).with_name("indexed.yaml"))
    return [one for one in prepare_each(spec)[0] if one.plan.v_of_key]


@known
def kernels() -> tuple[list[Kernel], Package]:
    """Compile the kernels of the spec, which alone are known as the package: no other takes a call."""
    wanted = to_build()
    assert {one.plan.schedule for one in wanted} == {"hopper_indexed"}
    built = compiled_kernels(wanted)
    return built, package_of_kernels(built, "tests/gpu/test_indexed")


@pytest.fixture(autouse=True)
def _known() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("kernels whose calls list keys are for Hopper")
    kernels()


def lists(batch: int, queries: int, topk: int, keys: int, *, wrong: float = 0.2) -> Tensor:
    """Lists of keys, each at most twice, in no order, with entries that name none: negative, or too large."""
    order = torch.rand(batch, queries, max(keys, 1)).argsort(-1)[..., :topk]
    entries = torch.nn.functional.pad(order, (0, topk - order.shape[-1]), value=-1).int()
    chance = torch.rand(entries.shape)
    for value, share in ((-1, 0.4), (keys, 0.6), (2**31 - 1, 0.8), (-(2**31), 1.0)):
        entries = torch.where(chance < wrong * share, value, entries)
        chance = torch.where(chance < wrong * share, 2.0, chance)
    if topk > 1:
        entries[..., 1] = entries[..., 0]
    return entries


def own_of(variant: str, entries: Tensor, heads: int, keys: int) -> dict[str, Tensor]:
    own = {"indices": entries}
    if variant.startswith("counted"):
        length = torch.randint(0, entries.shape[-1] + 2, entries.shape[:2], dtype=torch.int32)
        length[..., 0] = -3  # counts as 0
        length[..., -1] = 2**31 - 1
        own["topk_length"] = length
    if variant.endswith("sinks"):
        own["sinks"] = torch.randn(heads)
    if variant == "counted_sinks":
        own["slope"] = -torch.rand(heads) / 16
    if variant == "counted_documents":
        own["doc"] = torch.randint(0, 6, (entries.shape[0], keys), dtype=torch.int32)
    return own


def dense(
    variant: str, *, batch: int = 2, queries: int = 3, keys: int = 700, topk: int = 200, heads: int = 16,
    head_dim: int = 576, dtype: torch.dtype = torch.bfloat16, wrong: float = 0.2, **given: Any,
) -> None:  # fmt: skip
    """Compare a dense call with float64 on the CPU. Rows of K that no list names are NaN."""
    torch.manual_seed(heads + topk)
    q, k = torch.randn(batch, queries, heads, head_dim).to(dtype), torch.randn(batch, keys, 1, head_dim).to(dtype)
    own = own_of(variant, lists(batch, queries, topk, keys, wrong=wrong), heads, keys)
    named = torch.zeros(batch, keys, dtype=torch.bool)
    for b in range(batch):
        entries = own["indices"][b].flatten().long()
        named[b, entries[(entries >= 0) & (entries < keys)]] = True
    k[~named] = torch.nan
    call = {"variant": variant, "return_lse": True}
    exact = torch.where(named[..., None, None], k.double(), 0.0)
    wanted = attngen.attention(q.double(), exact, exact[..., :VALUES], backend="reference", **call, **own)
    on_card = k.cuda()
    actual = attngen.attention(
        q.cuda(), on_card, on_card[..., :VALUES], package=PACKAGE, **call, **on_gpu(own), **given
    )
    close(actual, wanted)


@pytest.mark.parametrize("heads", [1, 8, 16, 17, 32, 33, 64, 65, 128, 200])
@pytest.mark.parametrize("variant", ["listed", "counted", "sinks"])
def test_heads(variant: str, heads: int) -> None:
    dense(variant, heads=heads, queries=5)


@pytest.mark.parametrize("topk", [1, 2, 63, 64, 65, 128, 129, 1000])
@pytest.mark.parametrize("heads", [16, 32, 128])
def test_lengths_of_lists(topk: int, heads: int) -> None:
    dense("listed", topk=topk, heads=heads)


@pytest.mark.parametrize("wrong", [0.0, 1.0])
def test_lists_without_wrong_entries_and_of_nothing_else(wrong: float) -> None:
    dense("counted", wrong=wrong, topk=192, heads=128)


@pytest.mark.parametrize("variant", ["listed_causal", "counted_sinks", "counted_documents"])
@pytest.mark.parametrize("heads", [16, 128])
def test_masks_and_scores_see_places_of_keys(variant: str, heads: int) -> None:
    dense(variant, heads=heads, queries=40, keys=90, topk=70)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_512_columns(dtype: torch.dtype) -> None:
    dense("counted", head_dim=512, dtype=dtype, heads=32)


@pytest.mark.parametrize(("queries", "heads"), [(1, 32), (1, 128), (70, 128), (300, 32)])
def test_more_items_than_blocks_and_fewer(queries: int, heads: int) -> None:
    """Ranges of blocks end inside of lists: what several blocks have of one is merged."""
    dense("counted", batch=1, queries=queries, keys=1000, topk=700, heads=heads)


def test_bits_repeat() -> None:
    torch.manual_seed(1)
    q, k = torch.randn(1, 77, 128, 576).bfloat16().cuda(), torch.randn(1, 4096, 1, 576).bfloat16().cuda()
    entries = lists(1, 77, 2048, 4096).cuda()

    def call() -> tuple[Tensor, Tensor]:
        out = attngen.attention(
            q, k, k[..., :VALUES], variant="listed", indices=entries, return_lse=True, package=PACKAGE
        )
        assert isinstance(out, tuple)
        return out

    first = call()
    assert all(torch.equal(a, b) for _ in range(10) for a, b in zip(call(), first, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    entries.copy_(lists(1, 77, 2048, 4096))
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(call(), captured, strict=True))


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("variant", ["listed_causal", "counted"])
@pytest.mark.parametrize("page_size", [1, 16, 48, 64])
def test_pages(variant: str, heads: int, page_size: int) -> None:
    """Entries are places in a sequence, which the page table locates; rows after its end are never read."""
    lengths, queries, topk = [0, 5, 100, 900], 3, 150
    c = pages_of(lengths, page_size, kv_heads=1, head_dim=576, dtype=torch.bfloat16)
    torch.manual_seed(3)
    q = torch.randn(len(lengths), queries, heads, 576).bfloat16()
    entries = torch.cat([lists(1, queries, topk, keys) for keys in lengths])
    own = own_of(variant, entries, heads, max(lengths))
    call = {"variant": variant, "return_lse": True}
    exact = c.k_pages.double()
    wanted = attngen.attention_paged(
        q.double(), exact, exact[..., :VALUES], c.page_table, c.seqused_k, backend="reference", **call, **own
    )
    on_card = c.k_pages.cuda()
    for given in ({}, {"num_splits": 2}, {"split_size": 64}):
        actual = attngen.attention_paged(
            q.cuda(), on_card, on_card[..., :VALUES], c.page_table.cuda(), c.seqused_k.cuda(), package=PACKAGE,
            **call, **on_gpu(own), **given,
        )  # fmt: skip
        close(actual, wanted)


@pytest.mark.parametrize("heads", [8, 128])
def test_packed_sequences(heads: int) -> None:
    """Entries are places in a query's own sequence: those after its end name no key of the next one."""
    of_q, of_k = [70, 1, 0, 12], [70, 300, 5, 4]
    torch.manual_seed(9)
    q, k = torch.randn(sum(of_q), heads, 576).bfloat16(), torch.randn(sum(of_k), 1, 576).bfloat16()
    starts = starts_of(of_q), starts_of(of_k)
    entries = torch.cat([lists(1, 70, 100, keys + 20) for keys in of_k])
    call = {"max_seqlen_q": 70, "max_seqlen_k": 300, "variant": "listed_causal", "return_lse": True}
    exact = k.double()
    wanted = attngen.attention_varlen(
        q.double(), exact, exact[..., :VALUES], *starts, backend="reference", indices=entries, **call
    )
    on_card = k.cuda()
    actual = attngen.attention_varlen(
        q.cuda(), on_card, on_card[..., :VALUES], *(start.cuda() for start in starts), package=PACKAGE,
        indices=entries.cuda(), **call,
    )  # fmt: skip
    close(actual, wanted)
