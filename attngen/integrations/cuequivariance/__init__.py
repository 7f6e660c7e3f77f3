"""cuEquivariance's attention, argument for argument, on attngen's kernels: replace one import.

Defined in ``attngen.integrations.cuequivariance.triangle`` and ``attngen.integrations.cuequivariance.pair_bias``.
"""

from attngen.integrations.cuequivariance.pair_bias import (
    attention_pair_bias,
)
from attngen.integrations.cuequivariance.triangle import (
    triangle_attention,
)

__all__ = [
    "attention_pair_bias",
    "triangle_attention",
]
