"""FlexAttention's functions on attngen's kernels: replace one import.

Defined in ``attngen.integrations.flex.attention``.
"""

from attngen.integrations.flex.attention import (
    AuxOutput,
    AuxRequest,
    BlockMask,
    FlexKernelOptions,
    and_masks,
    create_block_mask,
    create_mask,
    create_nested_block_mask,
    flex_attention,
    meaning,
    noop_mask,
    or_masks,
)

__all__ = [
    "BlockMask",
    "flex_attention",
    "AuxOutput",
    "AuxRequest",
    "FlexKernelOptions",
    "create_block_mask",
    "create_mask",
    "create_nested_block_mask",
    "or_masks",
    "and_masks",
    "noop_mask",
    "meaning",
]
