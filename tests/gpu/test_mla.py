"""Latent attention (``v: key``) against float64: heads, queries, pages, splits and graphs."""

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
from tests.gpu.family import compiled_kernels, in_graph, known
from tests.gpu.test_decode import close, on_gpu, own_of
from tests.integrations.engines.stubs import imported_with
from tests.integrations.sglang import sglang_stub
from tests.integrations.vllm import vllm_mla_cases, vllm_stub
from tests.runtime.pages import cache as pages_of
from tests.runtime.pages import starts_of

PACKAGE = "mla_tests"
VALUES = 512


def to_build() -> list[Prepared]:
    return list(prepare_each(load_spec(Path(__file__).with_name("mla.yaml")))[0])


@known
def kernels() -> tuple[list[Kernel], Package]:
    """Compile the kernels of the spec, which alone are known as the package: no other takes a call."""
    wanted = to_build()
    assert {one.plan.schedule for one in wanted if one.plan.v_of_key} == {"hopper_mla"}
    built = compiled_kernels(wanted)
    return built, package_of_kernels(built, "tests/gpu/test_mla")


@pytest.fixture(autouse=True)
def _known() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("kernels whose values are keys are for Hopper")
    kernels()


def paged(
    variant: str, lengths: list[int], *, heads: int = 16, queries: int = 1, page_size: int = 64, head_dim: int = 576,
    dtype: torch.dtype = torch.bfloat16, page_layout: str = "NHD", scale: float = 1.0, **given: Any,
) -> None:  # fmt: skip
    """Compare a call over pages, all of whose other rows and entries are wrong, with float64 on the CPU."""
    c = pages_of(lengths, page_size, kv_heads=1, head_dim=head_dim, page_layout=page_layout, dtype=dtype)
    torch.manual_seed(len(lengths))
    q = (scale * torch.randn(len(lengths), queries, heads, head_dim)).to(dtype)
    own = own_of(variant, len(lengths), queries, heads)
    call = {"variant": variant, "page_layout": page_layout, "return_lse": True}
    cache = c.k_pages.double()
    wanted = attngen.attention_paged(
        q.double(), cache, cache[..., :VALUES], c.page_table, c.seqused_k, backend="reference", **call, **own
    )
    cache = c.k_pages.cuda()
    actual = attngen.attention_paged(
        q.cuda(), cache, cache[..., :VALUES], c.page_table.cuda(), c.seqused_k.cuda(), package=PACKAGE, **call,
        **on_gpu(own), **given,
    )  # fmt: skip
    close(actual, wanted)


@pytest.mark.parametrize("heads", [1, 8, 16, 24, 64, 128])
@pytest.mark.parametrize("queries", [1, 2, 5, 16])
def test_heads_and_queries(heads: int, queries: int) -> None:
    paged("causal", [0, 1, 63, 64, 65, 200, 1500], heads=heads, queries=queries)


@pytest.mark.parametrize(("heads", "queries"), [(16, 1), (32, 1), (8, 4), (96, 1), (128, 2)])
def test_large_logits(heads: int, queries: int) -> None:
    """The row max follows the running max again and again."""
    paged("causal", [0, 5, 64, 3000], heads=heads, queries=queries, scale=6.0)


