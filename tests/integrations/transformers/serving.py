"""Continuous batching of tiny models: prompts of several lengths, more tokens than one batch holds."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

import attngen.integrations.transformers as attngen_transformers
from tests.integrations.transformers.families import VOCABULARY

PROMPTS = (5, 37, 64, 90, 1, 23)
PAGE = 16
_PAGE_SIZE = "page_size" if hasattr(ContinuousBatchingConfig, "page_size") else "block_size"  # before 5.18
NEW = 11


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in PROMPTS]


def plain(model: Any) -> list[list[int]]:
    """Return the tokens that a model generates for each prompt by itself, with eager attention."""
    model.set_attn_implementation("eager")
    given = [torch.tensor([tokens], device=model.device) for tokens in prompts()]
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    return [model.generate(ids, **options)[0, ids.shape[1] :].tolist() for ids in given]


def serve(model: Any, **options: Any) -> list[list[int]]:
    """Return the tokens that a model generates for all prompts in batches that change as they go."""
    attngen_transformers.use_pages(model)
    actual = model.generate_batch(
        inputs=prompts(),
        generation_config=GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(
            num_blocks=64, max_batch_tokens=72, **{_PAGE_SIZE: PAGE}, **options
        ),
        progress_bar=False,
    )
    ordered = sorted(actual.items(), key=lambda item: int(item[0].rpartition("_")[2]))
    return [list(one.generated_tokens) for _, one in ordered]
