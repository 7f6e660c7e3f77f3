"""See ``attngen.integrations.sageattention.functions``."""

from attngen.integrations.sageattention.functions import (
    sageattn,
    sageattn_varlen,
)

__all__ = [
    "sageattn",
    "sageattn_varlen",
]
