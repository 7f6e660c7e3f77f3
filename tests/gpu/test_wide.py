"""Head dims beyond 256 against float64: heads, queries, pages, splits, packed sequences and graphs."""

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
from tests.gpu.test_decode import close, on_gpu, own_of
from tests.runtime.pages import cache as pages_of
from tests.runtime.pages import starts_of

PACKAGE = "wide_tests"


def to_build() -> list[Prepared]:
    spec = load_spec(Path(__file__).with_name("wide.yaml"))
    return [one for one in prepare_each(spec)[0] if one.plan.schedule == "hopper_wide"]


@known
def kernels() -> tuple[list[Kernel], Package]:
    """Compile the kernels of the spec, which alone are known as the package: no other takes a call."""
    built = compiled_kernels(to_build())
    return built, package_of_kernels(built, "tests/gpu/test_wide")


@pytest.fixture(autouse=True)
def _known() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("kernels of head dims beyond 256 are for Hopper")
    kernels()


def paged(
    variant: str, lengths: list[int], *, heads: int = 8, kv_heads: int = 2, queries: int = 1, page_size: int = 64,
    dims: tuple[int, int] = (512, 512), dtype: torch.dtype = torch.bfloat16, page_layout: str = "NHD", **given: Any,
) -> None:  # fmt: skip
    """Compare a call over pages, all of whose other rows and entries are wrong, with float64 on the CPU."""
    c = pages_of(
        lengths, page_size, kv_heads=kv_heads, head_dim=dims[0], head_dim_v=dims[1], page_layout=page_layout,
        dtype=dtype,
    )  # fmt: skip
    torch.manual_seed(len(lengths))
    q = torch.randn(len(lengths), queries, heads, dims[0]).to(dtype)
    own = own_of(variant, len(lengths), queries, heads)
    call = {"variant": variant, "page_layout": page_layout, "return_lse": True}
    wanted = attngen.attention_paged(
        q.double(), c.k_pages.double(), c.v_pages.double(), c.page_table, c.seqused_k, backend="reference", **call,
        **own,
    )  # fmt: skip
    tensors = [tensor.cuda() for tensor in (q, c.k_pages, c.v_pages, c.page_table, c.seqused_k)]
    close(attngen.attention_paged(*tensors, package=PACKAGE, **call, **on_gpu(own), **given), wanted)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (8, 2), (12, 4), (64, 1), (128, 1)])
@pytest.mark.parametrize("queries", [1, 5, 16, 70])
def test_heads_and_queries(heads: int, kv_heads: int, queries: int) -> None:
    lengths = [0, 1, 63, 64, 65, 200, 1500] if queries < 70 else [0, 65, 500]
    paged("causal", lengths, heads=heads, kv_heads=kv_heads, queries=queries)


@pytest.mark.parametrize("page_size", [1, 16, 48, 64, 128])
@pytest.mark.parametrize("queries", [1, 40])
def test_pages(page_size: int, queries: int) -> None:
    paged("causal", [17, 130, 900], page_size=page_size, queries=queries, page_layout="HND" if queries == 1 else "NHD")


@pytest.mark.parametrize(
    "variant", ["full", "sliding_window", "softcap", "causal_sink", "alibi", "chunked", "heads_windows"]
)
@pytest.mark.parametrize("queries", [1, 9, 40])
def test_masks_and_scores(variant: str, queries: int) -> None:
    paged(variant, [0, 5, 100, 1200], queries=queries)


@pytest.mark.parametrize("dims", [(264, 264), (320, 320), (384, 384), (512, 64), (40, 504)], ids=str)
def test_padded_head_dims(dims: tuple[int, int]) -> None:
    paged("causal", [3, 64, 700], dims=dims, heads=32, queries=3)


def test_float16() -> None:
    paged("causal", [3, 64, 700], dtype=torch.float16, heads=32, queries=3)


