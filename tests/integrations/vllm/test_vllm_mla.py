"""Latent attention in vLLM, with a stub in vLLM's place; its release itself: ``engine_contracts``."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.integrations.engines.stubs import imported_with
from tests.integrations.vllm import vllm_mla_cases as cases
from tests.integrations.vllm import vllm_stub


@pytest.fixture(scope="module")
def mla() -> Iterator[Any]:
    with imported_with(vllm_stub, "attngen.integrations.vllm.backend", "attngen.integrations.vllm.mla") as module:
        yield module


def impl(mla: Any, **changed: Any) -> Any:
    given = {
        "alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "auto", "logits_soft_cap": None,
        "attn_type": "decoder", "kv_sharing_target_layer_name": None, "kv_lora_rank": cases.RANK, **changed,
    }  # fmt: skip
    return mla.AttngenMLAImpl(cases.HEADS, cases.COLUMNS, cases.SCALE, 1, **given)


def builder(mla: Any) -> Any:
    return mla.AttngenMLAMetadataBuilder(SimpleNamespace(), ["layer"], vllm_stub.Config(), torch.device("cpu"))


@pytest.mark.parametrize("queries", [(1, 1, 1), (1, 5, 3)])
@pytest.mark.parametrize("in_two_parts", [False, True])
@pytest.mark.parametrize("graph", [False, True])
def test_few_queries(mla: Any, queries: tuple[int, ...], in_two_parts: bool, graph: bool) -> None:
    made = cases.decode(queries, (40, 33, 7))
    common = made.common(vllm_stub.CommonAttentionMetadata)
    build = builder(mla).build_for_cudagraph_capture if graph else lambda given: builder(mla).build(0, given)
    made.check(impl(mla), build(common), in_two_parts=in_two_parts)


@pytest.mark.parametrize("queries", [(1, 1, 1), (1, 5, 3)])
def test_a_cache_in_8_bits(mla: Any, queries: tuple[int, ...]) -> None:
    made = cases.decode(queries, (40, 33, 7)).packed()
    metadata = builder(mla).build(0, made.common(vllm_stub.CommonAttentionMetadata))
    made.check(impl(mla, kv_cache_dtype="fp8_ds_mla"), metadata, tolerance=0.02)


def test_where_a_cache_in_8_bits_is_not_served(mla: Any) -> None:
    validate = mla.AttngenMLABackend.validate_configuration
    given = {"head_size": 576, "dtype": torch.bfloat16, "kv_cache_dtype": "fp8_ds_mla"}
    said = [" ".join(validate(**{**given, **other})) for other in ({}, {"head_size": 512}, {"dtype": torch.float16})]
    for words, one in zip(("", "with head size 512", "beside queries of torch.float16"), said, strict=True):
        assert words in one
        assert ("fp8_ds_mla" in one) == bool(words)


def test_the_log_sum_exp_for_ranks(mla: Any) -> None:
    made = cases.decode((1, 1), (20, 50))
    one = impl(mla)
    one.need_to_return_lse_for_decode = True
    made.check(one, builder(mla).build(0, made.common(vllm_stub.CommonAttentionMetadata)), lse=True)


def test_prompts(mla: Any) -> None:
    cases.check_prompts(mla.AttngenMLAPrefill(cases.SCALE))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"alibi_slopes": [1.0]}, "ALiBi"), ({"sliding_window": 5}, "sliding windows"),
        ({"logits_soft_cap": 3.0}, "soft-capping"), ({"attn_type": "encoder"}, "attention of type encoder"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_said_in_words(mla: Any, changed: dict[str, Any], words: str) -> None:
    with pytest.raises(NotImplementedError, match=f"ATTNGEN_MLA does not serve {words} with latent attention"):
        impl(mla, **changed)


def test_a_mask_of_ones_own_is_refused(mla: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_stub, "CURRENT", [vllm_stub.Config(additional_config={"attngen": "chunked"})])
    with pytest.raises(NotImplementedError, match="does not serve a user's mask"):
        impl(mla)


def test_what_vllm_asks(mla: Any) -> None:
    backend = mla.AttngenMLABackend
    assert backend.get_name() == "ATTNGEN_MLA"
    assert backend.get_supported_head_sizes() == [576, 512]
    assert backend.get_supported_kernel_block_sizes() == [vllm_stub.MultipleOf(16)]
    hopper, ampere = SimpleNamespace(major=9, minor=0), SimpleNamespace(major=8, minor=0)
    for kind, on_ampere in ((backend, False), (mla.AttngenMLAPrefill, True)):  # prompts are an ordinary forward
        assert [kind.supports_compute_capability(card) for card in (None, hopper, ampere)] == [True, True, on_ampere]
