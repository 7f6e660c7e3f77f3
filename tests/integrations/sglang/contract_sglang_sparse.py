"""Sparse latent attention inside of a release of SGLang, on the CPU: run by ``engine_contracts``.

The backend derives from SGLang's own, whose metadata, dispatch, pools and registries run here. A model runner and a
model are not made, and lists of slots are given in the indexer's place.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt import runtime_context
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.environ import envs
from sglang.srt.layers.attention import attention_registry, dsa_backend, mqa_logits_utils
from sglang.srt.layers.attention.dsa import dsa_indexer
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.models.deepseek_common import utils as models
from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry, handle_attention_dsa
from sglang.srt.runtime_context import get_parallel
from torch import Tensor

from attngen.integrations.sglang import plugin
from tests.integrations.engines.sparse_batches import RANK, WIDE
from tests.integrations.sglang import sglang_dsa_cases as cases


@pytest.fixture(autouse=True)
def _context(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """SGLang's context of a server, and its functions that ask for a GPU or run on one."""
    context = cases.settings()
    published = {
        "exec": context["get_exec"](), "spec": context["get_spec"](),
        "schedule": SimpleNamespace(enable_mixed_chunk=False), "disagg": SimpleNamespace(disaggregation_mode="null"),
    }  # fmt: skip
    monkeypatch.setattr(runtime_context._CONTEXT, "_config_bags", published)
    monkeypatch.setattr(dsa_backend.DSATopKBackend, "should_use_topk_v2", lambda self: False)
    monkeypatch.setattr(dsa_backend, "seqlens_expand_triton", expanded)
    monkeypatch.setattr(dsa_backend, "concat_mla_absorb_q_general", lambda *parts: torch.cat(parts, dim=-1))
    monkeypatch.setattr(dsa_backend, "can_dsa_prefill_cp_interleave", lambda batch: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *given: (9, 0))
    with get_parallel().override(**vars(context["get_parallel"]())):
        yield


def expanded(counts: Tensor, lengths: Tensor, total: int, most: int) -> Tensor:
    """SGLang's operator: how many keys each of the queries of some requests sees."""
    rows = [torch.arange(length - count + 1, length + 1) for count, length in zip(counts, lengths, strict=True)]
    made = torch.cat(rows).int()
    assert len(made) == total
    return made


def pool_of(made: Any) -> Any:
    """SGLang's pool, with the batch's rows in it."""
    packed, stored = made.bytes_of_rows is not None, made.stored.flatten(0, 1)
    pool = empty_pool(len(stored), packed=packed)
    assert pool.dsa_kv_cache_store_fp8 == packed
    pool.kv_buffer[0][: len(stored), 0] = stored.view(pool.kv_buffer[0].dtype)
    return pool


