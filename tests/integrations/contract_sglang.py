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
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from attngen.integrations import sglang as plugin
from attngen.integrations import sglang_backend
from tests.integrations.sglang_cases import CASES, Case, Engine, check, runner_of


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


def test_mla_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_backend, "get_spec", lambda: SimpleNamespace(speculative_eagle_topk=None))
    runner = runner_of(ENGINE, Case(), None, torch.empty(0))
    runner.model_config.attention_arch = AttentionArch.MLA
    with pytest.raises(ValueError, match="does not serve MLA: it does not know the pools of latent rows"):
        sglang_backend.AttngenAttnBackend(runner)