@pytest.mark.parametrize(("heads", "lengths"), [(16, [9000]), (128, [9000]), (128, [700] * 40), (16, [640, 900] * 40)])
def test_partial_results_are_merged_again_and_again(heads: int, lengths: list[int]) -> None:
    """Calls one after the other, and replays of a graph, have the bits of the first one."""
    torch.manual_seed(0)
    pages = -(-max(lengths) // 64)
    cache = torch.randn(len(lengths) * pages, 64, 1, 576).bfloat16().cuda()
    table = torch.randperm(len(lengths) * pages).int().view(len(lengths), pages).cuda()
    q = torch.randn(len(lengths), 1, heads, 576).bfloat16().cuda()
    used = torch.tensor(lengths, dtype=torch.int32).cuda()

    def call() -> Tensor:
        out = attngen.attention_paged(q, cache, cache[..., :VALUES], table, used, package=PACKAGE)
        assert isinstance(out, Tensor)
        return out

    first = call()
    graph, replayed = in_graph(call)
    for _ in range(20):
        replayed.zero_()
        graph.replay()
        assert torch.equal(replayed, first)
        assert torch.equal(call(), first)
    paged("causal", lengths[:3], heads=heads)


@pytest.mark.parametrize("page_size", [1, 8, 16, 48, 64, 80, 128])
@pytest.mark.parametrize("heads", [16, 128])
def test_pages(page_size: int, heads: int) -> None:
    paged("causal", [17, 130, 900], page_size=page_size, heads=heads, page_layout="HND" if heads == 16 else "NHD")


@pytest.mark.parametrize(
    "variant", ["full", "sliding_window", "softcap", "causal_sink", "alibi", "chunked", "heads_windows"]
)
@pytest.mark.parametrize("queries", [1, 9])
def test_masks_and_scores(variant: str, queries: int) -> None:
    paged(variant, [0, 5, 100, 1200], queries=queries)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_512_columns(dtype: torch.dtype) -> None:
    paged("causal", [3, 64, 700], head_dim=512, dtype=dtype, heads=32, queries=3)


@pytest.mark.parametrize("given", [{"num_splits": 1}, {"num_splits": 5}, {"split_size": 128}, {"split_size": 1000}])
@pytest.mark.parametrize("heads", [16, 128])
def test_splits_that_the_call_fixes(given: dict[str, int], heads: int) -> None:
    paged("causal", [0, 40, 3000, 1999], heads=heads, queries=2, **given)


def test_a_split_size_makes_rows_depend_on_their_own_sequence() -> None:
    """A sequence alone, and among others, has the same bits."""
    torch.manual_seed(0)
    cache, table = torch.randn(96, 64, 1, 576).bfloat16().cuda(), torch.arange(96, dtype=torch.int32).view(3, 32).cuda()
    q, lengths = torch.randn(3, 1, 128, 576).bfloat16().cuda(), torch.tensor([2000, 77, 1024], dtype=torch.int32).cuda()

    def call(rows: slice) -> Tensor:
        out = attngen.attention_paged(
            q[rows], cache, cache[..., :VALUES], table[rows], lengths[rows], package=PACKAGE, split_size=256
        )
        assert isinstance(out, Tensor)
        return out

    every = call(slice(None))
    for b in range(3):
        assert torch.equal(call(slice(b, b + 1)), every[b : b + 1])


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("shape", [(1, 1, 700), (2, 3, 333), (1, 130, 130), (2, 40, 20)])
@pytest.mark.parametrize("variant", ["causal", "full"])
def test_dense(variant: str, shape: tuple[int, int, int], heads: int) -> None:
    batch, queries, keys = shape
    torch.manual_seed(7)
    q, k = torch.randn(batch, queries, heads, 576).bfloat16(), torch.randn(batch, keys, 1, 576).bfloat16()
    call = {"variant": variant, "return_lse": True}
    exact = k.double()
    wanted = attngen.attention(q.double(), exact, exact[..., :VALUES], backend="reference", **call)
    on_card = k.cuda()
    close(attngen.attention(q.cuda(), on_card, on_card[..., :VALUES], package=PACKAGE, **call), wanted)


@pytest.mark.parametrize("heads", [8, 128])
def test_packed_sequences(heads: int) -> None:
    """Rows after a sequence's keys belong to the next one, which holds NaN here and there."""
    of_q, of_k = [70, 1, 0, 12], [70, 300, 5, 4]
    torch.manual_seed(9)
    q, k = torch.randn(sum(of_q), heads, 576).bfloat16(), torch.randn(sum(of_k), 1, 576).bfloat16()
    k[70 + 300 : 70 + 300 + 5] = torch.nan  # of a sequence without queries
    starts = starts_of(of_q), starts_of(of_k)
    call = {"max_seqlen_q": 70, "max_seqlen_k": 300, "variant": "causal", "return_lse": True}
    exact = k.double().nan_to_num()
    wanted = attngen.attention_varlen(
        q.double(), exact, exact[..., :VALUES], *starts, backend="reference", **call
    )  # fmt: skip
    on_card = k.cuda()
    close(
        attngen.attention_varlen(
            q.cuda(), on_card, on_card[..., :VALUES], *(start.cuda() for start in starts), package=PACKAGE, **call
        ),
        wanted,
    )


@pytest.mark.parametrize("heads", [16, 128])
def test_a_graph_follows_its_lengths(heads: int) -> None:
    """Lengths change in place; a replay has the bits of a call, and so has each call."""
    torch.manual_seed(4)
    cache = torch.randn(160, 64, 1, 576).bfloat16().cuda()
    table = torch.randperm(160).int().view(4, 40).cuda()
    q, lengths = torch.randn(4, 2, heads, 576).bfloat16().cuda(), torch.tensor([2560, 9, 1, 700]).int().cuda()

    def call() -> tuple[Tensor, Tensor]:
        out = attngen.attention_paged(
            q, cache, cache[..., :VALUES], table, lengths, package=PACKAGE, variant="causal", return_lse=True
        )
        assert isinstance(out, tuple)
        return out

    first = call()
    assert all(torch.equal(a, b) for _ in range(10) for a, b in zip(call(), first, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for new in ([2560, 9, 1, 700], [64, 2560, 0, 129], [1, 1, 1, 1], [2560, 2560, 2560, 2560]):
        lengths.copy_(torch.tensor(new).int())
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(call(), captured, strict=True)), new


def test_latents_are_appended() -> None:
    torch.manual_seed(2)
    cache, table = torch.zeros(9, 16, 1, 576).bfloat16(), torch.randperm(9).int().view(3, 3)
    latents, rotary = torch.randn(3, 2, 1, VALUES).bfloat16(), torch.randn(3, 2, 1, 64).bfloat16()
    angles, lengths = torch.randn(64, 32), torch.tensor([0, 15, 30], dtype=torch.int32)

    def append(device: str) -> Tensor:
        rows = cache.to(device, copy=True)
        attngen.append_kv(
            rotary.to(device), latents.to(device), rows[..., VALUES:], rows[..., :VALUES], lengths.to(device),
            page_table=table.to(device), rotary_cos=angles.cos().to(device), rotary_sin=angles.sin().to(device),
            rotary_interleaved=True,
        )  # fmt: skip
        return rows.cpu()

    torch.testing.assert_close(append("cuda"), append("cpu"), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("queries", [(1, 1, 1), (1, 5, 3)])
def test_vllms_backend(queries: tuple[int, ...]) -> None:
    vllm_mla_cases.check_on_gpu(vllm_mla_cases.decode(queries, (400, 333, 7)), "auto")


def test_vllms_prompts() -> None:
    with imported_with(vllm_stub, "attngen.integrations.vllm.backend", "attngen.integrations.vllm.mla") as mla:
        vllm_mla_cases.check_prompts(mla.AttngenMLAPrefill(vllm_mla_cases.SCALE), torch.empty(0).bfloat16().cuda())


def test_sglangs_backend() -> None:
    modules = (f"attngen.integrations.sglang.{name}" for name in ("backend", "mla"))
    engine = sglang_stub.latent(torch.empty(0).bfloat16().cuda())
    with imported_with(sglang_stub, *modules, "tests.integrations.sglang.sglang_mla_cases") as cases:
        for mode in cases.STEPS:
            for page_size in (1, 16):
                cases.check_absorbed(engine, mode, page_size)
        cases.check_expanded(engine)
