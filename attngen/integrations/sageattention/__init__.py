"""SageAttention's functions on kernels of 8 bits: ``sageattn`` and ``sageattn_varlen``, argument for argument.

Defined in ``attngen.integrations.sageattention.functions``.
"""

from attngen.integrations.sageattention.functions import (
    sageattn,
    sageattn_varlen,
)

__all__ = [
    "sageattn",
    "sageattn_varlen",
]
