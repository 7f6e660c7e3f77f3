"""Inputs of the models of the sweep, and the outputs of theirs that count."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from attngen.integrations.transformers.model_inputs import inputs_of
from attngen.integrations.transformers.versions import cache_name, cache_of
from tests.integrations.transformers import tiny_configs

#: Tokens of the sequences of a prompt, and steps after it.
LENGTHS = (14, 11, 8)
STEPS = 4

#: Features of a frame of sound, by the name of the field.
_FEATURES = (
    "num_mel_bins", "feature_projection_input_dim", "input_feat_per_channel", "n_mel_bins", "feature_size", "input_dim",
)  # fmt: skip
FRAMES = 40


class UntestedError(Exception):
    """A model that cannot be compared: the message says why."""


def first_line(error: BaseException) -> str:
    """The first line of an exception, without paths and addresses, which differ by machine."""
    text = str(error).strip()
    missing = re.search(r"requires the (\w+) library|No module named '(\w+)'", text)
    if isinstance(error, ImportError) and missing:
        return f"needs {missing[1] or missing[2]}, which is not installed"
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    if lines[0].endswith(":") and len(lines) > 1:
        lines[0] = lines[1]
    return f"{type(error).__name__}: {lines[0]}"[:200]


def candidates(model: Any) -> Iterator[dict[str, Any]]:
    """Inputs that a model may take, text alone first."""
    takes = inspect.signature(model.forward).parameters
    ids = torch.ones(2, 16, dtype=torch.long, device="meta")
    if "input_ids" in takes:
        text = {name: ids for name in takes if re.fullmatch(r"(decoder_)?(input_ids|attention_mask)", name)}
        text |= {name: ids for name in ("qformer_input_ids",) if name in takes}
        if model.config.model_type == "diffusion_gemma":  # the decoder's keys are those of the encoder and its own
            text["decoder_attention_mask"] = torch.ones(len(LENGTHS), 2 * LENGTHS[0], dtype=torch.long)
        if "bbox" in takes:
            text["bbox"] = torch.zeros(len(LENGTHS), LENGTHS[0], 4)
        yield text
        size = next((each for each in map(_image_size, configs(model)) if each), 32)
        pixels = torch.empty(len(LENGTHS), 3, size, size, device="meta")
        yield {**text, "pixel_values": pixels}
        yield {**text, "pixel_values": pixels[:, None]}
        streams = getattr(model.config, "num_codebooks", None)
        if streams:
            yield {**text, "input_ids": torch.randint(3, 30, (len(LENGTHS), LENGTHS[0], streams + 1))}
    known = inputs_of(model)
    if not isinstance(known, str):
        yield known
    main = model.main_input_name
    rest = {name: ids for name in ("decoder_input_ids", "decoder_attention_mask") if name in takes}
    if main in ("input_features", "input_values", "inputs", "audio_features"):
        yield {main: torch.empty(len(LENGTHS), 16000, device="meta"), **rest}
        yield {main: torch.empty(len(LENGTHS), 1, 16000, device="meta"), **rest}
        for config in configs(model):
            for name in _FEATURES:
                width = getattr(config, name, None)
                if isinstance(width, int):
                    length = getattr(config, "max_length", None) or FRAMES
                    for shape in (
                        (length, width),
                        (width, length),
                        (2 * getattr(config, "max_source_positions", 0), width),
                    ):
                        yield {main: torch.empty(len(LENGTHS), *shape, device="meta"), **rest}
        for width in (16, 32):
            yield {main: torch.empty(len(LENGTHS), FRAMES, width, device="meta"), **rest}
    if main == "pixel_values" and "input_ids" not in takes:
        for size in (32, 64, 224):
            shape = (len(LENGTHS), getattr(model.config, "num_channels", 3), size, size)
            yield {main: torch.empty(shape, device="meta"), **rest}
        if "spatial_shapes" in takes:
            patches = torch.randn(len(LENGTHS), 16, 3 * tiny_configs.PATCH**2)
            yield {
                main: patches, "pixel_attention_mask": torch.ones(patches.shape[:2], dtype=torch.long),
                "spatial_shapes": torch.tensor([[4, 4]] * len(LENGTHS)),
            }  # fmt: skip
    if main == "flattened_patches":
        patches = torch.randn(len(LENGTHS), 16, 770)
        patches[..., :2] = torch.arange(1, 17)[:, None]
        yield {main: patches, **rest}


def configs(model: Any) -> list[Any]:
    return [model.config, *(getattr(model.config, name) for name in getattr(model.config, "sub_configs", ()))]


def _image_size(config: Any) -> int | None:
    size = getattr(config, "image_size", None)
    return size if isinstance(size, int) else None


def accepted(eager: Any) -> dict[str, Any]:
    """The first inputs with which a model runs."""
    reason = "no inputs of its kind are known here"
    for each in candidates(eager):
        given = filled(each, eager)
        try:
            with torch.no_grad():
                outputs(eager, given)
        except TimeoutError:
            raise
        except Exception as error:
            if not reason.startswith("eager"):
                reason = f"eager fails with the inputs that are known here: {first_line(error)}"
        else:
            return given
    raise UntestedError(reason)


def filled(given: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """Inputs of the shapes of others, which have no data."""
    torch.manual_seed(3)
    device = next(model.parameters()).device
    values: dict[str, Any] = {}
    for name, value in given.items():
        if isinstance(value, Tensor) and value.is_meta:
            if value.is_floating_point():
                value = torch.randn(value.shape, dtype=value.dtype)
            elif name.endswith("attention_mask"):
                value = torch.ones(len(LENGTHS), LENGTHS[0], dtype=torch.long)
            else:
                value = torch.randint(3, 40, (len(LENGTHS), LENGTHS[0]))
        values[name] = value.to(device) if isinstance(value, Tensor) else value
    for name, value in values.items():
        if isinstance(value, Tensor) and value.is_floating_point() and value.shape[0] == 2:
            values[name] = (
                torch.randn(len(LENGTHS), *value.shape[1:], dtype=value.dtype, device=device)
                if any("ids" in each for each in values)
                else value
            )
    return values


def padded_inputs(given: Mapping[str, Any], side: str) -> dict[str, Any] | None:
    """The inputs with shorter sequences, padded; ``_real`` are the tokens of the output that count."""
    actual = dict(given)
    padded = False
    for ids, mask in (("input_ids", "attention_mask"), ("decoder_input_ids", "decoder_attention_mask")):
        if ids not in given or mask not in given:
            continue
        if given[mask].shape[-1] > given[ids].shape[1]:
            actual[mask] = torch.cat([actual["attention_mask"], torch.ones_like(given[ids])], 1)
            actual["_real"] = torch.ones_like(given[ids], dtype=torch.bool)
            continue
        real = torch.ones_like(given[mask], dtype=torch.bool)
        for row, length in enumerate(LENGTHS):
            missing = LENGTHS[0] - length
            if missing:
                real[row, slice(None, missing) if side == "left" else slice(length, None)] = False
        actual[ids] = given[ids].masked_fill(~(real if given[ids].dim() == 2 else real[..., None]), 0)
        actual[mask] = real.long()
        padded = True
        if ids == "decoder_input_ids" or "decoder_input_ids" not in given:
            actual["_real"] = real
    return actual if padded else None


def outputs(model: Any, given: Mapping[str, Any], real: Tensor | None = None, grad: bool = False) -> list[Tensor]:
    """The tensors of floats of an output that count: logits where there are any."""
    actual = model(**given)
    for name in ("logits", "last_hidden_state", "prediction_logits", "reconstruction"):
        first = getattr(actual, name, None)
        if isinstance(first, Tensor):
            break
    else:
        values = actual if isinstance(actual, tuple) else tuple(actual.values())
        first = next(each for each in values if isinstance(each, Tensor) and each.is_floating_point())
    if real is not None:  # of an output for each sequence, the last token may be padding: only the longest counts
        first = first[real] if first.shape[:2] == real.shape else first[real.all(1)]
    return [first]


def stepwise(model: Any, given: Mapping[str, Any], real: Tensor | None) -> list[Tensor]:
    """The logits of a prompt, of two tokens after it one at a time, and of the rest at once, against a cache."""
    name = "decoder_input_ids" if "decoder_input_ids" in given else "input_ids"
    mask = "decoder_attention_mask" if name.startswith("decoder") else "attention_mask"
    ids = given[name]
    takes = cache_name(model.forward)
    cache, actual = None, []
    for start, stop in ((0, 8), (8, 9), (9, 10), (10, 14)):
        inputs = {**given, name: ids[:, start:stop], "use_cache": True, takes: cache}
        if mask in given:
            inputs[mask] = given[mask][:, :stop]
        step = model(**inputs)
        cache = cache_of(step)
        if cache is None:
            raise ValueError("returns no cache")
        logits = step.logits
        if real is not None:
            logits = logits[real[:, start:stop]]
        actual.append(logits.reshape(-1, logits.shape[-1]))
    return [torch.cat(actual)]


def generated(model: Any, given: Mapping[str, Any], **more: Any) -> list[Tensor]:
    inputs = {name: value for name, value in given.items() if not name.startswith("decoder")}
    actual = model.generate(
        **inputs, max_new_tokens=STEPS, min_new_tokens=STEPS, do_sample=False, num_beams=1, output_logits=True,
        return_dict_in_generate=True, disable_compile=True, **more,
    )  # fmt: skip
    return [actual.sequences, torch.stack(actual.logits)]
