"""Small models with random weights, and prompts, for the contracts of serving engines."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
import transformers

COMMON = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 128, "max_position_embeddings": 512,
}  # fmt: skip
MODELS = {
    "llama": transformers.LlamaConfig(**COMMON),
    "gemma2": transformers.Gemma2Config(
        **COMMON, sliding_window=64, query_pre_attn_scalar=32, attn_logit_softcapping=20.0
    ),
    "gemma3": transformers.Gemma3TextConfig(
        **COMMON, sliding_window=64, layer_types=["sliding_attention", "full_attention"] * 2, query_pre_attn_scalar=32
    ),
}


def model_in(folder: Path, name: str) -> Any:
    """A model with random weights, saved to a folder."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(MODELS[name], attn_implementation="eager")
    for parameter_name, weight in model.named_parameters():
        if "norm" not in parameter_name:
            torch.nn.init.normal_(weight, std=0.2)
    model.save_pretrained(folder)
    return model.double()


def prompts() -> list[list[int]]:
    """Short and long prompts, and some that share a prefix."""
    rng = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(COMMON["vocab_size"]) for _ in range(count)]

    shared = tokens(90)
    return [*(tokens(n) for n in (150, 3, 300, 17, 150, 20)), *(shared + tokens(n) for n in (5, 40, 200))]


def wanted_tokens(model: Any, tokens: list[int], made: list[int]) -> list[int]:
    """The tokens that a model finds most likely after a prompt and each of those that were made."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens + made])).logits[0, len(tokens) - 1 : -1]
    best: list[int] = logits.argmax(-1).tolist()
    return best
