"""Drop-ins for what other libraries call: torch's scaled_dot_product_attention, flash-attn, Hugging Face transformers;
and the plugins of vLLM and SGLang.

``sdpa`` is a context manager; the others are modules, imported when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from attngen.errors import suggest

if TYPE_CHECKING:
    from attngen.integrations.diffusers import backend as diffusers
    from attngen.integrations.engines import layers as engines
    from attngen.integrations.flash_attn import bert_padding
    from attngen.integrations.flash_attn import v2 as flash_attn
    from attngen.integrations.flash_attn import v3 as flash_attn_3
    from attngen.integrations.flash_attn import v4 as flash_attn_4
    from attngen.integrations.flash_mla import functions as flash_mla
    from attngen.integrations.flex import attention as flex_attention
    from attngen.integrations.sageattention import functions as sageattention
    from attngen.integrations.sglang import plugin as sglang
    from attngen.integrations.torch_sdpa import context_parallel
    from attngen.integrations.torch_sdpa import flash as torch_flash
    from attngen.integrations.torch_sdpa.routing import sdpa
    from attngen.integrations.transformers import implementation as transformers
    from attngen.integrations.vllm import flash_attn as vllm_flash_attn
    from attngen.integrations.vllm import plugin as vllm

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
        value = import_module("attngen.integrations.torch_sdpa.routing").sdpa
    else:
        value = import_module(f"attngen.integrations.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
