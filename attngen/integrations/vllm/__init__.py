"""See ``attngen.integrations.vllm.plugin``."""

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
