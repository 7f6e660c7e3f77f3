"""vLLM's whole engine on a GPU, with attngen's backend: run by ``engine_contracts``, which puts vLLM on the path.

Configurations, scheduler, block pools, worker, model runner, CUDA graphs, sampler and models are vLLM's own; operators
of its binaries stand here in Python, and attention is attngen's kernels, compiled at the first call. Small models with
random weights in bf16 generate greedily. Their tokens are as likely as those that transformers finds the likeliest,
which sees each sequence alone, in float64.
"""

from __future__ import annotations

import gc
import os

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
os.environ["VLLM_USE_DEEP_GEMM"] = "0"

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import attngen
from attngen.integrations.vllm import plugin
from tests.integrations.engines.engine_models import MODELS, model_in, prompts
from tests.integrations.vllm import vllm_operators

BLOCKS, TOKENS = 80, 24

#: How much less likely than the likeliest token one may be: what bf16 makes of ties.
GAP = 0.2

#: A mask as a user's module has it.
landmarks = attngen.variant("q_pos >= kv and (q_pos - kv < 40 or kv % 16 == 0)", name="landmarks")

EAGER = {"enforce_eager": True, "compilation_config": {"custom_ops": ["none"], "mode": 0}}
GRAPHS = {
    "compilation_config": {
        "custom_ops": ["none"], "mode": 0, "cudagraph_mode": "FULL", "cudagraph_capture_sizes": [1, 2, 4, 8],
    }
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _plugin() -> Iterator[None]:
    vllm_operators.install()
    from vllm.model_executor.models import registry as models
    from vllm.v1.sample.ops import topk_topp_sampler as sampling
    from vllm.v1.worker import gpu_worker

    with pytest.MonkeyPatch.context() as patch, attngen.jit():
        patch.setattr(models, "_run_in_subprocess", lambda function: function())  # it would lack the stand-ins
        patch.setattr(gpu_worker, "kernel_warmup", lambda worker: None)  # of kernels in vLLM's binaries
        patch.setattr(sampling, "HAS_TRITON", False)
        plugin.register()
        yield


def generated(folder: Path, more: dict[str, Any]) -> list[Any]:
    """The engine's completions."""
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    engine = LLM(
        model=str(folder), skip_tokenizer_init=True, attention_backend="ATTNGEN", dtype="bfloat16", max_model_len=512,
        max_num_batched_tokens=128, max_num_seqs=6, block_size=16, num_gpu_blocks_override=BLOCKS,
        enable_prefix_caching=True, gpu_memory_utilization=0.3, **more,
    )  # fmt: skip
    how = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True, detokenize=False)
    results = engine.generate([{"prompt_token_ids": tokens} for tokens in prompts()], how, use_tqdm=False)
    engine.llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()
    del engine
    gc.collect()  # what is left of an engine would end the groups of the next one
    return results


def compare(model: Any, results: list[Any], mask: Any = None) -> None:
    """Assert that every token is about as likely as the likeliest one."""
    for tokens, result in zip(prompts(), results, strict=True):
        made = list(result.outputs[0].token_ids)
        assert len(made) == TOKENS
        ids = torch.tensor([tokens + made])
        more = {}
        if mask is not None:
            place = torch.arange(ids.shape[1])
            visible = mask(place[:, None], place[None])
            more["attention_mask"] = torch.where(visible, 0.0, -torch.inf).double()[None, None]
        with torch.no_grad():
            wanted = model(ids, **more).logits[0, len(tokens) - 1 : -1].log_softmax(-1)
        gap = wanted.max(-1).values - wanted[range(len(made)), made]
        assert gap.max() < GAP


@pytest.mark.parametrize("how", [EAGER, GRAPHS], ids=["eager", "graphs"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model(name: str, how: dict[str, Any], tmp_path: Path) -> None:
    model = model_in(tmp_path, name).bfloat16().double()
    compare(model, generated(tmp_path, how))


def test_a_users_mask(tmp_path: Path) -> None:
    model = model_in(tmp_path, "llama").bfloat16().double()
    results = generated(tmp_path, {**EAGER, "additional_config": {"attngen": f"{__name__}:landmarks"}})
    compare(model, results, lambda q, kv: (q >= kv) & ((q - kv < 40) | (kv % 16 == 0)))
