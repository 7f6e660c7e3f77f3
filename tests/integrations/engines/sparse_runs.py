"""vLLM and SGLang with small models of sparse latent attention, on one Hopper GPU, with attngen's backends and with the
engines' own: ``python -m tests.integrations.engines.sparse_runs [vllm] [sglang]``.

Run it where an engine is installed with its binaries (``pip install vllm==0.33.0``, which its indexer needs), beside a
checkout of attngen. Models of DeepSeek-V3.2's and GLM-5's form, with random weights in bf16, generate greedily from
prompts that are shorter and longer than what a query selects, in chunks, over caches in 16 bits and of 656 bytes a
token, eagerly and in CUDA graphs. Each engine runs three times, in processes of their own: with its own backend, with
attngen's, and with attngen's indexer, too. Until tokens differ first, their log-probabilities must be alike, and there
the two tokens must be about as likely. ``specs/integrations/engines_sparse.yaml`` is built first.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]

#: Backends by engine: its own, then attngen's.
BACKENDS = {"vllm": ("FLASHMLA_SPARSE", "ATTNGEN_MLA_SPARSE"), "sglang": ("dsa", "attngen")}

#: Runs with attngen's backend: with the engine's indexer, and with attngen's.
INDEXERS = {"": "0", ", attngen's indexer": "1"}

#: Caches by engine: what it calls them.
CACHES = {"vllm": ("auto", "fp8_ds_mla"), "sglang": ("bfloat16", "fp8_e4m3")}

#: How much log-probabilities may differ: what bf16 and fp8 make of sums in another order, and of selections at a tie.
GAP = 0.2

TOKENS = 24

#: Sizes that the engines' own kernels take; a query selects 512 keys.
COMMON = {
    "vocab_size": 512, "hidden_size": 1024, "intermediate_size": 1024, "moe_intermediate_size": 512,
    "num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": 512,
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 2, "index_topk": 512, "index_head_dim": 128, "index_n_heads": 64,
    "max_position_embeddings": 4096, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
MODELS = {
    "deepseek_v32": {"qk_nope_head_dim": 128, "v_head_dim": 128},
    "glm_moe_dsa": {"qk_nope_head_dim": 192, "v_head_dim": 256},
}


def make_model(name: str, folder: Path) -> None:
    """Save a model of this type with random weights to a folder."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **COMMON, **MODELS[name]))
    for parameter_name, weight in model.named_parameters():
        if "norm" not in parameter_name:
            torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
    model.bfloat16().save_pretrained(folder)


def prompts() -> list[list[int]]:
    """Prompts of one token up to three times as many as a query selects, and two that share a prefix."""
    rng = random.Random(0)
    made = [[rng.randrange(2, 512) for _ in range(length)] for length in (1, 40, 300, 511, 513, 900, 1600)]
    return [*made, made[-1][:1024] + made[1]]


def run_vllm(folder: str, backend: str, cache: str, graphs: bool) -> list[Any]:
    """Tokens and log-probabilities of each prompt."""
    from vllm import LLM, SamplingParams

    attention = {"mla_prefill_backend": "ATTNGEN"} if backend.startswith("ATTNGEN") else {}
    engine = LLM(
        model=folder, skip_tokenizer_init=True, dtype="bfloat16", attention_backend=backend, kv_cache_dtype=cache,
        attention_config=attention, max_model_len=2048, max_num_batched_tokens=768, max_num_seqs=8,
        gpu_memory_utilization=0.5, enforce_eager=not graphs,
    )  # fmt: skip
    how = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True, detokenize=False, logprobs=1)
    results = engine.generate([{"prompt_token_ids": tokens} for tokens in prompts()], how)
    return [
        [[token, row[token].logprob] for token, row in zip(one.token_ids, one.logprobs, strict=True)]
        for one in (result.outputs[0] for result in results)
    ]


def run_sglang(folder: str, backend: str, cache: str, graphs: bool) -> list[Any]:
    """Tokens and log-probabilities of each prompt."""
    import sglang

    engine = sglang.Engine(
        model_path=folder, skip_tokenizer_init=True, dtype="bfloat16", attention_backend=backend,
        kv_cache_dtype=cache, context_length=2048, chunked_prefill_size=768, mem_fraction_static=0.5,
        disable_cuda_graph=not graphs,
    )  # fmt: skip
    how = {"max_new_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True}
    results = engine.generate(input_ids=prompts(), sampling_params=how, return_logprob=True)
    made = [[[row[1], row[0]] for row in one["meta_info"]["output_token_logprobs"]] for one in results]
    engine.shutdown()
    return made


def results_of(engine: str, *given: str, indexer: str = "0") -> list[Any]:
    """Results of a run of an engine in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "results.json"
        command = [sys.executable, "-m", "tests.integrations.engines.sparse_runs", "--run", str(out), engine, *given]
        settings = {"ATTNGEN_INDEXER": indexer, "ATTNGEN_JIT": "1", "HF_HUB_OFFLINE": "1"}
        subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, **settings})
        made: list[Any] = json.loads(out.read_text())
        return made


def differences(own: list[Any], ours: list[Any]) -> Iterator[float]:
    """Differences of log-probabilities of each prompt, up to the first token that differs."""
    for prompt, other in zip(own, ours, strict=True):
        assert len(prompt) == len(other) == TOKENS
        for (token, wanted), (made, given) in zip(prompt, other, strict=True):
            yield abs(wanted - given)
            if token != made:
                break


def compare(engine: str, name: str, folder: str) -> bool:
    """Whether attngen's backend and indexer agree with an engine's own on a model, with all caches, eagerly and in
    graphs."""
    agree, (theirs, backend) = True, BACKENDS[engine]
    for cache in CACHES[engine]:
        for graphs in ("", "graphs"):
            own = results_of(engine, folder, theirs, cache, graphs)
            for label, indexer in INDEXERS.items():
                gaps = list(differences(own, results_of(engine, folder, backend, cache, graphs, indexer=indexer)))
                agree = agree and max(gaps) < GAP
                what = f"{engine} {name} {cache} {graphs or 'eager'}{label}"
                print(
                    f"{what}: {len(gaps)} tokens of {TOKENS * len(own)}, largest difference {max(gaps):.3f}", flush=True
                )
    return agree


def main() -> int:
    """Run what the command line names; 1 if backends disagree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", nargs="*", help="vllm, sglang; default: those that are installed")
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.run is not None:
        engine, folder, backend, cache, graphs = given.engines
        run = {"vllm": run_vllm, "sglang": run_sglang}[engine]
        given.run.write_text(json.dumps(run(folder, backend, cache, bool(graphs))))
        return 0
    engines = given.engines or [name for name in BACKENDS if find_spec(name) is not None]
    if not engines:
        parser.error("neither vllm nor sglang is installed here")
    spec = ROOT / "specs" / "integrations" / "engines_sparse.yaml"
    subprocess.run([sys.executable, "-m", "attngen", "build", str(spec)], check=True, cwd=ROOT)
    agree = True
    for name in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            make_model(name, Path(folder))
            for engine in engines:
                agree = compare(engine, name, folder) and agree
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
