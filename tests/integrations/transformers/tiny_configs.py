"""Tiny configurations of the models of transformers, made from the defaults of their classes by shrinking each field.

A field is shrunk by its name, in the configuration and in those inside it: widths to ``HIDDEN``, layers to the fewest
that still have one of each kind, and so on. ``OVERRIDES`` has what single families need beyond that.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

VOCABULARY = 97
HIDDEN, HEADS, GROUPS, HEAD_DIM, INNER = 64, 4, 2, 16, 64
WINDOW, CHUNK = 5, 6
IMAGE, PATCH = 32, 8
POSITIONS = 128

_WIDTH = (
    r"(\w+_)?hidden_size|(\w+_)?d_model|n_embd|(\w+_)?embed_dim|width|dim|hidden_dim|embedding_size|emb_dim|model_dim"
    r"|projection_dim|word_embed_proj_dim|output_dim|projector_hidden_size|out_hidden_size|lru_width|d_inner"
    r"|(input|output)_embedding_size|vision_output_dim|projection_hidden_dim|text_hidden_size|embedding_dim"
    r"|proj_codevector_dim|codevector_dim|codebook_dim|classifier_proj_size|pooler_output_size|xvector_output_dim"
    r"|hidden_size_global|dim_model_base|adapter_(in|out)_dim|projection_size|backbone_hidden_size|d_latents"
    r"|image_token_embed_dim|conv_channels|base_channels|output_hidden_size|embedding_rank|conv_output_size"
)
_INNER = (
    r"(\w+_)?intermediate_size(_mlp)?|(\w+_)?ffn_dim|d_ff|n_inner|mlp_dim|dff|dim_ff|ffn_hidden_size|expert_ffn_hidden_size"
    r"|feed_forward_size|moe_hidden_size|share_expert_dim|prediction_head_size|block_ff_dim"
)
_LAYERS = (
    r"(\w+_)?num_(\w+_)?(hidden_)?layers|(num_)?(hidden_)?layers|n_layers?|(\w+_)?layers|depth|num_blocks"
    r"|resampler_depth"
)
_HEADS = (
    r"n_heads?|(\w+_)?num_(\w+_)?(attention_)?heads|(\w+_)?attention_heads|num_heads|linear_num_(key|value)_heads"
    r"|index_n_heads|resampler_(n_)?heads"
)
_KV_HEADS = r"(\w+_)?num_key_value_heads|(\w+_)?num_kv_heads|num_query_groups"
_HEAD_DIM = r"(\w+_)?head_dim|d_kv|kv_channels|d_head|dim_head|(\w+_)?dim_head|attention_head_size|linear_\w*head_dim"

_RULES: tuple[tuple[str, int], ...] = (
    (r"vocab_size|\w+_vocab_size|vocab_size_per_layer_input", VOCABULARY),
    (r"mamba_n_heads|mamba_num_heads|n_mamba_heads", 8),
    (r"n_groups|mamba_n_groups|mamba_ngroups", 1),
    (r"mamba_d_head|mamba_head_dim|mamba_headdim", HEAD_DIM),
    (r"upsample_groups", HIDDEN),
    (r"encoder_hash_byte_group_vocab", VOCABULARY),
    (r"num_filters|n_filters", 4),
    (r"num_feat_extract_layers", 3),
    (r"qk_head_dim", 2 * HEAD_DIM),
    (r"qk_rope_head_dim|qk_nope_head_dim|v_head_dim", HEAD_DIM),
    (_HEAD_DIM, HEAD_DIM),
    (_HEADS, HEADS),
    (_INNER, INNER),
    (_WIDTH, HIDDEN),
    (r"hidden_size_per_layer_input", HEAD_DIM),
    (r"(\w+_)?lora_rank|laurel_rank|hc_lowrank|adapter_rank|loop_gate_rank", HEAD_DIM),
    (r"(\w+_)*(num|n)_(\w+_)?experts|num_local_experts|zero_expert_num", 4),
    (r"num_experts_per_tok(en)?|moe_topk|moe_k|top_k|num_selects", 2),
    (r"n_group|topk_group|num_expert_group|n_shared_experts", 1),
    (r"index_topk", 4),
    (r"sliding_window(_size)?|attention_window(_size)?|swa_window", WINDOW),
    (r"attention_chunk_size", CHUNK),
    (r"image_size|crop_size|max_image_size|min_image_size", IMAGE),
    (r"patch_size", PATCH),
    (r"(\w+_)?max_(\w+_)?position_embeddings|n_positions|max_seq_len|n_ctx|max_(source|target)_positions|context_length"
     r"|model_max_length|original_max_position_embeddings|seq_len", POSITIONS),
    (r"(\w+_)?num_mel_bins|n_mel_bins|feature_size", 8),
    (r"query_pre_attn_scalar", HEAD_DIM),
    (r"(mamba_)?(d_state|state_size)|ssm_state_size|mamba_d_state", 8),
    (r"(mamba_)?chunk_size|mamba_chunk_size", 8),
    (r"time_step_rank|mamba_dt_rank", 8),
    (r"codebook_size", 32),
    (r"mm_tokens_per_image", 4),
    (r"codevector_dim|proj_codevector_dim", 8),
    (r"num_conv_pos_embeddings", 16),
    (r"num_conv_pos_embedding_groups", 4),
)  # fmt: skip


def tiny(config_class: Any) -> Any:
    """A tiny configuration of a class, or an exception that says why there is none."""
    return config_class.from_dict(shrunk(config_class(**DEFAULTS.get(config_class.model_type, {})).to_dict()))


def shrunk(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a configuration, each shrunk by its name."""
    layers = _number_of_layers(given)
    fields: dict[str, Any] = {}
    for name, value in given.items():
        if name not in _DROPPED:
            fields[name] = _shrunk(name, value, given, layers)
    _token_ids(fields)
    for name, value in OVERRIDES.get(given.get("model_type", ""), {}).items():
        fields[name] = (
            {**fields[name], **value} if isinstance(value, dict) and isinstance(fields.get(name), dict) else value
        )
    return fields


