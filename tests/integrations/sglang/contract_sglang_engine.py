"""SGLang's model runner on the CPU, with attngen's backend: run by ``engine_contracts``, which puts SGLang on the path.

Configurations, batches, pools, model runner and models are SGLang's own, and attention is the eager reference. Small
models with random weights generate greedily: prompts of several lengths, then steps of decoding. Their tokens are those
of transformers, which sees each sequence alone, in float64.
"""

from __future__ import annotations

import sys
from array import array
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from sglang.benchmark import one_batch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import PortArgs, ServerArgs

from attngen.integrations.sglang import plugin
from tests.integrations.engines.engine_models import MODELS, model_in, prompts, wanted_tokens

STEPS = 12

#: SGLang reads a field of Gemma 2's configuration that transformers no longer has.
NAMES = [name for name in MODELS if name != "gemma2"]


def runner(folder: Path) -> Any:
    """SGLang's model runner of a model."""
    plugin.register()
    args = ServerArgs(
        model_path=str(folder), skip_tokenizer_init=True, device="cpu", attention_backend="attngen", dtype="float32",
        disable_cuda_graph=True, disable_overlap_schedule=True, page_size=16, max_total_tokens=4096,
        mem_fraction_static=0.05, sampling_backend="pytorch", context_length=512,
    )  # fmt: skip
    args.resolve_once()
    one_batch._set_envs_and_config(args)
    ranks = one_batch.SpawnRanks(world_rank=one_batch.spawn_world_rank(args, tp_rank=0, pp_rank=0), gpu_id=0)
    one_batch.publish(args, role="scheduler", ranks=ranks)
    return one_batch.load_model(args, PortArgs.init_new(args), 0, 0)[0].torch_runner


@pytest.mark.parametrize("name", NAMES)
def test_a_model(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_batch, "get_tokenizer", lambda *args, **more: None)
    monkeypatch.setattr(one_batch.bootstrap, "_bind_threads_if_cpu", lambda **more: None)
    operators = ModuleType("vllm._custom_ops")
    operators.rotary_embedding = None  # type: ignore[attr-defined]  # SGLang only names it
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm._custom_ops", operators)
    if one_batch.bootstrap._PARALLEL_INITIALISED:  # once in a process
        monkeypatch.setattr(one_batch.bootstrap, "init_parallel_runtime", lambda **more: None)
    model = model_in(tmp_path, name)
    made_by = runner(tmp_path)
    how = SamplingParams(temperature=0, max_new_tokens=STEPS)
    how.normalize(None)
    requests = []
    for number, tokens in enumerate(prompts()):
        request = Req(
            rid=str(number), origin_input_text="", origin_input_ids=array("q", tokens), sampling_params=how
        )  # fmt: skip
        request.full_untruncated_fill_ids = request.origin_input_ids
        request.logprob_start_len, request.extend_end = -1, len(tokens)
        requests.append(request)
    last, _, batch = one_batch.extend(requests, made_by)
    steps = [last]
    for _ in range(STEPS - 1):
        last, _ = one_batch.decode(last, batch, made_by)
        steps.append(last)
    for tokens, made in zip(prompts(), torch.stack(steps, dim=1).tolist(), strict=True):
        assert made == wanted_tokens(model, tokens, made)
