"""Continuous batching on the GPU: tokens beside those of each prompt alone, in eager attention and float32."""

from __future__ import annotations

import pytest
import torch

from attngen.runtime.registry.lookup import registry
from tests.gpu.packages import indexed
from tests.integrations.transformers import families
from tests.integrations.transformers.serving import NEW, PROMPTS, plain, prompts, serve

#: Allowed distance of the largest logit from that of the chosen token: rounding to bf16, through all layers.
CLOSE = 0.25


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    for name in ("flash_attn_kvcache", "transformers"):
        indexed(name)
    registry.clear()


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gemma3", "qwen3", "gpt_oss"])
def test_a_server_gives_the_tokens_of_eager(family: str) -> None:
    """Without CUDA graphs and with them."""
    exact = families.make(family, head_dim=64, implementation="eager", device="cuda", all_experts=True)
    alone = plain(exact)
    for graphs in (False, True):
        model = families.make(
            family, head_dim=64, implementation="attngen", device="cuda", dtype=torch.bfloat16, all_experts=True
        )
        served = serve(model, use_cuda_graph=graphs)
        assert [len(tokens) for tokens in served] == [NEW] * len(PROMPTS)
        for prompt, tokens, wanted in zip(prompts(), served, alone, strict=True):
            first = next((i for i in range(NEW) if tokens[i] != wanted[i]), None)
            if first is not None:  # from there on the sequences are others
                with torch.no_grad():
                    logits = exact(torch.tensor([prompt + tokens[:first]], device="cuda")).logits[0, -1]
                assert float(logits.max() - logits[tokens[first]]) <= CLOSE * float(logits.std()), f"graphs: {graphs}"
