"""SGLang's model runner on a GPU, with attngen's backend: run by ``engine_contracts``, which puts SGLang on the path.

Configurations, batches, pools, CUDA graphs, model runner and models are SGLang's own, with layers in plain torch where
SGLang has binaries, and attention is attngen's kernels, compiled at the first call. Small models with random weights in
bf16 generate greedily. Their tokens are as likely as those that transformers finds the likeliest, which sees each
sequence alone, in float64.
"""

from __future__ import annotations

import os

os.environ["SGLANG_FORCE_FUSED_OP_BACKEND"] = "torch"

from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import attngen
from attngen.integrations.sglang import plugin
from tests.integrations.engines.engine_models import MODELS, model_in, prompts

STEPS = 12

#: How much less likely than the likeliest token one may be: what bf16 makes of ties.
GAP = 0.2

#: SGLang reads a field of Gemma 2's configuration that transformers no longer has.
NAMES = [name for name in MODELS if name != "gemma2"]


@pytest.fixture(scope="module", autouse=True)
def _without_binaries() -> Iterator[None]:
    from sglang.benchmark import one_batch
    from sglang.srt.entrypoints import engine
    from sglang.srt.layers import dual_gemm

    with pytest.MonkeyPatch.context() as patch, attngen.jit():
        patch.setattr(engine, "assert_pkg_version", lambda *args, **more: None)
        patch.setattr(dual_gemm.DualGemm, "_select_mode", lambda self, *args: None)
        patch.setattr(one_batch, "get_tokenizer", lambda *args, **more: None)
        patch.setattr(one_batch.bootstrap, "_bind_threads_if_cpu", lambda **more: None)
        plugin.register()
        yield


def runner(folder: Path, graphs: bool, patch: pytest.MonkeyPatch) -> Any:
    """SGLang's model runner of a model."""
    from sglang.benchmark import one_batch
    from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig
    from sglang.srt.server_args import PortArgs, ServerArgs

    decode = {"backend": "full", "bs": [1, 2, 4, 8, 16]} if graphs else {"backend": "disabled"}
    args = ServerArgs(
        model_path=str(folder), skip_tokenizer_init=True, device="cuda", attention_backend="attngen", dtype="bfloat16",
        cuda_graph_config=CudaGraphConfig.from_dict({"decode": decode, "prefill": {"backend": "disabled"}}),
        disable_overlap_schedule=True, page_size=16, max_total_tokens=4096, mem_fraction_static=0.3,
        sampling_backend="pytorch", context_length=512,
    )  # fmt: skip
    args.resolve_once()
    one_batch._set_envs_and_config(args)
    ranks = one_batch.SpawnRanks(world_rank=one_batch.spawn_world_rank(args, tp_rank=0, pp_rank=0), gpu_id=0)
    one_batch.publish(args, role="scheduler", ranks=ranks)
    if one_batch.bootstrap._PARALLEL_INITIALISED:  # once in a process
        patch.setattr(one_batch.bootstrap, "init_parallel_runtime", lambda **more: None)
    return one_batch.load_model(args, PortArgs.init_new(args), 0, 0)[0].torch_runner


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("name", NAMES)
def test_a_model(name: str, graphs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.benchmark import one_batch
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    model = model_in(tmp_path, name).bfloat16().double()
    made_by = runner(tmp_path, graphs, monkeypatch)
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
        with torch.no_grad():
            logits = model(torch.tensor([tokens + made])).logits[0, len(tokens) - 1 : -1].log_softmax(-1)
        gap = logits.max(-1).values - logits[range(len(made)), made]
        assert gap.max() < GAP
