"""The backend inside of a release of SGLang, on the CPU: run by ``engine_contracts``, which puts SGLang on the path.

Pools, layers, modes and registries are SGLang's own; a model runner is not made.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import sglang
import torch
from sglang.srt.arg_groups import choices
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
from sglang.srt.runtime_context import get_parallel

from attngen.integrations.sglang import plugin
from tests.integrations.sglang import sglang_mla_cases
from tests.integrations.sglang.sglang_cases import CASES, Engine, check


def pool(slots: int, page_size: int, dtype: torch.dtype, kv_heads: int, dim: int) -> Any:
    return MHATokenToKVPool(slots - page_size, page_size, dtype, kv_heads, dim, 1, "cpu", False)


def window_pool(slots: int, page_size: int, dtype: torch.dtype, kv_heads: int, dim: int) -> Any:
    size = slots - page_size
    made = SWAKVPool(size, size, page_size, dtype, kv_heads, dim, [0], [], "cpu")
    pages = torch.randperm(slots // page_size - 1) + 1
    mapping = torch.zeros(slots + 1, dtype=torch.int64)
    for page, other in enumerate(pages.tolist(), start=1):
        rows = torch.arange(page_size)
        mapping[page * page_size + rows] = other * page_size + rows
    made.register_mapping(mapping)
    return made


ENGINE = Engine(pool, window_pool, RadixAttention, ForwardMode, AttentionType)


def test_the_release_is_one_of_those_that_are_named() -> None:
    assert sglang.__version__ in plugin.RELEASES


def test_its_name_is_known_to_the_command_line() -> None:
    plugin.register()
    plugin.register()
    assert ATTENTION_BACKENDS["attngen"] is plugin._make
    for listed in (choices.ATTENTION_BACKEND_CHOICES, choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES):
        assert listed.count("attngen") == 1


@pytest.mark.parametrize("name", CASES)
def test_results(name: str) -> None:
    check(ENGINE, CASES[name])


def latent_pool(slots: int, page_size: int) -> Any:
    return MLATokenToKVPool(slots - page_size, page_size, torch.float32, 512, 64, 1, "cpu", False)


LATENT = SimpleNamespace(
    pool=latent_pool, layer=RadixAttention, modes=ForwardMode, kinds=AttentionType, like=torch.empty(0)
)  # fmt: skip


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("mode", sglang_mla_cases.STEPS)
def test_latent_rows(mode: str, page_size: int) -> None:
    with get_parallel().override(dcp_enabled=False):
        sglang_mla_cases.check_absorbed(LATENT, mode, page_size)


def test_expanded_prompts() -> None:
    sglang_mla_cases.check_expanded(LATENT)


def test_the_form_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of keys and values of each head for prompts, the absorbed form for others."""
    sglang_mla_cases.backend_of(LATENT.pool(16, 1), torch.zeros(2, 64), 1)
    form = AttentionBackendRegistry.get_handler("attngen")
    attn = SimpleNamespace(chunked_prefix_cache_threshold=100, disable_chunked_prefix_cache=False)
    for mode, prefixes, name in (
        ("EXTEND", [0, 0], "MHA_CHUNKED_KV"), ("EXTEND", [200, 0], "MHA_CHUNKED_KV"), ("EXTEND", [20, 0], "MLA"),
        ("DECODE", None, "MLA"), ("TARGET_VERIFY", None, "MLA"),
    ):  # fmt: skip
        batch = SimpleNamespace(
            forward_mode=ForwardMode[mode], extend_prefix_lens_cpu=prefixes, seq_lens_cpu=torch.tensor([300, 10]),
            get_max_chunk_capacity=lambda: 1 << 17, attn_cp_metadata=None,
        )  # fmt: skip
        assert form(attn, batch).name == name
    assert "attngen" in choices.CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS


def test_which_backend_a_model_gets() -> None:
    assert [arch.name for arch in (AttentionArch.MLA, AttentionArch.MHA)] == ["MLA", "MHA"]
