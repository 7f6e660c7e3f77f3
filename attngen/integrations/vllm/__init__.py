"""The plugin of vLLM: ``--attention-backend ATTNGEN``, and for models with latent attention ``ATTNGEN_MLA``, or
``ATTNGEN_MLA_SPARSE`` where an indexer selects keys.

Defined in ``attngen.integrations.vllm.plugin``.
"""

from attngen.integrations.vllm.plugin import (
    MLA_NAME,
    NAME,
    RELEASES,
    SPARSE_MLA_NAME,
    SPARSE_RELEASES,
    register,
)

__all__ = [
    "register",
    "RELEASES",
    "NAME",
    "MLA_NAME",
    "SPARSE_MLA_NAME",
    "SPARSE_RELEASES",
]
