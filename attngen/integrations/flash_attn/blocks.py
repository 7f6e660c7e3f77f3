"""Block-sparse calls of flash-attn 4: lists of key blocks in place of a mask."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from attngen.errors import CallError
from attngen.integrations.shared.arguments import refused, tensor
from attngen.integrations.shared.blocks import Pairs, candidate, of_lists
from attngen.integrations.shared.choice import VariantCandidate


class BlockSparseTensorsTorch(NamedTuple):
    """The blocks of keys that each block of queries sees: ``flash_attn.cute.block_sparsity`` has the same.

    Lists (b or 1, h or 1, query blocks, capacity) int32 and how many of their entries count, (b or 1, h or 1, query
    blocks) int32. ``block_size`` is (queries, keys). The other fields are for packed sequences and for the order of
    sums.
    """

    mask_block_cnt: Tensor
    mask_block_idx: Tensor
    full_block_cnt: Tensor | None = None
    full_block_idx: Tensor | None = None
    cu_total_m_blocks: Tensor | None = None
    cu_block_idx_offsets: Tensor | None = None
    block_size: tuple[int, int] | None = None
    dq_write_order: Tensor | None = None
    dq_write_order_full: Tensor | None = None
    spt: bool | None = None


def candidate_of(given: Any, q: Tensor, k: Tensor, *, causal: bool) -> VariantCandidate:
    """The variant of a call of q and k (b, s, h, d) with these lists. Raises CallError, and NoKernelError."""
    name = "block_sparse_tensors"
    missing = [field for field in BlockSparseTensorsTorch._fields[:2] if getattr(given, field, None) is None]
    if missing:
        raise CallError(f"{name} must be a BlockSparseTensorsTorch with {missing[0]}, got {type(given).__name__}")
    for field in ("cu_total_m_blocks", "cu_block_idx_offsets"):
        if getattr(given, field, None) is not None:
            raise refused(f"{name}.{field}", "lists are of sequences with a batch axis")
    for which, shape in (("q", q), ("k", k)):
        if tensor(which, shape).dim() != 4:
            raise CallError(f"{which} must have 4 dimensions, got shape {tuple(shape.shape)}")
    size = getattr(given, "block_size", None)
    if not (isinstance(size, (tuple, list)) and len(size) == 2 and all(isinstance(n, int) for n in size)):
        raise CallError(
            f"{name}.block_size must be (queries, keys) of a block, such as (128, 128), got {size!r}; without it, "
            "flash-attn 4 takes the tile of its kernel"
        )
    pairs = Pairs(q.shape[0], q.shape[2], q.shape[1], k.shape[1], *size)
    pairs.check(f"{name}.block_size")
    shown = None
    for kind in ("mask", "full"):
        counts, indices = f"{kind}_block_cnt", f"{kind}_block_idx"
        if (getattr(given, counts, None) is None) != (getattr(given, indices, None) is None):
            raise CallError(f"{name} has one of {counts} and {indices}; pass both, or neither")
        if getattr(given, indices, None) is None:
            continue
        names = (f"{name}.{indices}", f"{name}.{counts}")
        blocks = of_lists(names, getattr(given, indices), getattr(given, counts), pairs)
        shown = blocks if shown is None else shown | blocks
    assert shown is not None
    return candidate(shown, pairs, causal=causal)
