"""The plugin of vLLM: ``--attention-backend ATTNGEN``, and ``ATTNGEN_MLA`` for models with latent attention.

Defined in ``attngen.integrations.vllm.plugin``.
"""

from attngen.integrations.vllm.plugin import (
    MLA_NAME,
    NAME,
    RELEASES,
    register,
)

__all__ = [
    "register",
    "RELEASES",
    "NAME",
    "MLA_NAME",
]
