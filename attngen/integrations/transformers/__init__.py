"""``attn_implementation="attngen"`` for the models of Hugging Face's transformers.

Defined in ``attngen.integrations.transformers.implementation``.
"""

from attngen.integrations.transformers.implementation import (
    NAME,
    SPEC,
    Asked,
    asked,
    attention,
    register,
    use_pages,
)

__all__ = [
    "register",
    "use_pages",
    "attention",
    "Asked",
    "asked",
    "NAME",
    "SPEC",
]
