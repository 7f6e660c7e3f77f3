"""Drop-ins for what other libraries call: torch's scaled_dot_product_attention, flash-attn, Hugging Face transformers;
and the plugins of vLLM and SGLang.

``sdpa`` is a context manager; the others are the modules beside this file, imported when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from attngen.errors import needs_torch, suggest

if TYPE_CHECKING:
    from attngen.integrations.torch_sdpa.routing import sdpa as sdpa

#: Folders that other modules are the doors of.
_NO_DOORS = ("flex", "shared", "torch_sdpa")

__all__ = sorted({"sdpa", *(module.name for module in iter_modules(__path__))}.difference(_NO_DOORS))


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'attngen.integrations' has no attribute '{name}'{suggest(name, __all__)}")
    try:
        if name == "sdpa":
            value = import_module("attngen.integrations.torch_sdpa.routing").sdpa
        else:
            value = import_module(f"attngen.integrations.{name}")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(needs_torch(f"attngen.integrations.{name}", error), name=error.name) from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
