"""Tiny configurations of the models of transformers, made from the defaults of their classes by shrinking each field.

A field is shrunk by its name, in the configuration and in those inside it: widths to ``HIDDEN``, layers to the fewest
that still have one of each kind, and so on. ``OVERRIDES`` has what single families need beyond that.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
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
    r"(\w+_)?num_(\w+_)?(hidden_)?layers|(num_)?(hidden_)?layers|n_layers?|(\w+_)?layers|depth|num_blocks|resampler_depth"
)
_HEADS = (
    r"n_heads?|(\w+_)?num_(\w+_)?(attention_)?heads|(\w+_)?attention_heads|num_heads|linear_num_(key|value)_heads"
    r"|index_n_heads|resampler_(n_)?heads"
)
_KV_HEADS = r"(\w+_)?num_key_value_heads|(\w+_)?num_kv_heads|num_query_groups"
_HEAD_DIM = r"(\w+_)?head_dim|d_kv|kv_channels|d_head|dim_head|(\w+_)?dim_head|attention_head_size|linear_\w*head_dim"

_RULES: tuple[tuple[str, int], ...] = (
    (r"vocab_size|\w+_vocab_size|vocab_size_per_layer_input", VOCABULARY),
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
    (r"mamba_n_heads|mamba_num_heads|n_mamba_heads", 8),
    (r"mamba_d_head|mamba_head_dim|mamba_headdim", HEAD_DIM),
    (r"(mamba_)?chunk_size|mamba_chunk_size", 8),
    (r"time_step_rank|mamba_dt_rank", 8),
    (r"codebook_size", 32),
    (r"mm_tokens_per_image", 4),
    (r"codevector_dim|proj_codevector_dim", 8),
    (r"num_conv_pos_embeddings", 16),
    (r"num_conv_pos_embedding_groups", 4),
)  # fmt: skip

_MOVED = re.compile(r"(\w+_)?(token_id|token_index|_id|_index)$")


def tiny(config_class: Any) -> Any:
    """A tiny configuration of a class, or an exception that says why there is none."""
    family = config_class.model_type
    given = shrunk(config_class().to_dict())
    for path, value in OVERRIDES.get(family, {}).items():
        *outer, last = path.split(".")
        owner = given
        for name in outer:
            owner = owner.setdefault(name, {})
        if value is REMOVED:
            owner.pop(last, None)
        else:
            owner[last] = value
    return config_class.from_dict(given)


def shrunk(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a configuration, each shrunk by its name."""
    layers = _number_of_layers(given)
    found: dict[str, Any] = {}
    for name, value in given.items():
        if name in ("transformers_version", "architectures", "_name_or_path"):
            continue
        found[name] = _shrunk(name, value, given, layers)
    _token_ids(found)
    return found


def _shrunk(name: str, value: Any, given: Mapping[str, Any], layers: int) -> Any:
    if isinstance(value, Mapping):
        if name in ("id2label", "label2id"):
            return value
        if "rope_type" in value or "rope_theta" in value or name.startswith("rope"):
            return _rope(value)
        return shrunk(value)
    if isinstance(value, list | tuple):
        return _list(name, list(value), given, layers)
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if re.fullmatch(_LAYERS, name) and value > 1 and not name.startswith("num_feat_extract"):
        return layers if name in _MAIN_LAYERS else min(value, 2)
    if re.fullmatch(_KV_HEADS, name):
        heads = next((given[key] for key in ("num_attention_heads", "num_heads", "n_head") if key in given), None)
        if value == 1:
            return 1
        return HEADS if heads == value else GROUPS
    for pattern, small in _RULES:
        if re.fullmatch(pattern, name):
            return min(value, small)
    return value


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
    if value and all(isinstance(each, Mapping) for each in value):
        return [shrunk(each) for each in value]
    return value


def _rope(value: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of rotary embeddings. Sections of a head's rotated half keep their proportions."""
    found = dict(value)
    for name, each in value.items():
        if isinstance(each, Mapping):
            found[name] = _rope(each)
    section = value.get("mrope_section")
    if section:
        half = HEAD_DIM // 2 * value.get("partial_rotary_factor", 1.0)
        scale = half / sum(section)
        smaller = [max(1, math.floor(part * scale)) for part in section]
        smaller[0] += int(half) - sum(smaller)
        found["mrope_section"] = smaller
    return found


def _token_ids(found: dict[str, Any]) -> None:
    """Give each special token that the small vocabulary leaves out a number of its own, from the top down."""
    free = iter(range(VOCABULARY - 1, 40, -1))
    named = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    for name, value in found.items():
        if not isinstance(value, int | list) or isinstance(value, bool):
            continue
        if name in named and value is not None:
            found[name] = named[name]
        elif isinstance(value, int) and re.search(r"(token_id|token_index|_token)$", name) and value >= 0:
            found[name] = next(free)


REMOVED = object()
OVERRIDES: dict[str, dict[str, Any]] = {}
