"""Packed sequences of which only the first queries are used: they are moved together for a call, and back after it.

Only the GPU knows how many are used, so all shapes stay those of the whole, and nothing waits for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attngen.errors import CallError
from attngen.runtime.arguments.torch_state import is_traced


@dataclass(frozen=True)
class UsedQueries:
    """Places of the used rows of packed sequences: apart, as they came, and together.

    ``starts`` (batch + 1,) int32 is where each sequence starts once rows are together. ``source`` (total,) is the old
    row of each row together, and ``place`` (total,) the new row of each row apart; ``taken`` and ``used`` (total,) bool
    say whether there is one.
    """

    starts: Tensor
    source: Tensor
    taken: Tensor
    place: Tensor
    used: Tensor

    @classmethod
    def of(cls, cu_seqlens_q: Tensor, seqused_q: Tensor, total: int) -> UsedQueries:
        """Return the rows that ``seqused_q`` (batch,) int32 counts of the sequences that ``cu_seqlens_q`` bounds."""
        lengths = cu_seqlens_q.diff()
        counts = torch.minimum(seqused_q.clamp(min=0), lengths)
        starts = torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
        rows = torch.arange(total, device=cu_seqlens_q.device, dtype=torch.int32)
        source, taken = _moved(rows, starts, cu_seqlens_q, counts)
        place, used = _moved(rows, cu_seqlens_q, starts, counts)
        return cls(starts, source, taken, place, used)

    def together(self, rows: Tensor) -> Tensor:
        """Return rows (total, …) with the used ones first, sequence after sequence, and 0 after them."""
        if rows.element_size() == 1:  # torch moves bytes, but not numbers of 8 bits
            return self._together(rows.view(torch.uint8)).view(rows.dtype)
        return self._together(rows)

    def _together(self, rows: Tensor) -> Tensor:
        moved: Tensor = _Rows.apply(rows, self.source, self.taken, self.place, self.used)
        return moved

    def apart(self, rows: Tensor) -> Tensor:
        """Rows (total, …) in their original places, and 0 for those that are not used."""
        moved: Tensor = _Rows.apply(rows, self.place, self.used, self.source, self.taken)
        return moved


def _moved(rows: Tensor, starts: Tensor, others: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return, for each row of sequences at ``starts``, its row if they start at ``others``, and whether it counts."""
    batch = counts.shape[0]
    if not batch:
        return torch.zeros_like(rows), torch.zeros_like(rows, dtype=torch.bool)
    sequence = torch.searchsorted(starts[1:], rows, right=True, out_int32=True).clamp(max=batch - 1)
    offset = rows - starts[sequence]
    counted = (offset >= 0) & (offset < counts[sequence])
    return torch.where(counted, others[sequence] + offset, 0), counted


class _Rows(torch.autograd.Function):
    """Rows by their indices, 0 where there is none. No row is taken twice, so the gradient just moves them back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, there: Tensor, back: Tensor, was_there: Tensor) -> Tensor:
        ctx.save_for_backward(index, there, back, was_there)
        shape = (-1,) + (1,) * (rows.dim() - 1)
        return torch.where(there.view(shape), rows.index_select(0, index), 0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        index, there, back, was_there = ctx.saved_tensors
        return _Rows.apply(gradient, back, was_there, index, there), None, None, None, None


def checked(seqused: Tensor, name: str, cu_seqlens: Tensor) -> Tensor:
    """Return used lengths, int32 (batch,), or raise CallError. The values of a tensor on a GPU are not read."""
    batch = cu_seqlens.shape[0] - 1
    if not isinstance(seqused, Tensor) or seqused.dtype != torch.int32 or tuple(seqused.shape) != (batch,):
        got = f"{seqused.dtype} of shape {tuple(seqused.shape)}" if isinstance(seqused, Tensor) else repr(seqused)
        raise CallError(f"{name} must be int32 of shape ({batch},), got {got}")
    if seqused.device != cu_seqlens.device:
        raise CallError(f"{name} is on {seqused.device}, but the sequences are on {cu_seqlens.device}")
    if seqused.is_cpu and not is_traced(seqused):
        for place, (used, length) in enumerate(zip(seqused.tolist(), cu_seqlens.diff().tolist(), strict=True)):
            if not 0 <= used <= length:
                raise CallError(f"{name}[{place}] is {used}; the sequence has {length} queries")
    return seqused
