"""vLLM's indexer with attngen's scores, with a stub in vLLM's place; its release itself: ``engine_contracts``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.integrations.engines.index_batches import index_batch
from tests.integrations.engines.sparse_batches import sparse_batch
from tests.integrations.engines.stubs import imported_with
from tests.integrations.vllm import test_vllm_sparse_mla as sparse
from tests.integrations.vllm import vllm_indexer_cases as cases
from tests.integrations.vllm import vllm_stub
from tests.integrations.vllm.vllm_stub import sparse_attn_indexer


class Indexer:
    """A model's module with the keys of a layer, in a module that calls ``sparse_attn_indexer``."""


@pytest.fixture(scope="module")
def own() -> Iterator[Any]:
    names = (f"attngen.integrations.vllm.{name}" for name in ("backend", "mla", "sparse_mla", "indexer"))
    with imported_with(vllm_stub, *names) as module:
        yield module


@pytest.fixture
def select(own: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The function in the place of vLLM's, for a layer that is served."""
    monkeypatch.setattr(sys.modules[__name__], "sparse_attn_indexer", vllm_stub.sparse_attn_indexer)
    own.serve(cases.layer(Indexer), vllm_stub.Config().parallel_config)
    yield lambda *args, **options: sparse_attn_indexer(*args, **options)
    own._served.clear()


def step(monkeypatch: pytest.MonkeyPatch, attention: Any = None, **metadata: Any) -> None:
    """Let a step's metadata be these."""
    given = {"num_prefills": 0, "num_decodes": 0, "num_decode_tokens": 0, "prefill": None, "decode": None, **metadata}
    of_layers = {cases.CACHE: SimpleNamespace(**given), cases.ATTENTION: attention}
    monkeypatch.setattr(vllm_stub.CONTEXT, "attn_metadata", of_layers)


def decode(made: Any, first: int = 0, **changed: Any) -> dict[str, Any]:
    """Metadata of decoding requests from one on."""
    used = made.used[first:]
    given = {
        "block_table": made.table[first:], "seq_lens": used[:, None], "decode_lens": torch.ones_like(used),
        "requires_padding": False, **changed,
    }  # fmt: skip
    tokens = sum(made.queries[first:])
    return {
        "num_decodes": len(used), "num_decode_tokens": tokens, "decode": SimpleNamespace(**given),
        "max_seq_len": max(made.lengths[first:]),
    }  # fmt: skip


def test_chunks_of_prompts(select: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests side by side in a chunk, and one that is cut between its tokens."""
    made = index_batch((70, 9, 40), (70, 200, 130)).spread(96)
    parts = [(slice(0, 2), slice(0, 79)), (slice(2, 3), slice(79, 90)), (slice(2, 3), slice(90, 119))]
    prefill = SimpleNamespace(chunks=[cases.chunk(made, *part) for part in parts])
    step(monkeypatch, num_prefills=3, prefill=prefill)
    assert cases.select(select, made) is made.out
    made.check(made.out)
    made.out.fill_(7)
    cases.select(select, made)  # another layer
    made.check(made.out)


def test_rows_of_a_rank(select: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = index_batch((70, 9, 40), (70, 200, 130))
    parts = [(slice(0, 1), slice(0, 70)), (slice(1, 3), slice(70, 119))]
    prefill = SimpleNamespace(chunks=[cases.chunk(made, *part) for part in parts], rows_of_rank_from=75)
    step(monkeypatch, num_prefills=3, prefill=prefill)
    cases.select(select, made)
    assert (made.out[:75] == 5).all()
    whole = index_batch((70, 9, 40), (70, 200, 130))
    step(monkeypatch, num_prefills=3, prefill=SimpleNamespace(chunks=[cases.chunk(whole, *part) for part in parts]))
    cases.select(select, whole)
    assert torch.equal(whole.out[75:], made.out[75:])


@pytest.mark.parametrize("in_graph", [False, True])
def test_decoding_and_padding(select: Any, in_graph: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made = index_batch((1, 1, 1, 1), (33, 1, 0, 130), width=9)
    mode = vllm_stub.CUDAGraphMode.FULL if in_graph else vllm_stub.CUDAGraphMode.NONE
    monkeypatch.setattr(vllm_stub.CONTEXT, "cudagraph_runtime_mode", mode)
    step(monkeypatch, **decode(made))
    cases.select(select, made)
    made.check(made.out)


def test_drafts(select: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many of each request, and a request that pads a graph."""
    made = index_batch((2, 2, 2), (33, 2, 130))
    step(monkeypatch, **decode(made, seq_lens=made.seen.view(3, 2), decode_lens=made.starts.diff()))
    cases.select(select, made)
    made.check(made.out)
    padded = index_batch((2, 2, 2, 0), (33, 2, 130, 0))
    lengths = torch.cat([padded.seen.view(3, 2), torch.zeros(1, 2, dtype=torch.int32)])
    counts = padded.starts.diff()
    step(monkeypatch, **decode(padded, seq_lens=lengths, decode_lens=counts, requires_padding=True))
    cases.select(select, padded)
    padded.check(padded.out)


def test_a_mixed_step_with_tokens_behind_it(select: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = index_batch((1, 1, 70, 9), (33, 200, 70, 130), extra_tokens=3)
    of_decode = decode(index_batch((1, 1), (33, 200)), block_table=made.table[:2])
    prefill = SimpleNamespace(chunks=[cases.chunk(made, slice(2, 4), slice(2, 81))])
    step(monkeypatch, num_prefills=2, prefill=prefill, **of_decode)
    cases.select(select, made, skip_topk_buffer_clear=False)
    made.check(made.out)


def test_steps_whose_attention_reads_all_keys(select: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = index_batch((9,), (9,))
    attention = SimpleNamespace(prefill=SimpleNamespace(use_dense_mha=True), num_decode_tokens=0)
    prefill = SimpleNamespace(chunks=[cases.chunk(made, slice(0, 1), slice(0, 9))])
    step(monkeypatch, attention, num_prefills=1, prefill=prefill)
    cases.select(select, made, skip_topk_buffer_clear=False)
    assert (made.out == 7).all()
    cases.select(select, made, dense_mha_metadata_layer_name="")
    made.check(made.out)


def test_the_run_that_measures_memory(select: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_stub.CONTEXT, "attn_metadata", None)
    made = index_batch((9,), (9,))
    assert cases.select(select, made, pages=torch.tensor([])) is made.out


def test_layers_of_other_backends_keep_theirs(select: Any, own: Any) -> None:
    made = index_batch((9,), (9,))
    args, options = cases.select(select, made, cache="layers.7.indexer.k_cache")
    assert args[1] == "layers.7.indexer.k_cache"
    assert args[13] is made.out
    assert options["topk_backend"] == "auto"
    bound = sparse_attn_indexer
    own.serve(cases.layer(Indexer), vllm_stub.Config().parallel_config)
    assert sparse_attn_indexer is bound


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"head_dim": 64}, "an indexer with 4 heads of 64, only with up to 128 of 128"),
        ({"n_head": 130}, "an indexer with 130 heads of 128"),
        ({"quant_block_size": 64}, "keys of an indexer in other forms"),
        ({"indexer_op": SimpleNamespace(use_fp4_cache=True)}, "keys of an indexer in other forms"),
    ],
)
def test_what_is_not_served_is_said_in_words(own: Any, changed: dict[str, Any], words: str) -> None:
    parallel = vllm_stub.Config().parallel_config
    with pytest.raises(NotImplementedError, match=f"ATTNGEN_INDEXER does not serve {words}"):
        own.serve(cases.layer(Indexer, **changed), parallel)
    parallel.decode_context_parallel_size = 2
    with pytest.raises(NotImplementedError, match="ATTNGEN_INDEXER does not serve context parallelism"):
        own.serve(cases.layer(Indexer), parallel)
    with pytest.raises(NotImplementedError, match="which do not call sparse_attn_indexer"):
        own.serve(SimpleNamespace(), parallel)


def test_layers_ask_for_it_by_the_environment(own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made, mla = sparse_batch((1,), (4,)), import_module("attngen.integrations.vllm.sparse_mla")
    monkeypatch.setattr(own, "_served", set())
    monkeypatch.setattr(vllm_stub.SparseMLACommonImpl, "__init__", _init)
    for value, served in (("0", set()), ("1", {cases.CACHE})):
        monkeypatch.setenv("ATTNGEN_INDEXER", value)
        sparse.impl(mla, made, indexer=cases.layer(Indexer))
        sparse.impl(mla, made, indexer=None)
        assert own._served == served


def _init(self: Any, heads: int, size: int, scale: float, *others: Any, kv_lora_rank: int, **latent: Any) -> None:
    del others, latent
    self.num_heads, self.head_size, self.scale, self.kv_lora_rank = heads, size, scale, kv_lora_rank
