"""attngen as an attention backend of diffusers: ``register()``, then ``set_attention_backend("attngen")``.

Defined in ``attngen.integrations.diffusers.backend``.
"""

from attngen.integrations.diffusers.backend import (
    NAME,
    RELEASES,
    attention,
    register,
    served,
)

__all__ = [
    "register",
    "attention",
    "RELEASES",
    "NAME",
    "served",
]