def empty_pool(rows: int, *, packed: bool = False) -> Any:
    """SGLang's pool of so many tokens."""
    return DSATokenToKVPool(
        size=-(-rows // 64) * 64, page_size=64, kv_lora_rank=RANK, qk_rope_head_dim=WIDE - RANK, layer_num=1,
        dtype=torch.float8_e4m3fn if packed else torch.bfloat16, device="cpu", index_head_dim=128,
        enable_memory_saver=False, kv_cache_dim=656 if packed else WIDE,
    )  # fmt: skip


def backend(made: Any) -> Any:
    slots = cases.slots_of_requests(made)
    padded = torch.nn.functional.pad(slots, (0, max(0, 192 - slots.shape[1])))
    return cases.sglang_dsa.AttngenDSABackend(cases.runner(pool_of(made), padded))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("mode", cases.STEPS)
def test_steps(mode: str, packed: bool) -> None:
    made, kind = cases.batch(mode, packed=packed), ForwardMode[mode]
    one = backend(made)
    one.init_forward_metadata(cases.step(kind, made))
    cases.check(one, kind, made)


def test_sinks() -> None:
    made = cases.batch("EXTEND")
    one = backend(made)
    one.init_forward_metadata(cases.step(ForwardMode.EXTEND, made))
    cases.check(one, ForwardMode.EXTEND, made, sinks=torch.tensor([0.5, -1.0, 3.0]))


@pytest.mark.parametrize("packed", [False, True])
def test_decoding_in_a_graph(packed: bool) -> None:
    """The metadata that a captured graph reads, filled for one batch, and then for another."""
    made = cases.batch("DECODE", packed=packed)
    one = backend(made)
    one.init_cuda_graph_state(4, 4)
    batch = cases.step(ForwardMode.DECODE, made)
    one.init_forward_metadata_out_graph(batch, in_capture=True)
    captured = one.forward_metadata.dsa_cache_seqlens_int32.data_ptr()
    cases.check(one, ForwardMode.DECODE, made)
    one.init_forward_metadata_out_graph(batch)
    assert one.forward_metadata.dsa_cache_seqlens_int32.data_ptr() == captured
    cases.check(one, ForwardMode.DECODE, made)


def test_short_prompts_over_keys_of_each_head() -> None:
    cases.check_short_prompts(backend(cases.batch("EXTEND")), ForwardMode.EXTEND)


def test_what_models_ask_for() -> None:
    backend(cases.batch("DECODE"))
    assert AttentionBackendRegistry.get_handler("attngen") is handle_attention_dsa
    assert models.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS.count("attngen") == 1


def test_which_backend_a_model_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    made = SimpleNamespace(AttngenDSABackend=lambda runner: "sparse", AttngenMLABackend=lambda runner: "dense")
    monkeypatch.setattr(plugin, "import_module", lambda path: made)
    for topk, name in ((2048, "sparse"), (None, "dense")):
        config = SimpleNamespace(architectures=["DeepseekV32ForCausalLM"], index_topk=topk)
        model = SimpleNamespace(attention_arch=AttentionArch.MLA, hf_config=config)
        assert plugin._make(SimpleNamespace(model_config=model)) == name


def test_models_that_choose_blocks_take_sglangs_backends() -> None:
    """QSA takes its own in place of the one that the option names, and MSA beside it, for layers that choose blocks."""
    wrapper = inspect.getsource(attention_registry.attn_backend_wrapper)
    assert "full_attn_backend = QwenSparseAttnBackend(runner)" in wrapper
    assert "sparse_backend = MiniMaxSparseAttnBackend(runner)" in wrapper
    index = {"indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 128, "indexer_budget": 2048}
    text = SimpleNamespace(**index, indexer_compress_ratio=4)
    model = SimpleNamespace(hf_config=SimpleNamespace(text_config=text, get_text_config=lambda: text, **vars(text)))
    with pytest.raises(NotImplementedError, match="layers of QSA a backend of its own"):
        plugin._make(SimpleNamespace(model_config=model))


@pytest.fixture
def own_indexer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's class of indexers, with its own methods again afterwards."""
    monkeypatch.setenv("ATTNGEN_INDEXER", "1")
    for name in ("_get_topk_paged", "_get_topk_ragged"):
        monkeypatch.setattr(dsa_indexer.Indexer, name, getattr(dsa_indexer.Indexer, name))
    return dsa_indexer.Indexer


def backend_for_indices(made: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A backend whose pool has the keys of a batch of an indexer."""
    pool = empty_pool(64 * len(made.pages))
    pool.index_k_with_scale_buffer[0][: len(made.pages)] = made.pages.flatten(1)
    monkeypatch.setattr(import_module("attngen.integrations.sglang.indexer"), "get_token_to_kv_pool", lambda: pool)
    slots = torch.nn.functional.pad(cases.index_slots(made), (0, 64))
    return cases.sglang_dsa.AttngenDSABackend(cases.runner(pool, slots))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("mode", cases.STEPS)
def test_steps_of_an_indexer(mode: str, fused: bool, own_indexer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made, kind = cases.index_step(mode), ForwardMode[mode]
    monkeypatch.setattr(envs, "SGLANG_DSA_FUSE_TOPK", SimpleNamespace(get=lambda: fused))
    one = backend_for_indices(made, monkeypatch)
    assert one.use_fused_topk == fused
    one.init_forward_metadata(cases.step(kind, made))
    chosen = cases.selected(one, cases.indexer(own_indexer), kind, made)
    made.check(made.positions(chosen) if fused else chosen)


def test_prompts_of_an_indexer_in_parts(own_indexer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made, kind = cases.index_step("EXTEND"), ForwardMode.EXTEND
    one = backend_for_indices(made, monkeypatch)
    one.init_forward_metadata(cases.step(kind, made))
    monkeypatch.setattr(mqa_logits_utils, "mqa_logits_needs_budget_check", lambda **sizes: True)
    monkeypatch.setattr(own_indexer, "_get_mqa_logits_budget_bytes", lambda self, device: 4 * 100 * 2)
    assert cases.selected(one, cases.indexer(own_indexer), kind, made, into=made.out) is made.out
    made.check(made.positions(made.out))


def test_an_indexer_in_a_graph(own_indexer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made, mode = cases.index_step("DECODE"), ForwardMode.DECODE
    one = backend_for_indices(made, monkeypatch)
    one.init_cuda_graph_state(4, 4)
    batch = cases.step(mode, made)
    one.init_forward_metadata_out_graph(batch, in_capture=True)
    captured = one.get_indexer_metadata(0, batch)
    one.init_forward_metadata_out_graph(batch)  # which fills the tables
    filled = one.get_indexer_metadata(0, batch)
    for read in ("get_page_table_64", "get_seqlens_int32"):
        assert getattr(captured, read)().data_ptr() == getattr(filled, read)().data_ptr()
    made.check(made.positions(cases.selected(one, cases.indexer(own_indexer), mode, made)))


def test_indexers_of_other_backends(own_indexer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They keep SGLang's methods, whose arguments are those that attngen's take."""
    made = cases.index_step("DECODE")
    theirs = {name: getattr(own_indexer, name) for name in ("_get_topk_paged", "_get_topk_ragged")}
    arguments = {name: list(inspect.signature(method).parameters) for name, method in theirs.items()}
    own = import_module("attngen.integrations.sglang.indexer")
    assert list(inspect.signature(own._few_tokens).parameters)[1:] == arguments["_get_topk_paged"][1:]
    assert list(inspect.signature(own._prompts).parameters)[1:] == arguments["_get_topk_ragged"][1:]
    backend_for_indices(made, monkeypatch)
    monkeypatch.setenv("ATTNGEN_INDEXER", "0")
    one = backend_for_indices(made, monkeypatch)
    one.init_forward_metadata(cases.step(ForwardMode.DECODE, made))
    asked = []
    monkeypatch.setattr(dsa_indexer, "get_token_to_kv_pool", lambda: asked.append(1))
    with pytest.raises(AttributeError, match="index_page_size"):
        cases.selected(one, cases.indexer(own_indexer), ForwardMode.DECODE, made)
    assert asked
