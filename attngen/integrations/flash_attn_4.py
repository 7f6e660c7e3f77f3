"""flash-attn 4's functions, argument for argument, on attngen's kernels: replace one import.

Defined in ``attngen.integrations.flash_attn.v4``, and in ``blocks`` beside it.
"""

from attngen.integrations.flash_attn.blocks import BlockSparseTensorsTorch
from attngen.integrations.flash_attn.v4 import (
    flash_attn_func,
    flash_attn_varlen_func,
)

__all__ = [
    "BlockSparseTensorsTorch",
    "flash_attn_func",
    "flash_attn_varlen_func",
]
