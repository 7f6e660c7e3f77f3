"""Drop-ins for what other libraries call: torch's scaled_dot_product_attention, flash-attn, Hugging Face transformers.

``sdpa`` is a context manager; ``flash_attn`` and ``transformers`` are modules, imported when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attngen.integrations import flash_attn, transformers
    from attngen.integrations.routing import sdpa

__all__ = ["flash_attn", "sdpa", "transformers"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'attngen.integrations' has no attribute '{name}'")
    if name == "sdpa":
        value = import_module("attngen.integrations.routing").sdpa
    else:
        value = import_module(f"attngen.integrations.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