def _shrunk(name: str, value: Any, given: Mapping[str, Any], layers: int) -> Any:
    if isinstance(value, Mapping):
        if name in ("id2label", "label2id"):
            return value
        if name.startswith("rope"):
            return _rope(value)
        if name == "per_layer_config":
            kinds = _kinds(given)
            return {kinds.index(int(at)): shrunk(each) for at, each in value.items() if int(at) in kinds}
        if not all(isinstance(key, str) for key in value):
            return value
        return shrunk(value)
    if isinstance(value, list | tuple):
        return _list(name, list(value), given, layers)
    if value is None and name in _NEVER_NONE:
        return _NEVER_NONE[name]
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if re.fullmatch(_LAYERS, name) and value > 1 and name != "num_feat_extract_layers":
        return layers if name in _MAIN_LAYERS else min(value, 2)
    if re.fullmatch(_KV_HEADS, name):
        names = (
            re.sub("num_(key_value|kv)_heads", "num_attention_heads", name),
            "num_attention_heads",
            "num_heads",
            "n_head",
        )
        heads = next((given[key] for key in names if key in given), None)
        if value == 1:
            return 1
        return HEADS if heads == value else GROUPS
    for pattern, small in _RULES:
        if re.fullmatch(pattern, name):
            return min(value, small)
    return value


_NEVER_NONE = {"head_dim": HEAD_DIM, "vocab_size": VOCABULARY}
#: Fields that name a checkpoint, or layers that the tiny model does not have.
_DROPPED = ("transformers_version", "architectures", "_name_or_path", "stage_names", "out_features", "out_indices")
_MAIN_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
#: Lists with an item for each layer.
_BY_LAYER = (
    "layer_types", "mlp_layer_types", "layers_block_type", "indexer_types", "layer_rope_theta", "no_rope_layers",
    "attention_layers", "attn_layers", "block_types", "num_attention_heads_per_layer",
)  # fmt: skip


