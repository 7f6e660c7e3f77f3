"""Sparse latent attention of vLLM and SGLang on the GPU, with stubs in the engines' places, and the indexer of both,
against float64; and captured graphs that serve other lists and longer requests."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attngen.integrations.engines.indexer import Requests, index_keys, require_kernels, rows_of, select_keys
from attngen.integrations.engines.listed_rows import attend_to_listed, cache_rows
from attngen.runtime.operations.index_scores.kernel import SCORES, PreparedScores
from attngen.runtime.registry.lookup import registry
from tests.gpu.packages import indexed
from tests.integrations.engines.index_batches import PAGE, index_batch
from tests.integrations.engines.sparse_batches import BLOCK, SparseBatch, sparse_batch
from tests.integrations.engines.stubs import imported_with
from tests.integrations.sglang import sglang_stub
from tests.integrations.vllm import vllm_stub

#: A prompt, a part of one, decoding and drafts; more keys than a query lists.
QUERIES, LENGTHS, TOPK = (70, 40, 1, 3), (70, 700, 901, 333), 256

#: Heads, columns, and vLLM's name of the cache.
FORMS = [(1, 576, "auto"), (8, 576, "auto"), (64, 576, "auto"), (128, 576, "auto"), (16, 512, "auto"),
         (8, 576, "fp8_ds_mla"), (128, 576, "fp8_ds_mla"), (16, 512, "fp8_ds_mla"), (16, 576, "fp8"),
         (16, 512, "fp8")]  # fmt: skip

#: Of caches in e4m3.
K_SCALE = 0.02


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("kernels whose values are keys are for Hopper")
    indexed("engines_sparse")
    registry.clear()


def large(heads: int, columns: int, cache: str, **more: Any) -> SparseBatch:
    made = sparse_batch(QUERIES, LENGTHS, heads=heads, columns=columns, topk=TOPK, **more)
    if cache == "fp8":
        return made.in_e4m3(K_SCALE)
    return made.packed() if cache != "auto" else replace(made, q=made.q.bfloat16(), cache=made.cache.bfloat16())


@pytest.mark.parametrize(("heads", "columns", "cache"), FORMS)
def test_vllms_backend(heads: int, columns: int, cache: str) -> None:
    made = large(heads, columns, cache, padded=2, extra_tokens=3).to("cuda")
    layer = SimpleNamespace(_k_scale=torch.tensor(K_SCALE, device="cuda"))
    modules = [f"attngen.integrations.vllm.{name}" for name in ("backend", "mla", "sparse_mla")]
    with imported_with(vllm_stub, *modules, "tests.integrations.vllm.vllm_sparse_mla_cases") as cases:
        sparse_mla = cases.import_module(modules[-1])
        builder = sparse_mla.AttngenSparseMLAMetadataBuilder(
            SimpleNamespace(block_size=BLOCK), ["layer"], vllm_stub.Config(), made.q.device
        )
        metadata = builder.build(0, cases.common(made, vllm_stub.CommonAttentionMetadata))
        for lse in (False, True, False):  # later layers, with caches of their own
            impl = sparse_mla.AttngenSparseMLAImpl(
                heads, columns, cases.SCALE, 1, None, None, cache, None, "decoder", None, kv_lora_rank=512,
                topk_indices_buffer=cases.buffer(made),
            )  # fmt: skip
            impl.need_to_return_lse_for_decode = lse
            cases.check(made, impl, metadata, tolerance=0.02, layer=layer)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("mode", ["DECODE", "EXTEND", "TARGET_VERIFY"])
def test_sglangs_backend(mode: str, packed: bool) -> None:
    modules = ("attngen.integrations.sglang.dsa", "tests.integrations.sglang.sglang_dsa_cases")
    with imported_with(sglang_stub, *modules) as cases:
        vars(cases.sglang_dsa).update(cases.settings())
        made, kind = cases.batch(mode, packed=packed).to("cuda"), sglang_stub.ForwardMode[mode]
        backend = cases.sglang_dsa.AttngenDSABackend(
            cases.runner(sglang_stub.DSAPool(made.stored), cases.slots_of_requests(made), device="cuda")
        )
        backend.init_forward_metadata(cases.step(kind, made))
        cases.check(backend, kind, made)


@pytest.mark.parametrize("heads", [32, 64])
def test_the_indexer(heads: int) -> None:
    """Prompts, decoding and drafts, whose keys lie in pages with their scales behind them."""
    require_kernels("cuda")
    made = index_batch((70, 300, 1, 3), (70, 1700, 901, 333), heads=heads, topk=256, extra_tokens=2).to("cuda")
    for batch in (made, made.spread(4096)):
        requests = Requests(batch.table, batch.used, 1700, batch.starts)
        keys = index_keys(batch.pages, PAGE)
        batch.check(select_keys(batch.q, batch.weights, keys, requests, batch.seen, 256))
        slots = select_keys(batch.q, batch.weights, keys, requests, batch.seen, 256, slots=True)
        batch.check(batch.positions(slots))
        for first in range(0, len(batch.q), 100):
            rows = slice(first, min(first + 100, len(batch.q)))
            part = rows_of(requests, rows.start, rows.stop)
            select_keys(
                batch.q[rows], batch.weights[rows], keys, part, batch.seen[rows], 256, out=batch.out[rows]
            )  # fmt: skip
        batch.check(batch.out)
    assert all(isinstance(one, PreparedScores) for one in SCORES.prepared.values())


def test_a_graph_of_the_indexer_serves_longer_requests() -> None:
    """Drafts of two tokens; captured with one key each, in tables that have room for more."""
    made = index_batch((2,) * 8, (2, 70, 901, 333, 64, 65, 1000, 128), heads=64, topk=256, width=64).to("cuda")
    q, weights = (one.unflatten(0, (8, 2)) for one in (made.q, made.weights))
    given = [torch.zeros_like(made.table), torch.ones_like(made.used), torch.ones(8, 2, device="cuda").int()]

    def selected() -> Any:
        requests = Requests(given[0], given[1], 64 * PAGE)
        return select_keys(q, weights, index_keys(made.pages, PAGE), requests, given[2], 256)

    for _ in range(2):
        selected()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = selected()
    for tensor, new in zip(given, (made.table, made.used, made.seen.view(8, 2)), strict=True):
        tensor.copy_(new)
    graph.replay()
    made.check(out.flatten(0, 1))


@pytest.mark.parametrize("packed", [False, True])
def test_a_graph_serves_other_lists(packed: bool) -> None:
    """Captured with empty lists; replayed with those of requests, of which one is padding."""
    made = large(8, 576, "fp8_ds_mla" if packed else "auto", holes=False, extra_tokens=2).to("cuda")
    slots, counts = made.slots(), (made.topk >= 0).sum(-1).int()
    rows, given = cache_rows(made.stored.flatten(0, 1)), (torch.full_like(slots, -1), torch.zeros_like(counts))
    for _ in range(2):
        attend_to_listed(made.q, rows, *given, 0.1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = attend_to_listed(made.q, rows, *given, 0.1, return_lse=True)
    for tensor, new in zip(given, (slots, counts), strict=True):
        tensor.copy_(new)
    graph.replay()
    made.check(out, lse, 0.1, tolerance=0.02)
