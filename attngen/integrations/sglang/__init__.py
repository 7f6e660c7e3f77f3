"""The plugin of SGLang: ``--attention-backend attngen``.

Defined in ``attngen.integrations.sglang.plugin``.
"""

from attngen.integrations.sglang.plugin import (
    NAME,
    RELEASES,
    register,
)

__all__ = [
    "register",
    "RELEASES",
    "NAME",
]
