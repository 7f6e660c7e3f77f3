"""Drop-ins for what other libraries call: torch's scaled_dot_product_attention, flash-attn, Hugging Face transformers;
and the plugins of vLLM and SGLang.

``sdpa`` is a context manager; the others are modules, imported when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from attngen.errors import suggest

if TYPE_CHECKING:
    from attngen.integrations import (
        bert_padding,
        context_parallel,
        diffusers,
        engines,
        flash_attn,
        flash_attn_3,
        flash_attn_4,
        flash_mla,
        flex_attention,
        sageattention,
        sglang,
        torch_flash,
        transformers,
        vllm,
        vllm_flash_attn,
    )
    from attngen.integrations.routing import sdpa

__all__ = [
    "bert_padding",
    "context_parallel",
    "diffusers",
    "engines",
    "flash_attn",
    "flash_attn_3",
    "flash_attn_4",
    "flash_mla",
    "flex_attention",
    "sageattention",
    "sdpa",
    "sglang",
    "torch_flash",
    "transformers",
    "vllm",
    "vllm_flash_attn",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'attngen.integrations' has no attribute '{name}'{suggest(name, __all__)}")
    if name == "sdpa":
        value = import_module("attngen.integrations.routing").sdpa
    else:
        value = import_module(f"attngen.integrations.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
