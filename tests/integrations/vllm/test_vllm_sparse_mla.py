"""Sparse latent attention in vLLM, with a stub in vLLM's place; its release itself: ``engine_contracts``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attngen.integrations.vllm import plugin
from tests.integrations.engines.sparse_batches import BLOCK, MIXED, RANK, sparse_batch
from tests.integrations.engines.stubs import imported_with
from tests.integrations.vllm import vllm_sparse_mla_cases as cases
from tests.integrations.vllm import vllm_stub


@pytest.fixture(scope="module")
def mla() -> Iterator[Any]:
    modules = (f"attngen.integrations.vllm.{name}" for name in ("backend", "mla", "sparse_mla"))
    with imported_with(vllm_stub, *modules) as module:
        yield module


def impl(mla: Any, made: Any, **changed: Any) -> Any:
    given = {
        "alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "auto", "logits_soft_cap": None,
        "attn_type": "decoder", "kv_sharing_target_layer_name": None, "kv_lora_rank": RANK, **changed,
    }  # fmt: skip
    heads, columns = made.q.shape[1:]
    return mla.AttngenSparseMLAImpl(heads, columns, cases.SCALE, 1, **given, topk_indices_buffer=cases.buffer(made))


def builder(mla: Any) -> Any:
    spec = SimpleNamespace(block_size=BLOCK)
    return mla.AttngenSparseMLAMetadataBuilder(spec, ["layer"], vllm_stub.Config(), torch.device("cpu"))


def metadata(mla: Any, made: Any) -> Any:
    return builder(mla).build(0, cases.common(made, vllm_stub.CommonAttentionMetadata))


@pytest.mark.parametrize("columns", [576, 512])
@pytest.mark.parametrize("in_two_parts", [False, True])
def test_prompts_parts_decoding_and_drafts(mla: Any, columns: int, in_two_parts: bool) -> None:
    made = sparse_batch(columns=columns, padded=2, extra_tokens=3)
    cases.check(made, impl(mla, made), metadata(mla, made), in_two_parts=in_two_parts)


@pytest.mark.parametrize("heads", [1, 16, 65])
def test_any_number_of_heads(mla: Any, heads: int) -> None:
    made = sparse_batch((1, 2), (20, 33), heads=heads)
    cases.check(made, impl(mla, made), metadata(mla, made))


@pytest.mark.parametrize("columns", [576, 512])
def test_a_cache_in_8_bits(mla: Any, columns: int) -> None:
    made = sparse_batch(columns=columns, extra_tokens=1).packed()
    layer = impl(mla, made, kv_cache_dtype="fp8_ds_mla")
    cases.check(made, layer, metadata(mla, made), tolerance=0.02)
    assert layer.supports_dense_mha_prefill == (columns == 576)


@pytest.mark.parametrize("columns", [576, 512])
def test_a_cache_in_e4m3(mla: Any, columns: int) -> None:
    made = sparse_batch(columns=columns, extra_tokens=1).in_e4m3(0.02)
    layer = SimpleNamespace(_k_scale=torch.tensor([0.02]))
    one = impl(mla, made, kv_cache_dtype="fp8")
    cases.check(made, one, metadata(mla, made), tolerance=0.02, layer=layer)


def test_rows_of_other_layers_between_blocks(mla: Any) -> None:
    made = sparse_batch()
    cases.check(made, impl(mla, made), metadata(mla, made), gap=48)


def test_the_log_sum_exp_for_ranks(mla: Any) -> None:
    made = sparse_batch(*MIXED)
    one = impl(mla, made)
    one.need_to_return_lse_for_decode = True
    cases.check(made, one, metadata(mla, made))


def test_another_cache_than_before(mla: Any) -> None:
    made, other = sparse_batch(), sparse_batch(seed=1)
    one = impl(mla, made)
    cases.check(made, one, metadata(mla, made))
    one.topk_indices_buffer = cases.buffer(other)
    cases.check(other, one, metadata(mla, other))


def test_drafts_in_a_captured_loop(mla: Any) -> None:
    made = sparse_batch((1, 1), (20, 33))
    built = metadata(mla, made)
    built.req_id_per_token.fill_(-1)
    builder(mla).update_draft_decode_metadata(built)
    assert built.req_id_per_token.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"alibi_slopes": [1.0]}, "ALiBi"), ({"sliding_window": 5}, "sliding windows"),
        ({"logits_soft_cap": 3.0}, "soft-capping"), ({"attn_type": "encoder"}, "attention of type encoder"),
        ({"kv_lora_rank": 448}, "a rank of 448, only of 512,"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_said_in_words(mla: Any, changed: dict[str, Any], words: str) -> None:
    with pytest.raises(NotImplementedError, match=f"ATTNGEN_MLA_SPARSE does not serve {words} with sparse latent"):
        impl(mla, sparse_batch((1,), (4,)), **changed)


def test_a_mask_of_ones_own_is_refused(mla: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_stub, "CURRENT", [vllm_stub.Config(additional_config={"attngen": "chunked"})])
    with pytest.raises(NotImplementedError, match="does not serve a user's mask"):
        impl(mla, sparse_batch((1,), (4,)))


def test_what_vllm_asks(mla: Any) -> None:
    @dataclass
    class Spec:
        state_content_size_bytes: int = 656
        block_stride_alignment: int = 1

    backend = mla.AttngenSparseMLABackend
    assert (backend.get_name(), backend.is_mla(), backend.is_sparse()) == (plugin.SPARSE_MLA_NAME, True, True)
    assert backend.get_supported_head_sizes() == [576, 512]
    assert backend.get_supported_kernel_block_sizes() == [vllm_stub.MultipleOf(16)]
    assert backend.customize_spec(Spec()).block_stride_alignment == 656
    assert backend.get_builder_cls()._cudagraph_support == vllm_stub.AttentionCGSupport.UNIFORM_BATCH
    assert builder(mla).reorder_batch_threshold == 128
    hopper, ampere = SimpleNamespace(major=9, minor=0), SimpleNamespace(major=8, minor=0)
    assert [backend.supports_compute_capability(card) for card in (None, hopper, ampere)] == [True, True, False]


def test_configurations(mla: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    validate = mla.AttngenSparseMLABackend.validate_configuration
    given = {"head_size": 576, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "use_mla": True, "use_sparse": True}
    for allowed in ({}, {"head_size": 512}, {"dtype": torch.float16}, {"kv_cache_dtype": "fp8_ds_mla"},
                    {"kv_cache_dtype": "fp8"}):  # fmt: skip
        assert validate(**{**given, **allowed}) == []
    refused = {
        "a cache in fp8_e5m2; there are auto, float16, bfloat16, fp8_ds_mla, fp8, fp8_e4m3":
            {"kv_cache_dtype": "fp8_e5m2"},
        "a cache in fp8_ds_mla beside queries of torch.float16; kernels take torch.bfloat16":
            {"kv_cache_dtype": "fp8_ds_mla", "dtype": torch.float16},
        "batch invariance: how many blocks share a list depends on the batch": {"use_batch_invariant": True},
        "latent attention, of which there are kernels for sm90a; the card is sm80":
            {"device_capability": SimpleNamespace(major=8, minor=0)},
    }  # fmt: skip
    for reason, changed in refused.items():
        assert validate(**{**given, **changed}) == [reason]
    monkeypatch.delattr(vllm_stub.SparseMLACommonImpl, "_forward_mqa_kernel")
    assert validate(**given) == ["this release of vLLM; ATTNGEN_MLA_SPARSE is for 0.33.0"]
