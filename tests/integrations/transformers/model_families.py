"""Tiny models of more families than ``families`` has, and how each is run: prompts, padding, generation, images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from tests.integrations.transformers import families
from tests.integrations.transformers.families import VOCABULARY, WINDOW, batch

DIM = 16
_TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_COMMON = {
    **_TOKENS, "hidden_size": 4 * DIM, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
_ENCODER = {name: value for name, value in _COMMON.items() if name != "num_key_value_heads"}
_VISION = {
    "hidden_size": 48, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32,
    "patch_size": 16,
}  # fmt: skip
_IMAGES = 4  # tokens of an image: (image_size / patch_size)²


@dataclass(frozen=True)
class Family:
    """Classes of a family, and the way it is run. ``decodes``: its models generate text by themselves."""

    make: Callable[[], tuple[Any, Any]]
    run: Callable[[Any], None]
    decodes: bool = False


def prompts(model: Any) -> None:
    for padding in ("none", "left", "right"):
        model(**batch("llama", padding).inputs)


def generates(model: Any) -> None:
    prompts(model)
    for padding in ("none", "left"):
        families.generate(model, batch("llama", padding))


def generates_from_static_caches(model: Any) -> None:
    generates(model)
    for padding in ("none", "left"):
        families.generate(model, batch("llama", padding), cache_implementation="static")


def pairs(family: str) -> Callable[[Any], None]:
    """A run of an encoder-decoder model: padded on either side, and generating."""

    def run(model: Any) -> None:
        for padding in families.PADDINGS:
            model(**batch(family, padding, dtype=model.dtype).inputs)
        families.generate(model, batch(family, "none", dtype=model.dtype))

    return run


def pictures(model: Any) -> None:
    size = model.config.image_size
    model(pixel_values=torch.randn(2, 3, size, size, dtype=model.dtype))


def text_and_pictures(model: Any) -> None:
    """Run prompts of text alone, and a prompt that holds an image and generates."""
    generates(model)
    size, token = model.config.vision_config.image_size, model.config.image_token_id
    ids = torch.tensor([[1, *(token,) * _IMAGES, 5, 6, 7]])
    kinds = (ids == token).long()
    takes = {"token_type_ids": kinds} if model.config.model_type in ("gemma3", "paligemma") else {}
    pixels = torch.randn(1, 3, size, size, dtype=model.dtype)
    model(input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values=pixels, **takes)


def _causal(name: str, head_dim: bool = True, **more: Any) -> Callable[[], tuple[Any, Any]]:
    """Return the maker of a decoder whose configuration has the usual names."""

    def make() -> tuple[Any, Any]:
        fields = {**_COMMON, **({"head_dim": DIM} if head_dim else {}), **more}
        return getattr(transformers, f"{name}ForCausalLM"), getattr(transformers, f"{name}Config")(**fields)

    return make


def _gpt2() -> tuple[Any, Any]:
    return transformers.GPT2LMHeadModel, transformers.GPT2Config(**_TOKENS, n_embd=4 * DIM, n_layer=2, n_head=4)


def _deepseek() -> tuple[Any, Any]:
    config = transformers.DeepseekV3Config(
        **{**_COMMON, "num_key_value_heads": 4}, moe_intermediate_size=16, n_routed_experts=4, n_group=2, topk_group=1,
        num_experts_per_tok=2, first_k_dense_replace=1, kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8,
        qk_nope_head_dim=DIM, v_head_dim=DIM, n_shared_experts=1,
    )  # fmt: skip
    return transformers.DeepseekV3ForCausalLM, config


def _gemma4() -> tuple[Any, Any]:
    """Its layers without a window have head dim 512."""
    config = transformers.Gemma4TextConfig(
        **_COMMON, head_dim=DIM, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"],
        hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCABULARY,
    )  # fmt: skip
    return transformers.Gemma4ForCausalLM, config


def _bert() -> tuple[Any, Any]:
    return transformers.BertForMaskedLM, transformers.BertConfig(**_ENCODER)


def _bart() -> tuple[Any, Any]:
    config = transformers.BartConfig(
        **_TOKENS, d_model=4 * DIM, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, decoder_start_token_id=2,
    )  # fmt: skip
    return transformers.BartForConditionalGeneration, config


def _vit() -> tuple[Any, Any]:
    return transformers.ViTModel, transformers.ViTConfig(**_VISION)


def _gemma3_with_images() -> tuple[Any, Any]:
    text = {
        **_COMMON, "head_dim": DIM, "sliding_window": WINDOW, "vocab_size": 120,
        "layer_types": ["sliding_attention", "full_attention"],
    }  # fmt: skip
    config = transformers.Gemma3Config(
        text_config=text, vision_config={**_VISION, "vision_use_head": False}, mm_tokens_per_image=_IMAGES,
        image_token_index=100, boi_token_index=101, eoi_token_index=102,
    )  # fmt: skip
    return transformers.Gemma3ForConditionalGeneration, config


def _paligemma() -> tuple[Any, Any]:
    text = {**_COMMON, "head_dim": DIM, "model_type": "gemma", "vocab_size": 120}
    vision = {**_VISION, "model_type": "siglip_vision_model", "projection_dim": 4 * DIM, "vision_use_head": False}
    config = transformers.PaliGemmaConfig(
        text_config=text, vision_config=vision, image_token_index=100, projection_dim=4 * DIM, hidden_size=4 * DIM,
    )  # fmt: skip
    return transformers.PaliGemmaForConditionalGeneration, config


def _llava() -> tuple[Any, Any]:
    vision = {**_VISION, "model_type": "clip_vision_model", "projection_dim": 48}
    config = transformers.LlavaConfig(
        text_config={**_COMMON, "head_dim": DIM, "model_type": "llama", "vocab_size": 120}, vision_config=vision,
        image_token_index=100,
    )  # fmt: skip
    return transformers.LlavaForConditionalGeneration, config


def _known(name: str) -> Callable[[], tuple[Any, Any]]:
    return lambda: families.MAKERS[name](DIM)


_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}

FAMILIES: dict[str, Family] = {
    **{
        name: Family(_known(name), generates if name == "llama4" else generates_from_static_caches, decodes=True)
        for name in families.DECODERS
    },
    "modernbert": Family(_known("modernbert"), prompts),
    "whisper": Family(_known("whisper"), pairs("whisper")),
    "t5": Family(_known("t5"), pairs("t5")),
    "mixtral": Family(_causal("Mixtral", **_EXPERTS), generates_from_static_caches, decodes=True),
    "qwen2": Family(_causal("Qwen2", head_dim=False), generates_from_static_caches, decodes=True),
    "qwen2_windows": Family(
        _causal("Qwen2", head_dim=False, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
        generates_from_static_caches, decodes=True,
    ),
    "qwen3_moe": Family(_causal("Qwen3Moe", **_EXPERTS, moe_intermediate_size=16), generates, decodes=True),
    "gemma": Family(_causal("Gemma"), generates_from_static_caches, decodes=True),
    "phi3": Family(_causal("Phi3", head_dim=False), generates_from_static_caches, decodes=True),
    "gpt2": Family(_gpt2, generates, decodes=True),
    "gpt_neox": Family(_causal("GPTNeoX", head_dim=False), generates, decodes=True),
    "olmo2": Family(_causal("Olmo2", head_dim=False), generates_from_static_caches, decodes=True),
    "cohere2": Family(_causal("Cohere2", sliding_window=WINDOW, sliding_window_pattern=2), generates, decodes=True),
    "granite": Family(_causal("Granite", head_dim=False), generates, decodes=True),
    "deepseek_v3": Family(_deepseek, generates, decodes=True),
    **({"gemma4": Family(_gemma4, generates, decodes=True)} if hasattr(transformers, "Gemma4TextConfig") else {}),
    "bert": Family(_bert, prompts),
    "bart": Family(_bart, pairs("t5")),
    "vit": Family(_vit, pictures),
    "gemma3_with_images": Family(_gemma3_with_images, text_and_pictures),
    "paligemma": Family(_paligemma, text_and_pictures),
    "llava": Family(_llava, text_and_pictures),
}  # fmt: skip
