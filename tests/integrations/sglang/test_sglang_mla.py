"""Latent attention in SGLang, with a stub in SGLang's place; its release itself: ``engine_contracts``."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attngen.integrations.sglang import plugin
from tests.integrations.engines.stubs import imported_with
from tests.integrations.sglang import sglang_stub

MODULES = (
    "attngen.integrations.sglang.backend", "attngen.integrations.sglang.mla",
    "tests.integrations.sglang.sglang_mla_cases",
)  # fmt: skip


@pytest.fixture(scope="module")
def cases() -> Iterator[Any]:
    with imported_with(sglang_stub, *MODULES) as module:
        yield module


def engine() -> Any:
    return sglang_stub.latent(torch.empty(0))


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("mode", ["DECODE", "EXTEND", "TARGET_VERIFY"])
def test_latent_rows(cases: Any, mode: str, page_size: int) -> None:
    cases.check_absorbed(engine(), mode, page_size)


@pytest.mark.parametrize("mode", ["DECODE", "TARGET_VERIFY"])
def test_latent_rows_in_a_graph(cases: Any, mode: str) -> None:
    cases.check_absorbed(engine(), mode, 16, graph=True)


def test_expanded_prompts(cases: Any) -> None:
    cases.check_expanded(engine())


def test_the_form_of_a_step(cases: Any) -> None:
    pool = sglang_stub.MLAPool(16, torch.float32, 576, 512)
    for deterministic, form in ((False, "as attngen"), (True, "absorbed")):
        cases.backend_of(pool, torch.zeros(2, 64), 1, deterministic=deterministic)
        assert sglang_stub.AttentionBackendRegistry.handlers["attngen"](None, None) == form


@pytest.mark.parametrize(
    ("model", "dtype", "words"),
    [
        ({"kv_lora_rank": 256}, torch.bfloat16, "latent rows of 320 columns, 256 of which are values"),
        ({"qk_rope_head_dim": 32}, torch.bfloat16, "latent rows of 544 columns"),
        ({}, torch.float8_e4m3fn, "latent rows of torch.float8_e4m3fn"),
    ],
)
def test_what_is_not_served_is_said_in_words(cases: Any, model: dict[str, int], dtype: Any, words: str) -> None:
    pool = sglang_stub.MLAPool(16, torch.float32, 576, 512)
    with pytest.raises(ValueError, match=f"--attention-backend attngen does not serve {words}"):
        cases.backend_of(pool, torch.zeros(2, 64), 1, dtype=dtype, **model)


def test_a_mask_of_ones_own_is_refused(cases: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNGEN_MASK", "chunked")
    with pytest.raises(ValueError, match="does not serve a user's mask with latent attention"):
        cases.backend_of(sglang_stub.MLAPool(16, torch.float32, 576, 512), torch.zeros(2, 64), 1)


def test_which_backend_a_model_gets(cases: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for arch, topk, name in (
        ("MLA", 2048, "AttngenDSABackend"), ("MLA", None, "AttngenMLABackend"), ("MHA", None, "AttngenAttnBackend")
    ):  # fmt: skip
        module = SimpleNamespace(**{name: lambda runner, name=name: name})
        monkeypatch.setattr(plugin, "import_module", lambda path, module=module: module)
        config = SimpleNamespace(attention_arch=sglang_stub.AttentionArch[arch], hf_config=SimpleNamespace())
        config.hf_config.index_topk = topk
        assert plugin._make(SimpleNamespace(model_config=config)) == name


def test_models_that_choose_blocks_are_refused(cases: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = SimpleNamespace(attention_arch=sglang_stub.AttentionArch.MHA, hf_config=SimpleNamespace(indexer_n_heads=4))
    with pytest.raises(NotImplementedError, match="SGLang gives layers of QSA a backend of its own"):
        plugin._make(SimpleNamespace(model_config=config))
    config.hf_config.indexer_n_heads = None
    monkeypatch.setenv("ATTNGEN_BLOCK_LISTS", "1")
    with pytest.raises(NotImplementedError, match="ATTNGEN_BLOCK_LISTS serves vLLM"):
        plugin._make(SimpleNamespace(model_config=config))
