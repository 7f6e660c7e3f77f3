"""Tiny random models of ten families, and what a batch of padded sequences gives on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor

import attngen.integrations.transformers as attngen_transformers
from attngen.integrations.transformers.versions import cache_name, cache_of

VOCABULARY = 97
WINDOW = 5
LENGTHS = (14, 11, 8)  # real tokens of each sequence of a batch
LENGTH = max(LENGTHS)


def _common(head_dim: int) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY, "hidden_size": 4 * head_dim, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": head_dim, "max_position_embeddings": 512,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip


def _llama(d: int) -> tuple[Any, Any]:
    return transformers.LlamaForCausalLM, transformers.LlamaConfig(**_common(d))


def _mistral(d: int) -> tuple[Any, Any]:
    return transformers.MistralForCausalLM, transformers.MistralConfig(**_common(d), sliding_window=WINDOW)


def _gemma2(d: int) -> tuple[Any, Any]:
    config = transformers.Gemma2Config(
        **_common(d), sliding_window=WINDOW, query_pre_attn_scalar=d, attn_logit_softcapping=1.5
    )
    return transformers.Gemma2ForCausalLM, config


def _gemma3(d: int) -> tuple[Any, Any]:
    config = transformers.Gemma3TextConfig(
        **_common(d), sliding_window=WINDOW, query_pre_attn_scalar=d,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    return transformers.Gemma3ForCausalLM, config


def _qwen3(d: int) -> tuple[Any, Any]:
    return transformers.Qwen3ForCausalLM, transformers.Qwen3Config(**_common(d))


def _gpt_oss(d: int) -> tuple[Any, Any]:
    config = transformers.GptOssConfig(
        **_common(d), sliding_window=WINDOW, num_local_experts=4, num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    return transformers.GptOssForCausalLM, config


def _llama4(d: int) -> tuple[Any, Any]:
    config = transformers.Llama4TextConfig(
        **{**_common(d), "num_hidden_layers": 4}, attention_chunk_size=6, intermediate_size_mlp=48,
        num_local_experts=2, num_experts_per_tok=1,
    )  # fmt: skip
    return transformers.Llama4ForCausalLM, config


def _modernbert(d: int) -> tuple[Any, Any]:
    common = {name: value for name, value in _common(d).items() if name not in ("head_dim", "num_key_value_heads")}
    config = transformers.ModernBertConfig(**common, local_attention=6, global_attn_every_n_layers=2)
    return transformers.ModernBertForMaskedLM, config


def _whisper(d: int) -> tuple[Any, Any]:
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY, d_model=4 * d, num_mel_bins=8, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48,
        max_source_positions=20, max_target_positions=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1, suppress_tokens=[], begin_suppress_tokens=[], dropout=0.0,
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration, config


def _t5(d: int) -> tuple[Any, Any]:
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=4 * d, d_kv=d, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0,
        relative_attention_num_buckets=8, relative_attention_max_distance=20, pad_token_id=0, eos_token_id=2,
        decoder_start_token_id=1,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration, config


MAKERS: dict[str, Callable[[int], tuple[Any, Any]]] = {
    "llama": _llama, "mistral": _mistral, "gemma2": _gemma2, "gemma3": _gemma3, "qwen3": _qwen3, "gpt_oss": _gpt_oss,
    "llama4": _llama4, "modernbert": _modernbert, "whisper": _whisper, "t5": _t5,
}  # fmt: skip
DECODERS = ("llama", "mistral", "gemma2", "gemma3", "qwen3", "gpt_oss", "llama4")
GENERATORS = (*DECODERS, "whisper", "t5")
PADDINGS = ("none", "left", "right")


def make(
    family: str, head_dim: int, implementation: str, device: str = "cpu", dtype: torch.dtype = torch.float32, *,
    all_experts: bool = False,
) -> Any:  # fmt: skip
    """Return a model in evaluation mode. Its weights are so large that attention is far from uniform.

    The same family always has the same weights. With ``all_experts`` every token goes to each of them, so that no
    rounding sends one elsewhere. T5 passes copies of its configuration on, so that the implementation
    has to be known when the model is made.
    """
    attngen_transformers.register()
    cls, config = MAKERS[family](head_dim)
    config._attn_implementation = implementation
    if all_experts and hasattr(config, "num_local_experts"):
        config.num_experts_per_tok = config.num_local_experts
    torch.manual_seed(sum(map(ord, family)))
    model = cls(config).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            torch.nn.init.normal_(parameter, std=1.2 / parameter.shape[-1] ** 0.5)
        elif "sinks" in name:
            torch.nn.init.normal_(parameter)
    return model.to(device, dtype)


@dataclass(frozen=True)
class Batch:
    """The inputs of a model, and which of its output tokens count."""

    inputs: dict[str, Any]
    counts: Tensor  # (batch, length) bool


def batch(family: str, padding: str, device: str = "cpu", dtype: torch.dtype = torch.float32, times: int = 1) -> Batch:
    """Return a batch whose sequences have ``times`` × ``LENGTHS`` tokens, padded as asked; all are full with ``none``.

    Whisper's text is never longer than ``LENGTHS``, as its positions are few.
    """
    lengths = LENGTHS if family == "whisper" else tuple(times * length for length in LENGTHS)
    longest = max(lengths)
    torch.manual_seed(7)
    ids = torch.randint(3, VOCABULARY, (len(lengths), longest))
    real = torch.ones_like(ids, dtype=torch.bool)
    for row, length in enumerate(lengths):
        if padding == "left":
            real[row, : longest - length] = False
        elif padding == "right":
            real[row, length:] = False
    ids = ids.masked_fill(~real, 0).to(device)
    real = real.to(device)
    if family == "whisper":
        features = torch.randn(len(lengths), 8, 40).to(device, dtype)
        # The audio is never padded; the text is.
        return Batch(
            {"input_features": features, "decoder_input_ids": ids, "decoder_attention_mask": real.long()}, real
        )
    if family == "t5":
        target = torch.randint(3, VOCABULARY, (len(lengths), 9 * times)).to(device)
        inputs = {"input_ids": ids, "attention_mask": real.long(), "decoder_input_ids": target}
        return Batch(inputs, torch.ones_like(target, dtype=torch.bool))
    return Batch({"input_ids": ids, "attention_mask": real.long()}, real)


def logits(model: Any, given: Batch, **more: Any) -> Tensor:
    """Return the logits of the tokens that count, (tokens, vocabulary)."""
    return model(**given.inputs, **more).logits[given.counts]


def gradients(model: Any, actual: Tensor) -> dict[str, Tensor]:
    """Return the gradients of all parameters for a loss in which every logit has a weight of its own."""
    model.zero_grad(set_to_none=True)
    weights = torch.linspace(-1, 1, actual.numel(), device=actual.device).view_as(actual)
    (actual.float() * weights).sum().backward()
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}


def generate(model: Any, given: Batch, **more: Any) -> tuple[Tensor, Tensor]:
    """Return the tokens and the logits (steps, batch, vocabulary) of greedy decoding against a cache."""
    inputs = {name: value for name, value in given.inputs.items() if not name.startswith("decoder")}
    steps = 8
    actual = model.generate(
        **inputs, max_new_tokens=steps, min_new_tokens=steps, do_sample=False, num_beams=1, output_logits=True,
        return_dict_in_generate=True, **more,
    )  # fmt: skip
    return actual.sequences, torch.stack(actual.logits)


def step_by_step(model: Any, given: Batch, prefill: int) -> Tensor:
    """Return the logits of the tokens that count, from a decoder that reads ``prefill`` tokens and then one at a time.

    The cache holds what was read. For batches padded on the left, or not at all.
    """
    ids, real = given.inputs["input_ids"], given.inputs["attention_mask"]
    positions = (real.cumsum(1) - 1).clamp(min=0)
    cache, actual = None, []
    for start, stop in [(0, prefill), *((n, n + 1) for n in range(prefill, ids.shape[1]))]:
        step = model(
            input_ids=ids[:, start:stop], attention_mask=real[:, :stop], position_ids=positions[:, start:stop],
            use_cache=True, **{cache_name(model.forward): cache},
        )  # fmt: skip
        cache = cache_of(step)
        actual.append(step.logits)
    return torch.cat(actual, dim=1)[given.counts]
