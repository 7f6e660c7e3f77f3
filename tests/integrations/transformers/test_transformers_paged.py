"""Continuous batching with ``use_pages``: its tokens, beside those of each prompt alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import attngen.integrations.transformers as attngen_transformers
from attngen.errors import CallError, NoKernelError
from attngen.integrations.transformers import paged as transformers_paged
from attngen.integrations.transformers.paged import page_table, paged_attention
from tests.integrations.transformers import families
from tests.integrations.transformers.serving import NEW, PROMPTS, plain, serve
from tests.sampling import few

pytest.importorskip("psutil", reason="transformers asks it how much memory a cache may take")


@pytest.fixture
def paged(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of sequences in each call over pages."""
    calls: list[int] = []
    attend = transformers_paged.attend_cached

    def noting(call: Any) -> Any:
        calls.append(call.cu_seqlens_q.shape[0] - 1)
        return attend(call)

    monkeypatch.setattr(transformers_paged, "attend_cached", noting)
    return calls


@pytest.mark.exhaustive
@few("family", ["gpt_oss", "mistral", "gemma3", "llama", "gemma2", "qwen3"], often=(0, 2))
def test_a_server_gives_the_tokens_of_eager(family: str, paged: list[int]) -> None:
    model = families.make(family, head_dim=8, implementation="attngen")
    actual = serve(model)
    assert [len(tokens) for tokens in actual] == [NEW] * len(PROMPTS)
    assert actual == plain(model)
    assert bool(paged) == (family != "mistral")  # whose layers all have a window


@pytest.mark.exhaustive
def test_layers_that_take_the_keys_of_others() -> None:
    config = transformers.Gemma3nTextConfig(
        vocab_size=families.VOCABULARY, vocab_size_per_layer_input=families.VOCABULARY, hidden_size=32, head_dim=8,
        hidden_size_per_layer_input=8, intermediate_size=32, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, num_kv_shared_layers=2, layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=16, altup_num_inputs=2, laurel_rank=4, activation_sparsity_pattern=[0.0] * 4,
        attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(5)
    model = transformers.Gemma3nForCausalLM(config).eval()
    assert serve(model) == plain(model)


def test_a_model_with_attention_of_its_own_is_refused() -> None:
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    model = transformers.MPNetModel(transformers.MPNetConfig(**sizes, num_attention_heads=2))
    with pytest.raises(CallError, match="MPNetModel computes its attention itself, and takes no attn_implementation"):
        attngen_transformers.use_pages(model)


def test_pages_follow_from_rows() -> None:
    size, blocks, lengths = 4, [[7, 2, 5], [3], [0, 6]], [10, 4, 5]
    rows = [blocks[b][i // size] * size + i % size for b, n in enumerate(lengths) for i in range(n)]
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    actual = page_table(torch.tensor(rows), starts, size, 3)
    assert actual.dtype == torch.int32
    for b, pages in enumerate(blocks):
        assert actual[b, : len(pages)].tolist() == pages


def test_a_forward_without_a_cache_is_refused() -> None:
    model = families.make("llama", head_dim=8, implementation="attngen")
    ids = torch.ones(1, 3, dtype=torch.long)
    attngen_transformers.use_pages(model)
    with pytest.raises(CallError, match="is for continuous batching; attn_implementation='attngen' serves"):
        model(input_ids=ids)
    model.set_attn_implementation("attngen")
    assert model(input_ids=ids).logits.isfinite().all()


@pytest.mark.parametrize("name", ["sinks", "indices", "block_indices"])
def test_what_attention_over_pages_cannot_do_is_refused(name: str) -> None:
    q, k, v = torch.randn(3, 1, 2, 3, 8)
    with pytest.raises(NoKernelError, match=f"Module passes {name}, which attention over pages does not take"):
        paged_attention(lambda *_, **__: (q, None), torch.nn.Module(), q, k, v, None, **{name: torch.zeros(1)})