def _number_of_layers(given: Mapping[str, Any]) -> int:
    """As many layers as it takes to have one of each kind, in the order of the first ones; two at least."""
    return max(2, len(_kinds(given)))


def _kinds(given: Mapping[str, Any]) -> list[int]:
    """The first layers of each kind, where a configuration lists kinds of layers."""
    lists = [given[name] for name in _BY_LAYER if isinstance(given.get(name), list) and given[name]]
    if not lists:
        return []
    length = min(map(len, lists))
    kinds: dict[Any, int] = {}
    for place in range(length):
        kinds.setdefault(tuple(str(each[place]) for each in lists), place)
    places = sorted(kinds.values())
    if len(places) == 1 and length > 1:
        places.append(1)
    return places


def _list(name: str, value: list[Any], given: Mapping[str, Any], layers: int) -> list[Any]:
    if name in _BY_LAYER and value:
        return [value[place] for place in _kinds(given)]
    if name in ("moe_layers", "mlp_only_layers", "full_attn_idxs", "kv_source_layers", "rope_scaling_layers"):
        return [each for each in value if each < layers]
    if name in _LISTS:
        return _LISTS[name]
    depth = next((given[key] for key in _MAIN_LAYERS if isinstance(given.get(key), int)), None)
    if len(value) == depth:
        return [value[place] for place in (_kinds(given) or range(layers))]
    if value and all(isinstance(each, Mapping) for each in value):
        return [shrunk(each) for each in value]
    return value


#: Convolutions over samples of sound.
_LISTS: dict[str, list[Any]] = {
    "conv_dim": [32, 32, 32], "conv_stride": [5, 4, 2], "conv_kernel": [10, 4, 2], "tdnn_dim": [32, 32],
    "tdnn_kernel": [5, 1], "tdnn_dilation": [1, 1],
}  # fmt: skip


