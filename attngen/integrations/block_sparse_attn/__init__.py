"""Block-Sparse-Attention's functions (``block_sparse_attn``), argument for argument, on attngen's kernels: replace one
import.

Defined in ``attngen.integrations.block_sparse_attn.functions``.
"""

from attngen.integrations.block_sparse_attn.functions import (
    block_sparse_attn_func,
    block_streaming_attn_func,
    token_streaming_attn_func,
)

__all__ = [
    "block_sparse_attn_func",
    "block_streaming_attn_func",
    "token_streaming_attn_func",
]
