"""Inputs that a model of transformers is run with to see what it asks for: shapes only, without data."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from attngen.integrations.transformers.versions import cache_name

BATCH, TOKENS = 2, 16


def inputs_of(model: Any) -> dict[str, Any] | str:
    """Return the inputs of a model, by what its forward takes, or why there are none."""
    takes = inspect.signature(model.forward).parameters
    config, main = model.config, model.main_input_name
    ids = torch.ones(BATCH, TOKENS, dtype=torch.long, device="meta")
    if "grid_thw" in takes:  # patches of images of several sizes, in one row
        patch = getattr(config, "temporal_patch_size", 1) * config.patch_size**2
        channels = getattr(config, "in_channels", None) or getattr(config, "in_chans", 3)
        first = next(iter(takes))
        rows = torch.empty(TOKENS, channels * patch, dtype=model.dtype, device="meta")
        return {first: rows, "grid_thw": torch.tensor([[1, 4, TOKENS // 4]], device="cpu")}
    if main == "pixel_values" or ("pixel_values" in takes and main not in takes):
        main = "pixel_values"
        seen = getattr(config, "vision_config", None) or getattr(config, "encoder", None) or config
        size = getattr(seen, "image_size", 224)
        height, width = (size, size) if isinstance(size, int) else tuple(size)
        channels = getattr(seen, "num_channels", 3)
        return {main: torch.empty(BATCH, channels, height, width, dtype=model.dtype, device="meta")}
    if main == "input_features" and hasattr(config, "num_mel_bins") and hasattr(config, "max_source_positions"):
        shape = (BATCH, config.num_mel_bins, 2 * config.max_source_positions)
        given: dict[str, Any] = {main: torch.empty(shape, dtype=model.dtype, device="meta")}
    elif main == "input_values":
        given = {main: torch.empty(BATCH, 16000, dtype=model.dtype, device="meta")}  # a second of sound
    elif "input_ids" in takes:
        given = {"input_ids": ids, **({"attention_mask": ids} if "attention_mask" in takes else {})}
    else:
        return f"the shape of its '{main}' is not known"
    if "decoder_input_ids" in takes:
        given["decoder_input_ids"] = ids
        if "decoder_attention_mask" in takes:
            given["decoder_attention_mask"] = ids
    return given


def of_images(model: Any) -> dict[str, Tensor]:
    """Return the argument that tells a multimodal model which tokens are images, if it takes one."""
    if len(getattr(model.config, "sub_configs", {})) < 2:
        return {}
    takes = inspect.signature(model.forward).parameters
    kinds = torch.ones(BATCH, TOKENS, dtype=torch.long, device="meta")
    return {name: kinds for name in ("token_type_ids", "mm_token_type_ids") if name in takes}


def step_of(model: Any, given: Mapping[str, Any], outputs: Any, cache: Any) -> dict[str, Any]:
    """Return the inputs of a step of a model that reads one more token against a cache."""
    from transformers.modeling_outputs import BaseModelOutput

    one = torch.ones(BATCH, 1, dtype=torch.long, device="meta")
    against = {cache_name(model.forward): cache}
    longer = torch.ones(BATCH, TOKENS + 1, dtype=torch.long, device="meta")
    if "decoder_input_ids" in given:
        rest = {name: value for name, value in given.items() if name == "attention_mask"}
        if "decoder_attention_mask" in given:
            rest["decoder_attention_mask"] = longer
        encoded = BaseModelOutput(last_hidden_state=outputs.encoder_last_hidden_state)
        return {"decoder_input_ids": one, "encoder_outputs": encoded, **against, **rest}
    step = {"input_ids": one, **against}
    return {**step, "attention_mask": longer} if "attention_mask" in given else step
