"""FastVideo's video sparse attention, argument for argument, on attngen's kernels: replace one import.

Defined in ``attngen.integrations.fastvideo.functions``.
"""

from attngen.integrations.fastvideo.functions import (
    block_sparse_attn,
    block_sparse_attn_from_indices,
    video_sparse_attn,
    video_sparse_attn_bshd,
)

__all__ = [
    "block_sparse_attn",
    "block_sparse_attn_from_indices",
    "video_sparse_attn",
    "video_sparse_attn_bshd",
]
