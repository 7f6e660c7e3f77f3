"""cuDNN frontend's block-sparse attention, argument for argument, on attngen's kernels: replace one import.

Defined in ``attngen.integrations.cudnn.block_sparse``.
"""

from attngen.integrations.cudnn.block_sparse import (
    BSA,
    block_sparse_attention_backward,
    block_sparse_attention_forward,
)

__all__ = [
    "BSA",
    "block_sparse_attention_backward",
    "block_sparse_attention_forward",
]
