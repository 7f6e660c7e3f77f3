"""Models of transformers whose queries choose blocks of keys, against ``eager`` in float64: the same logits, by
lists."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import attngen.integrations.transformers.implementation as attngen_transformers
from attngen.errors import NoKernelError

VOCABULARY = 97

#: Tokens of a prompt, more than the keys that are chosen.
TOKENS = {"qwen4_exp": 50, "minimax_m3_vl": 300}

#: Sizes of each model. An index has many heads, so that blocks hardly ever have equal scores, of which any may be
#: chosen.
OWN: dict[str, dict[str, Any]] = {
    "qwen4_exp": {
        "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts": 4,
        "num_experts_per_tok": 2, "layer_types": ["indexed_attention", "linear_attention"], "hc_lowrank": 16,
        "indexer_n_heads": 12, "indexer_kv_heads": 1, "indexer_head_dim": 32, "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "minimax_m3_vl": {
        "layer_types": ["minimax_m3_sparse", "full_attention"], "num_local_experts": 4, "num_experts_per_tok": 2,
        "rotary_dim": 16, "intermediate_size": 32, "dense_intermediate_size": 32, "shared_intermediate_size": 32,
        "index_n_heads": 2, "index_head_dim": 16, "index_block_size": 128, "index_topk_blocks": 2,
    },
}  # fmt: skip


@cache
def model(name: str, dtype: torch.dtype) -> Any:
    """A model of two layers, of which the first chooses blocks."""
    config, auto = f"{name}_text", transformers.AutoConfig.for_model
    made = auto(
        config, vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512, pad_token_id=0, eos_token_id=None,
        bos_token_id=1, **OWN[name],
    )  # fmt: skip
    torch.manual_seed(0)
    built = transformers.AutoModelForCausalLM.from_config(made, attn_implementation="eager").to(dtype).eval()
    built.set_experts_implementation("eager")
    with torch.no_grad():
        for each in built.parameters():
            if each.dim() > 1:
                each.normal_(std=0.1)
        for key, each in built.named_parameters():
            if "indexer" in key and each.dim() > 1:
                each.normal_(std=0.5)
    return built


@pytest.fixture(autouse=True)
def registered() -> None:
    attngen_transformers.register()
    transformers.logging.set_verbosity_error()


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Variants that calls of attention took."""
    names: list[str] = []
    attend = attngen_transformers.attend

    def noting(candidates: Any, *tensors: Tensor, **options: Any) -> Tensor:
        names.append(candidates[0].variant)
        out: Tensor = attend(candidates, *tensors, **options)
        return out

    monkeypatch.setattr(attngen_transformers, "attend", noting)
    return names


def both(name: str, run: Any, dtype: torch.dtype = torch.float64) -> Iterator[Any]:
    """Results of a function of a model with eager attention, and with attngen's."""
    for implementation in ("eager", "attngen"):
        model(name, dtype).set_attn_implementation(implementation)
        with torch.no_grad():
            yield run(model(name, dtype))


def tokens(name: str) -> Tensor:
    return torch.randint(1, VOCABULARY, (2, TOKENS[name]), generator=torch.Generator().manual_seed(5))


LISTED = {"qwen4_exp": "listed_blocks_of_4", "minimax_m3_vl": "listed_head_blocks_of_128"}


@pytest.mark.parametrize("name", LISTED)
def test_a_prompt_and_steps_against_its_cache(name: str, served: list[str]) -> None:
    ids = tokens(name)
    steps = (ids[:, :-7], ids[:, -7:-6], ids[:, -6:-1], ids[:, -1:])

    def run(of: Any) -> list[Tensor]:
        held, logits = None, []
        for each in steps:
            out = of(each, cache=held, use_cache=True)
            held = out.cache
            logits.append(out.logits)
        return [*logits, of(ids).logits]

    wanted, actual = both(name, run)
    for one, other in zip(actual, wanted, strict=True):
        torch.testing.assert_close(
            one, other, rtol=0, atol=1e-5
        )  # models round scores of the index, and routing, to float32
    assert set(served) == {LISTED[name], *(["causal", "span"] if name == "minimax_m3_vl" else [])} - {"span"}


@pytest.mark.parametrize("name", LISTED)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(name: str, side: str, served: list[str]) -> None:
    """In float32, since eager's masks overflow in its softmax of float64 where a query sees no key."""
    ids = tokens(name)
    real = torch.ones_like(ids)
    padding = slice(None, 9) if side == "left" else slice(-9, None)
    real[1, padding] = 0

    def run(of: Any) -> Tensor:
        logits: Tensor = of(ids, attention_mask=real).logits
        return logits * real[..., None]

    wanted, actual = both(name, run, torch.float32)
    torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-4)
    assert served[0] == ("listed_positions" if name == "qwen4_exp" else "padded_head_blocks_of_128")


@pytest.mark.parametrize("name", LISTED)
def test_the_same_tokens(name: str) -> None:
    wanted, actual = both(
        name,
        lambda of: of.generate(
            tokens(name), max_new_tokens=6, do_sample=False, attention_mask=torch.ones_like(tokens(name))
        ),
    )
    assert torch.equal(actual, wanted)


def test_gradients() -> None:
    grads = []
    for implementation in ("eager", "attngen"):
        built = model("qwen4_exp", torch.float64)
        built.set_attn_implementation(implementation)
        built.zero_grad()
        built(tokens("qwen4_exp")).logits.square().sum().backward()
        grads.append({key: each.grad for key, each in built.named_parameters()})
    wanted, actual = grads
    assert {key for key, each in wanted.items() if each is None} == {
        key for key, each in actual.items() if each is None
    }
    for key, each in wanted.items():
        if each is not None:
            largest = float(each.abs().max())
            torch.testing.assert_close(
                actual[key], each, rtol=0, atol=1e-3 * largest, msg=lambda text, key=key: f"{key}: {text}"
            )
    model("qwen4_exp", torch.float64).zero_grad()


def test_all_blocks_need_no_list(served: list[str]) -> None:
    short = tokens("qwen4_exp")[:, :16]
    wanted, actual = both("qwen4_exp", lambda of: of(short).logits)
    torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-5)
    assert served == ["causal"]


def test_blocks_of_a_size_without_kernels_become_a_mask(served: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    built = model("minimax_m3_vl", torch.float64)
    for layer in built.model.layers:
        if layer.self_attn.indexer is not None:
            monkeypatch.setattr(layer.self_attn.indexer, "block_size", 20)
    ids = tokens("minimax_m3_vl")[:, :70]
    wanted, actual = both("minimax_m3_vl", lambda of: of(ids).logits)
    torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-5)
    assert served[0] == "allowed_by_head"


def test_heads_that_do_not_fit_are_refused() -> None:
    built = model("minimax_m3_vl", torch.float64)
    module = next(layer.self_attn for layer in built.model.layers if layer.self_attn.indexer is not None)
    q, k = torch.randn(1, 6, 5, 32), torch.randn(1, 3, 5, 32)
    with pytest.raises(NoKernelError, match="for 2 heads"):
        attngen_transformers.asked(module, q, k, k, None, block_indices=torch.zeros(1, 2, 5, 1, dtype=torch.int64))
