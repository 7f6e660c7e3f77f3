"""cuEquivariance's ``triangle_attention``, argument for argument, on attngen's kernels: replace one import.

Defined in ``attngen.integrations.cuequivariance.functions``.
"""

from attngen.integrations.cuequivariance.functions import (
    triangle_attention,
)

__all__ = [
    "triangle_attention",
]