def _rope(value: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of rotary embeddings. Sections of a head's rotated half keep their proportions."""
    rope = dict(value)
    for name, each in value.items():
        if isinstance(each, Mapping):
            rope[name] = _rope(each)
    section = value.get("mrope_section")
    if section:
        half = HEAD_DIM // 2 * value.get("partial_rotary_factor", 1.0)
        scale = half / sum(section)
        smaller = [max(1, math.floor(part * scale)) for part in section]
        smaller[0] += int(half) - sum(smaller)
        rope["mrope_section"] = smaller
    return rope


def _token_ids(fields: dict[str, Any]) -> None:
    """Give each special token that the small vocabulary leaves out a number of its own, from the top down."""
    free = iter(range(VOCABULARY - 1, 40, -1))
    named = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    for name, value in fields.items():
        if not isinstance(value, int | list) or isinstance(value, bool):
            continue
        if name in named and value is not None:
            fields[name] = named[name]
        elif isinstance(value, int) and re.search(r"(token_id|token_index)$", name) and value >= 0:
            fields[name] = next(free)


#: Arguments without which some classes cannot be made.
DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma4_assistant": {
        "text_config": {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    },
    "gemma4_unified_assistant": {
        "text_config": {"model_type": "gemma4_unified_text", "hidden_size_per_layer_input": 0}
    },
}
_SWIN = {"embed_dim": 32, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4, "patch_size": 4}
_STAGES = {"depths": [1, 1], "hidden_sizes": [32, 64]}
_SECTIONS = {"rope_parameters": {"mrope_section": [2, 3, 3]}}
OVERRIDES: dict[str, dict[str, Any]] = {
    "qwen2_vl": _SECTIONS,
    "qwen2_vl_text": _SECTIONS,
    "qwen2_5_omni_text": _SECTIONS,
    "qwen2_5_vl_text": _SECTIONS,
    "paddleocr_vl_text": _SECTIONS,
    "glm4v_text": _SECTIONS,
    "glm_ocr_text": _SECTIONS,
    "glm46v_text": _SECTIONS,
    "glm4v_moe_text": {"rope_parameters": {"mrope_section": [1, 1, 2]}},
    "hunyuan_vl_text": {"rope_parameters": {"mrope_section": [2, 2, 2, 2]}},
    "ernie4_5_vl_moe_text": {"rope_parameters": {"mrope_section": [3, 3, 2]}},
    "cohere_compass_text": {
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in
                            ("full_attention", "sliding_attention")},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "mistral4": {"head_dim": 32},
    "dots3_note_text": {"head_dim": 32},
    "hrm_text": {"num_hidden_layers": 32, "num_layers_per_stack": 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "zamba2": {"attention_head_dim": 32, "kv_channels": 16, "attention_hidden_size": 128, "hybrid_layer_ids": [1]},
    "qwen4_exp_text": {  # so many heads that blocks hardly ever have equal scores, of which any may be selected
        "indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    "molmo2_adapter": {"vision_feature_layer": [1, 0]},
    "granite4_vision": {"deepstack_layer_map": [[0, 0]], "downsample_rate": "2/4"},
    "xmod": {"default_language": "en_XX"},
    "esm": {"pad_token_id": 0, "mask_token_id": 4},
    "shieldgemma2": {"yes_token_index": 5, "no_token_index": 6},
    "audio-spectrogram-transformer": {"max_length": 64, "patch_size": 8},
    "musicgen_decoder": {"num_codebooks": 1},
    "musicgen_melody_decoder": {"num_codebooks": 1},
    "deepseek_v4": {
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 6}, "o_groups": 2,
    },
    "dory": {
        "n_input_layers": 2, "n_recurrent_layers": 2, "n_output_layers": 2, "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "mlp", "full_attention", "mlp", "sliding_attention", "mlp"],
    },
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_d_head": 8},
    "gemma3n_text": {
        "num_hidden_layers": 4, "num_kv_shared_layers": 2, "intermediate_size": [INNER] * 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "activation_sparsity_pattern": [0.5, 0.0] * 2,
    },
    "moonshine_streaming": {"num_key_value_heads": 4},
    "step3p5": {"sliding_window": WINDOW},
    "glm5_next_text": {"index_kpool": 2, "qk_head_dim": 16},
    "apertus1p5": {"image_token_offset": 10, "audio_token_offset": 42},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 16}},
    "zamba": {
        "num_hidden_layers": 3, "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "attention_hidden_size": 128, "attention_head_dim": 32,
    },
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "mobilebert": {"hidden_size": 128, "true_hidden_size": 64, "intra_bottleneck_size": 64},
    "perceiver": {"num_cross_attention_heads": 1},
    "reformer": {"axial_pos_embds": False},
    "efficientnet": {"width_coefficient": 0.25, "depth_coefficient": 0.25, "hidden_dim": 320},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 60, "vision_end_token_id": 61},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 60, "vision_end_token_id": 61},
    "mamba2": {"num_heads": 8},
    "led": {"attention_window": 4},
    "longformer": {"attention_window": 4},
    "swin": _SWIN,
    "swinv2": _SWIN,
    "donut-swin": _SWIN,
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "nemotron": {"num_key_value_heads": 2},
    "codegen": {"rotary_dim": 8},
    "gptj": {"rotary_dim": 8},
    "bamba": {"attn_layer_indices": [1], "num_hidden_layers": 2},
    "convnext": _STAGES | {"num_stages": 2},
    "convnextv2": _STAGES | {"num_stages": 2},
    "resnet": _STAGES | {"embedding_size": 16},
    "regnet": _STAGES | {"embedding_size": 16, "groups_width": 16},
    "bit": _STAGES | {"embedding_size": 16, "num_groups": 4},
    "chameleon": {"vocabulary_map": {"<image>": 95}},
    "emu3": {"vocabulary_map": {"<image>": 95, "<|extra_200|>": 94}},
}  # fmt: skip
