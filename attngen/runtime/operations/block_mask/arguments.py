"""Arguments of a call that makes a block mask, and their checks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from attngen.errors import CallError
from attngen.runtime.arguments.checked import refuse_unreadable
from attngen.runtime.arguments.shapes import check_rank, length_of
from attngen.runtime.operations.shared.records import Fields, OptionalTensor, Size, TensorArgument


class BlockLists(NamedTuple):
    """A call as its caller made it: see ``block_mask``."""

    indices: TensorArgument
    counts: OptionalTensor
    key_blocks: Size


FIELDS = Fields(BlockLists)


class MaskSizes(NamedTuple):
    """Rows of a mask (batch, heads, query blocks), entries of each list, and blocks of keys."""

    rows: tuple[int, int, int]
    capacity: int
    key_blocks: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape of the mask."""
        return (*self.rows, self.key_blocks)


def check(call: BlockLists) -> MaskSizes:
    """Check shapes, dtypes and devices. Raises CallError."""
    indices, counts, key_blocks = call
    refuse_unreadable({"indices": indices, "counts": counts})
    _check_integers("indices", indices, 4, "batch x heads x query blocks x capacity")
    if (type(key_blocks) is not int and not isinstance(key_blocks, torch.SymInt)) or key_blocks < 0:
        key_blocks = length_of("key_blocks", key_blocks)
    batch, heads, query_blocks, capacity = indices.shape
    if counts is not None:
        _check_integers("counts", counts, 3, "batch x heads x query blocks")
        if counts.device != indices.device:
            raise CallError(f"counts is on {counts.device}, but indices is on {indices.device}")
        batch, heads = (_shared(one, other) for one, other in zip((batch, heads), counts.shape[:2], strict=True))
        if -1 in (batch, heads) or counts.shape[2] != query_blocks:
            raise CallError(
                f"indices has rows {tuple(indices.shape[:3])}, but counts has shape {tuple(counts.shape)}; batch and "
                "heads must be alike, or 1 in one of the two, and query blocks alike"
            )
    return MaskSizes((batch, heads, query_blocks), capacity, key_blocks)


def _check_integers(name: str, tensor: Any, rank: int, form: str) -> None:
    """Raise CallError unless something is a tensor of int32 with as many axes; ``form`` names these."""
    check_rank(name, tensor, rank, form)
    if tensor.dtype != torch.int32:
        convert = f"; pass {name}.int()" if tensor.dtype in (torch.int64, torch.int16, torch.int8) else ""
        raise CallError(f"{name} must be int32, got {tensor.dtype}{convert}")


def _shared(one: int, other: int) -> int:
    """The extent of an axis that two tensors share, of which one may have 1; -1 if they do not fit."""
    if one == other or other == 1:
        return one
    return other if one == 1 else -1


def check_contents(call: BlockLists, sizes: MaskSizes) -> None:
    """Raise CallError for a count that is no number of entries, or an entry that is no block of keys. Waits for the
    GPU."""
    indices, counts, _ = call
    capacity, key_blocks = sizes.capacity, sizes.key_blocks
    listed = torch.ones((), dtype=torch.bool, device=indices.device)
    if counts is not None:
        wrong = ((counts < 0) | (counts > capacity)).nonzero()
        if wrong.numel():
            place = wrong[0].tolist()
            raise CallError(
                f"counts{place} is {int(counts[tuple(place)])}; allowed: 0 to {capacity}, the entries of a row"
            )
        listed = torch.arange(capacity, device=indices.device) < counts[..., None]
    wrong = (((indices < 0) | (indices >= key_blocks)) & listed).nonzero()
    if wrong.numel():
        place = wrong[0].tolist()
        own = [i if extent > 1 else 0 for i, extent in zip(place, indices.shape, strict=True)]
        known = f"0 to {key_blocks - 1}" if key_blocks else "none"
        raise CallError(
            f"indices{own} is {int(indices[tuple(own)])}, but key_blocks is {key_blocks}; allowed: {known}; counts "
            "leaves out the last entries of a row"
        )
