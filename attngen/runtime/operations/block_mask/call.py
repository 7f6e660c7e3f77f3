"""Block masks out of lists: the key blocks that each block of queries sees."""

from __future__ import annotations

from torch import Tensor

from attngen.runtime.operations.block_mask.arguments import BlockLists, check
from attngen.runtime.operations.block_mask.kernel import BLOCK_MASKS


def block_mask(indices: Tensor, counts: Tensor | None = None, *, key_blocks: int) -> Tensor:
    """Make a block mask out of lists of the key blocks that each block of queries sees.

    For block-sparse attention whose lists change at every call: a variant reads the mask as a tensor of bools. Order
    and duplicates do not matter, and a row may be empty. Kernels of a variant with ``blocks`` bring the one that makes
    masks: one launch, which allocates the result alone; without it, and for strides of 2^31 elements and more, torch
    makes the mask. It may be captured in a graph. There is no derivative.

    On the CPU, and under ``attngen.debug()``, wrong counts and entries are refused. Elsewhere it does not wait for the
    GPU: counts are clamped, and entries that are no block of keys are left out.

    Args:
        indices: (batch, heads, query_blocks, capacity) int32, with any strides: key blocks from 0 to key_blocks - 1.
            batch and heads are 1 for lists that all sequences or all heads share.
        counts: (batch, heads, query_blocks) int32: how many entries of each row count, from its first on; the others
            have no meaning. All of them by default. batch and heads are those of ``indices``, or 1 in one of the two.
        key_blocks: Number of blocks of keys, at least 0.

    Returns:
        (batch, heads, query_blocks, key_blocks) bool, contiguous, in memory of its own.

    Raises:
        CallError: Arguments are wrong or do not fit each other.
    """
    return BLOCK_MASKS.serve(BlockLists(indices, counts, key_blocks), _traced)


def _traced(call: BlockLists) -> Tensor:
    """Call the operator; what is traced is this function and nothing below it."""
    from attngen.runtime.operations.block_mask import operator as block_mask_operator

    return block_mask_operator.call(call._replace(key_blocks=check(call).key_blocks))
