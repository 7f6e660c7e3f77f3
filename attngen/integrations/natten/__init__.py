"""NATTEN's functions on kernels of attngen: ``na1d``, ``na2d`` and ``na3d``, argument for argument.

Defined in ``attngen.integrations.natten.functions``.
"""

from attngen.integrations.natten.functions import (
    na1d,
    na2d,
    na3d,
)

__all__ = [
    "na1d",
    "na2d",
    "na3d",
]
