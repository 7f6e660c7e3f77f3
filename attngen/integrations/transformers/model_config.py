"""Models of transformers by their configurations: read from a file, and made without weights."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from attngen.errors import CallError, SpecError, suggest
from attngen.runtime.arguments.checked import ATTENTION_DTYPES, TORCH_DTYPES

_CONFIG = "config.json"
#: The dtypes of kernels, as torch's.
MODEL_DTYPES = {name: TORCH_DTYPES[name] for name in ("bf16", "fp16", "fp32")}


def read_config(path: Path) -> Any:
    """Return the configuration of a file, or of the folder that holds it. Only the file is read.

    Raises SpecError for anything but a configuration, and for a model that transformers does not have.
    """
    import transformers
    from transformers import CONFIG_MAPPING

    file = path / _CONFIG if path.is_dir() else path
    try:
        content = json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise SpecError(f"--model {path}: {file} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise SpecError(f"--model {path}: {file} is not JSON: {error}") from None
    kind = content.get("model_type") if isinstance(content, dict) else None
    if not isinstance(kind, str):
        raise SpecError(f"--model {path}: {file} has no 'model_type', which every model's configuration has")
    known = f"transformers {transformers.__version__} does not know"
    if kind not in CONFIG_MAPPING:
        raise SpecError(f"{file}: model_type: {known} '{kind}'{suggest(kind, CONFIG_MAPPING.keys())}")
    named = content.get("architectures") or []
    for architecture in named if isinstance(named, list) else [named]:
        if _class_of(architecture) is None:
            raise SpecError(f"{file}: architectures: {known} '{architecture}', and code next to it is not run")
    try:
        with quiet():
            return CONFIG_MAPPING[kind].from_dict(content)
    except Exception as error:  # anything that a family's own checks raise
        raise SpecError(f"{file}: {CONFIG_MAPPING[kind].__name__} refuses it: {error}") from None


def dtype_of(config: Any) -> str | None:
    """Return the dtype that a configuration names, as kernels name it, or None. Raises SpecError for another one."""
    named = next((each for each in _with_text(config) if each is not None), None)
    if named is None:
        return None
    dtype = getattr(torch, named, named) if isinstance(named, str) else named
    if dtype not in MODEL_DTYPES.values():
        raise SpecError(f"dtype: found {named} in the configuration; allowed: {', '.join(MODEL_DTYPES)}, by --dtype")
    return ATTENTION_DTYPES[dtype]


def _with_text(config: Any) -> tuple[Any, Any]:
    return getattr(config, "dtype", None), getattr(config.get_text_config(), "dtype", None)


def _class_of(architecture: Any) -> Any:
    """Return transformers' class of a name, or None if there is none or it is not a model."""
    import transformers

    model_class = getattr(transformers, architecture, None) if isinstance(architecture, str) else None
    return (
        model_class if isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel) else None
    )


def made(config: Any, dtype: torch.dtype, implementation: str) -> Any:
    """Return the model of a configuration, on torch's ``meta`` device, or raise SpecError."""
    from transformers import MODEL_MAPPING, AutoModel

    named = (getattr(config, "architectures", None) or [None])[0]
    own = _class_of(named)
    if own is None and MODEL_MAPPING.get(type(config), None) is None:
        raise SpecError(f"--model: transformers has no model of a {type(config).__name__} alone")
    make = AutoModel.from_config if own is None else own._from_config
    try:
        with torch.device("meta"):
            model = make(config, attn_implementation=implementation, dtype=dtype)
    except KeyError as error:
        if error.args != (implementation,):
            raise SpecError(f"--model: the model cannot be made: {error!r}") from None
        raise SpecError(without_interface(own or MODEL_MAPPING[type(config)])) from None
    except Exception as error:  # anything that a family's own checks raise
        raise SpecError(f"--model: the model cannot be made: {sentence(error)}") from None
    if model._can_set_experts_implementation():
        model.set_experts_implementation("batched_mm")  # which does not read indices of experts from a tensor
    for module in model.modules():  # otherwise a layer drop may leave some out
        for owner in (module, getattr(module, "config", None)):
            for name in [name for name in getattr(owner, "__dict__", ()) if name.endswith("layerdrop")]:
                setattr(owner, name, 0.0)
    return model


def without_interface(model: Any) -> str:
    """Return the message about a model that does not call attngen."""
    name = model.__name__ if isinstance(model, type) else type(model).__name__
    return (
        f"--model: {name} computes its attention itself, and takes no attn_implementation from others; where it calls "
        "torch's scaled_dot_product_attention, attngen.integrations.sdpa() serves it, with specs/integrations/sdpa.yaml"
    )


def sentence(error: Exception) -> str:
    """Return the first line of what an exception says, and its kind, unless it is attngen's own."""
    lines = str(error).strip().splitlines()
    return (
        lines[0] if lines and isinstance(error, CallError) else f"{type(error).__name__}: {lines[0] if lines else ''}"
    )


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' remarks on a configuration, which do not belong in a report about kernels."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


@contextmanager
def offline() -> Iterator[None]:
    """Keep models from downloading a part of themselves."""
    with ExitStack() as stack:
        constants = sys.modules.get("huggingface_hub.constants")
        if constants is not None:
            stack.enter_context(mock.patch.object(constants, "HF_HUB_OFFLINE", True))
        yield
