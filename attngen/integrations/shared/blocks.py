"""Block-sparse calls of drop-ins: block masks out of lists or bools, and the variants that read them.

Blocks of drop-ins may be larger than those of the kernels, which have 64 or 128 queries and as many keys: a block mask
is then repeated, and sizes are divided among the blocks that one becomes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attngen.errors import CallError
from attngen.integrations.shared.arguments import tensor
from attngen.integrations.shared.choice import VariantCandidate
from attngen.lang.blocks import BLOCK_MASK, BLOCKS
from attngen.runtime.operations.block_mask.call import block_mask

SPEC = "block_sparse"


class Pairs(NamedTuple):
    """Sequences, heads, queries and keys of a call, and the queries and keys of one of its blocks."""

    batch: int
    heads: int
    queries: int
    keys: int
    rows: int
    columns: int

    @property
    def blocks(self) -> tuple[int, int, int, int]:
        """The shape of a block mask."""
        return self.batch, self.heads, -(-self.queries // self.rows), -(-self.keys // self.columns)

    def check(self, name: str) -> None:
        """Raise CallError, which names an argument, unless kernels' blocks make up these."""
        if self.rows < 1 or self.columns < 1 or self.rows % BLOCKS[0] or self.columns % BLOCKS[0]:
            nearest = tuple(max(BLOCKS[0], -(-side // BLOCKS[0]) * BLOCKS[0]) for side in (self.rows, self.columns))
            raise CallError(
                f"{name} gives blocks of {self.rows} queries and {self.columns} keys; kernels have blocks of 64 and of "
                f"128, so that both must be multiples of 64: the next are {nearest[0]} and {nearest[1]}"
            )


def of_lists(names: tuple[str, str], indices: Tensor, counts: Tensor | None, pairs: Pairs) -> Tensor:
    """Block mask (b, h, query blocks, key blocks) of lists (b or 1, h or 1, query blocks, capacity) int32, of which the
    first ``counts`` (b or 1, h or 1, query blocks) entries count. ``names`` are those of the two in errors."""
    rows = pairs.blocks[:3]
    _check_lists(names[0], indices, rows, "the lists of each query block")
    if counts is not None:
        _check_lists(names[1], counts[..., None] if isinstance(counts, Tensor) else counts, rows, "their lengths")
    return block_mask(indices, counts, key_blocks=pairs.blocks[3]).expand(pairs.blocks)


def of_bools(name: str, mask: Tensor, pairs: Pairs) -> Tensor:
    """Block mask from (b or 1, h or 1, query blocks, key blocks), where anything but 0 shows a block."""
    shape = tuple(tensor(name, mask).shape)
    if (
        len(shape) != 4
        or any(one not in (1, all_) for one, all_ in zip(shape[:2], pairs.blocks[:2], strict=True))
        or (shape[2:] != pairs.blocks[2:])
    ):
        raise CallError(f"{name} must have shape {pairs.blocks}, a block of queries a row, got {shape}")
    return mask.to(torch.bool).expand(pairs.blocks)


def candidate(shown: Tensor, pairs: Pairs, *, causal: bool = False, sizes: Tensor | None = None) -> VariantCandidate:
    """The variant that shows the blocks of a block mask, without keys behind the query if ``causal``; of block i only
    the first ``sizes`` (b, h, key blocks) int32 keys, which are views where all heads have the same."""
    size = BLOCKS[1] if pairs.rows % BLOCKS[1] == 0 and pairs.columns % BLOCKS[1] == 0 else BLOCKS[0]
    rows, columns = pairs.rows // size, pairs.columns // size
    _, _, query_blocks, key_blocks = pairs._replace(rows=size, columns=size).blocks
    if rows > 1:
        shown = shown.repeat_interleave(rows, dim=2)[:, :, :query_blocks]
    if columns > 1:
        shown = shown.repeat_interleave(columns, dim=3)[..., :key_blocks]
    given = {BLOCK_MASK.name: shown}
    if sizes is None:
        return VariantCandidate(f"blocks_{size}{'_causal' if causal else ''}", given)
    if columns > 1:
        first = torch.arange(0, pairs.columns, size, device=sizes.device, dtype=torch.int32)
        sizes = (sizes[..., None] - first).flatten(-2)[..., :key_blocks]  # beyond a block's end they say nothing
    return VariantCandidate(f"blocks_{size}_sized", {**given, "block_sizes": sizes})


def sizes_of(name: str, sizes: Tensor, pairs: Pairs) -> Tensor:
    """Valid keys of each block, int32 (key blocks,), (b, key blocks) or (b, h, key blocks), as (b, h, key blocks)."""
    batch, heads, _, blocks = pairs.blocks
    shapes = {1: (blocks,), 2: (batch, blocks), 3: (batch, heads, blocks)}
    if tuple(tensor(name, sizes).shape) != shapes.get(sizes.dim()) or sizes.dtype != torch.int32:
        allowed = ", ".join(str(shape) for shape in shapes.values())
        raise CallError(
            f"{name} must be int32 of one of the shapes {allowed}, got {sizes.dtype} of {tuple(sizes.shape)}"
        )
    return (sizes[:, None] if sizes.dim() == 2 else sizes).expand(batch, heads, blocks)


def _check_lists(name: str, given: Tensor, rows: tuple[int, int, int], what: str) -> None:
    """Raise CallError unless a tensor (…, entries) of int32 has these rows; batch and heads may be 1."""
    shape = tuple(tensor(name, given).shape)[:-1]
    batch, heads, query_blocks = rows
    fits = len(shape) == 3 and shape[0] in (1, batch) and shape[1] in (1, heads) and shape[2] == query_blocks
    if not fits or given.dtype != torch.int32:
        convert = f"; pass {name}.int()" if fits and given.dtype == torch.int64 else ""
        raise CallError(
            f"{name} must be int32, {what}: batch, heads and query blocks are {rows}, got {given.dtype} of "
            f"{shape}{convert}"
        )
