"""vLLM's whole engine on the CPU, with attngen's backend: run by ``engine_contracts``, which puts vLLM on the path.

Configurations, scheduler, block pools, worker, model runner and models are vLLM's own. The few operators of its
binaries that a CPU needs stand here in Python, and attention is the eager reference. Small models with random weights
generate greedily: prompts in chunks beside decoding, prefixes that requests share, and a cache so small that requests
are preempted. Tokens and their log-probabilities are those of transformers, which sees each sequence alone, in float64.
"""

from __future__ import annotations

import gc
import os

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import vllm.platforms
from torch import Tensor
from vllm.platforms.cpu import CpuPlatform

import attngen
from attngen.integrations.vllm import plugin
from tests.integrations.engines.engine_models import MODELS, model_in, prompts

#: An engine calls it when it ends, also after all tests; it raises without a GPU.
torch.accelerator.empty_host_cache = lambda: None  # type: ignore[method-assign]

pytestmark = pytest.mark.skipif(
    "vllm-0.32" in vllm.__file__, reason="its stand-in for the kernel that maps tokens to slots takes other arguments"
)

BACKEND = "attngen.integrations.vllm.backend.AttngenBackend"
BLOCKS, TOKENS = 48, 24

#: A mask as a user's module has it.
landmarks = attngen.variant("q_pos >= kv and (q_pos - kv < 40 or kv % 16 == 0)", name="landmarks")


def slots_of(starts: Tensor, positions: Tensor, table: Tensor, slots: Tensor, block: int) -> None:
    """Slots of a step's tokens in the cache; those after them are none."""
    requests = torch.repeat_interleave(torch.arange(starts.numel() - 1), starts.diff().long())
    at = positions[: requests.numel()]
    slots.fill_(-1)
    slots[: requests.numel()] = table[requests, at // block].long() * block + at % block


#: Operators of vLLM's binaries, by their schemas.
OPERATORS = {
    "init_cpu_memory_env(int[] nodes) -> ()": lambda nodes: None,
    "greedy_argmax(Tensor logits) -> Tensor": lambda logits: logits.argmax(-1),
    "compute_slot_mapping_kernel_impl(Tensor starts, Tensor positions, Tensor table, Tensor slots, int block) -> ()":
        slots_of,
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _cpu() -> Iterator[None]:
    library = torch.library.Library("_C", "DEF")
    for schema, function in OPERATORS.items():
        library.define(schema)
        library.impl(schema.partition("(")[0], function, "CompositeExplicitAutograd")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm.platforms, "_current_platform", CpuPlatform())
        patch.setattr(CpuPlatform, "get_attn_backend_cls", classmethod(lambda cls, *args, **more: BACKEND))
        plugin.register()
        yield


def generated(folder: Path, more: dict[str, Any]) -> tuple[list[Any], int]:
    """The engine's completions, and the number of times that it preempted a request."""
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    engine = LLM(
        model=str(folder), skip_tokenizer_init=True, enforce_eager=True, attention_backend="ATTNGEN", dtype="float32",
        max_model_len=512, max_num_batched_tokens=128, max_num_seqs=6, block_size=16, num_gpu_blocks_override=BLOCKS,
        enable_prefix_caching=True, compilation_config={"custom_ops": ["none"], "mode": 0}, **more,
    )  # fmt: skip
    scheduler = type(engine.llm_engine.engine_core.engine_core.scheduler)
    how = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True, detokenize=False, logprobs=1)
    preempt = scheduler._preempt_request
    with mock.patch.object(scheduler, "_preempt_request", autospec=True, side_effect=preempt) as preempted:
        results = engine.generate([{"prompt_token_ids": tokens} for tokens in prompts()], how, use_tqdm=False)
    engine.llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()
    del engine
    gc.collect()  # what is left of an engine would end the groups of the next one
    return results, preempted.call_count


def compare(model: Any, results: list[Any], mask: Any = None) -> None:
    """Assert that tokens and their log-probabilities are those of a model that sees each sequence alone."""
    for tokens, result in zip(prompts(), results, strict=True):
        made = list(result.outputs[0].token_ids)
        ids = torch.tensor([tokens + made])
        more = {}
        if mask is not None:
            place = torch.arange(ids.shape[1])
            visible = mask(place[:, None], place[None])
            more["attention_mask"] = torch.where(visible, 0.0, -torch.inf).double()[None, None]
        with torch.no_grad():
            wanted = model(ids, **more).logits[0, len(tokens) - 1 : -1].log_softmax(-1)
        assert made == wanted.argmax(-1).tolist()
        ours = [row[token].logprob for row, token in zip(result.outputs[0].logprobs, made, strict=True)]
        torch.testing.assert_close(
            torch.tensor(ours).double(), wanted[range(len(made)), made], rtol=0, atol=1e-4
        )  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_model(name: str, tmp_path: Path) -> None:
    model = model_in(tmp_path, name)
    results, preempted = generated(tmp_path, {})
    compare(model, results)
    assert preempted


def test_a_users_mask(tmp_path: Path) -> None:
    model = model_in(tmp_path, "llama")
    results, _ = generated(tmp_path, {"additional_config": {"attngen": f"{__name__}:landmarks"}})
    compare(model, results, lambda q, kv: (q >= kv) & ((q - kv < 40) | (kv % 16 == 0)))