@pytest.mark.parametrize("given", [{"num_splits": 1}, {"num_splits": 5}, {"split_size": 128}, {"split_size": 1000}])
@pytest.mark.parametrize("queries", [2, 40])
def test_splits_that_the_call_fixes(given: dict[str, int], queries: int) -> None:
    paged("causal", [0, 40, 3000, 1999], queries=queries, **given)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 1)])
@pytest.mark.parametrize("shape", [(1, 1, 700), (2, 3, 333), (1, 130, 130), (2, 40, 20), (1, 700, 1000), (8, 900, 300)])
@pytest.mark.parametrize("variant", ["causal", "full"])
def test_dense(variant: str, shape: tuple[int, int, int], heads: int, kv_heads: int) -> None:
    batch, queries, keys = shape
    torch.manual_seed(7)
    q = torch.randn(batch, queries, heads, 512).bfloat16()
    k, v = (torch.randn(batch, keys, kv_heads, 512).bfloat16() for _ in range(2))
    call = {"variant": variant, "return_lse": True}
    wanted = attngen.attention(q.double(), k.double(), v.double(), backend="reference", **call)
    close(attngen.attention(q.cuda(), k.cuda(), v.cuda(), package=PACKAGE, **call), wanted)


def test_large_logits_raise_the_row_max() -> None:
    torch.manual_seed(8)
    q, k, v = (torch.randn(1, 300, 4, 512).bfloat16() for _ in range(3))
    k = k * torch.linspace(0.1, 3, 300).view(1, -1, 1, 1).bfloat16()
    call = {"variant": "full", "return_lse": True, "softmax_scale": 0.5}
    wanted = attngen.attention(q.double(), k.double(), v.double(), backend="reference", **call)
    out, lse = attngen.attention(q.cuda(), k.cuda(), v.cuda(), package=PACKAGE, **call)
    torch.testing.assert_close(out.cpu().double(), wanted[0], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse.cpu().double(), wanted[1].double(), rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("heads", [2, 64])
def test_packed_sequences(heads: int) -> None:
    """Rows after a sequence's keys belong to the next one, which holds NaN here and there."""
    of_q, of_k = [70, 1, 0, 12], [70, 300, 5, 4]
    torch.manual_seed(9)
    q = torch.randn(sum(of_q), heads, 512).bfloat16()
    k, v = (torch.randn(sum(of_k), 1, 512).bfloat16() for _ in range(2))
    for tensor in (k, v):
        tensor[70 + 300 : 70 + 300 + 5] = torch.nan  # of a sequence without queries
    starts = starts_of(of_q), starts_of(of_k)
    call = {"max_seqlen_q": 70, "max_seqlen_k": 300, "variant": "causal", "return_lse": True}
    exact = [tensor.double().nan_to_num() for tensor in (k, v)]
    wanted = attngen.attention_varlen(q.double(), *exact, *starts, backend="reference", **call)
    on_card = [tensor.cuda() for tensor in (q, k, v, *starts)]
    close(attngen.attention_varlen(*on_card, package=PACKAGE, **call), wanted)


def test_a_graph_follows_its_lengths() -> None:
    """Lengths change in place; a replay has the bits of a call, and so has each call."""
    torch.manual_seed(4)
    k, v = (torch.randn(160, 64, 2, 512).bfloat16().cuda() for _ in range(2))
    table = torch.randperm(160).int().view(4, 40).cuda()
    q, lengths = torch.randn(4, 2, 8, 512).bfloat16().cuda(), torch.tensor([2560, 9, 1, 700]).int().cuda()

    def call() -> tuple[Tensor, Tensor]:
        out = attngen.attention_paged(q, k, v, table, lengths, package=PACKAGE, variant="causal", return_lse=True)
        assert isinstance(out, tuple)
        return out

    first = call()
    assert all(torch.equal(a, b) for _ in range(10) for a, b in zip(call(), first, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for new in ([64, 2560, 0, 129], [1, 1, 1, 1], [2560, 2560, 2560, 2560]):
        lengths.copy_(torch.tensor(new).int())
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(call(), captured, strict=True)), new
