"""Calls over sequences of any layout, as flash-attn takes them from version 3 on: batches, packed, partly used.

q, and k and v, each have a batch axis or are packed. A call that mixes them, or uses only the first queries of
sequences, becomes one of packed sequences, and its results go back to where the queries came from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attngen.dtypes import DESCALES
from attngen.errors import CallError
from attngen.integrations.flash_attn.arguments import SPEC, attend_wide
from attngen.integrations.flash_attn.cache import QUANTIZED
from attngen.integrations.flash_attn.used_queries import UsedQueries, checked
from attngen.integrations.shared.arguments import contiguous_rows, tensor
from attngen.integrations.shared.choice import Packing, VariantCandidate


@dataclass(frozen=True, slots=True)
class Sequences:
    """Places of sequences: offsets (b + 1,) int32 of packed ones, None for a batch axis; the used rows of each.

    A longest length that is None is that of all rows together, which costs empty work tiles.
    """

    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    max_seqlen_q: Any = None
    max_seqlen_k: Any = None
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None


class Packed:
    """A call in packed form, with the used queries of each sequence moved together."""

    def __init__(
        self, tensors: tuple[Tensor, Tensor, Tensor], packing: Packing, used: UsedQueries | None, dense: bool
    ) -> None:
        self.tensors, self.packing = tensors, packing
        self._used, self._dense = used, dense

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences) -> Packed | None:
        """Return the packed form of a call that needs one, or None for one whose tensors all have a batch axis."""
        cu_seqlens_q, cu_seqlens_k = sequences.cu_seqlens_q, sequences.cu_seqlens_k
        for name, given, starts in (("q", q, cu_seqlens_q), ("k", k, cu_seqlens_k), ("v", v, cu_seqlens_k)):
            rank = 4 if starts is None else 3
            if tensor(name, given).dim() != rank:
                axis = "without cu_seqlens" if starts is None else "with cu_seqlens"
                raise CallError(f"{name} must have {rank} dimensions {axis}, got shape {tuple(given.shape)}")
        if cu_seqlens_q is None and cu_seqlens_k is None and sequences.seqused_q is None:
            return None
        if cu_seqlens_q is None:
            starts_q, longest_q = _starts(q), q.shape[1]
        else:
            starts_q, longest_q = tensor("cu_seqlens_q", cu_seqlens_q), _number(sequences.max_seqlen_q, q)
        if cu_seqlens_k is None:
            starts_k, longest_k = _starts(k), k.shape[1]
        else:
            starts_k, longest_k = tensor("cu_seqlens_k", cu_seqlens_k), _number(sequences.max_seqlen_k, k)
        dense = cu_seqlens_q is None
        flat_q = q.flatten(0, 1) if dense else q
        flat_k, flat_v = (t.flatten(0, 1) if cu_seqlens_k is None else t for t in (k, v))
        used = None
        if sequences.seqused_q is not None:
            counts = checked(sequences.seqused_q, "seqused_q", starts_q)
            used = UsedQueries.of(starts_q, counts, flat_q.shape[0])
            starts_q, flat_q = used.starts, used.together(flat_q)
        return cls((flat_q, flat_k, flat_v), (starts_q, starts_k, longest_q, longest_k), used, dense)

    def rows(self, rows: Tensor) -> Tensor:
        """Return a tensor with the rows of q, in the packed form."""
        flat = rows.flatten(0, 1) if self._dense else rows
        return flat if self._used is None else self._used.together(flat)

    def lse_rows(self, lse: Tensor) -> Tensor:
        """Return a log-sum-exp (b, h, sq) or (h, total_q) in the packed form, (h, total_q)."""
        flat = lse.transpose(1, 2).flatten(0, 1) if self._dense else lse.transpose(0, 1)
        return (flat if self._used is None else self._used.together(flat)).transpose(0, 1)

    def back(self, rows: Tensor) -> Tensor:
        """Packed rows in their original places, 0 for queries that are not used."""
        return rows if self._used is None else self._used.apart(rows)

    def lse_back(self, lse: Tensor) -> Tensor:
        """A packed log-sum-exp (h, total_q) in its original place, −inf for queries that are not used."""
        if self._used is None:
            return lse
        moved = self._used.apart(lse.transpose(0, 1)).transpose(0, 1)
        return moved.masked_fill(~self._used.used, float("-inf"))


def attend_sequences(
    candidates: Sequence[VariantCandidate],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: Sequences,
    *,
    softmax_scale: float | None,
    deterministic: bool,
    return_lse: bool,
    descales: Sequence[Tensor | None] = (None, None, None),
) -> Any:
    """Attention by the first candidate that a kernel takes: out, or (out, lse) with ``return_lse``.

    lse is float32, (b, h, sq), or (h, total_q) of packed queries.
    """
    q, k, v = contiguous_rows(q=q, k=k, v=v)
    packed = Packed.of(q, k, v, sequences)
    options: dict[str, Any] = {
        "spec": SPEC, "softmax_scale": softmax_scale, "seqused_k": sequences.seqused_k,
        "deterministic": deterministic, "descales": _descales(q, descales),
    }  # fmt: skip
    if packed is None:
        return attend_wide(candidates, q, k, v, return_lse=return_lse, **options)
    out, lse = attend_wide(candidates, *packed.tensors, packing=packed.packing, return_lse=True, **options)
    out = packed.back(out)
    dense = sequences.cu_seqlens_q is None
    if dense:
        out = out.view(*q.shape[:2], *out.shape[1:])
    if not return_lse:
        return out
    lse = packed.lse_back(lse)
    if dense:
        lse = lse.view(lse.shape[0], *q.shape[:2]).transpose(0, 1).contiguous()
    return out, lse


def _descales(q: Tensor, given: Sequence[Tensor | None]) -> dict[str, Tensor]:
    """The scales of quantized tensors by their keywords: 1 where none is given, as there."""
    named = {name: scale for name, scale in zip(DESCALES, given, strict=True) if scale is not None}
    if q.dtype not in QUANTIZED:
        return named  # which the call refuses
    return {name: named.get(name, torch.ones((), dtype=torch.float32, device=q.device)) for name in DESCALES}


def _starts(dense: Tensor) -> Tensor:
    """Offsets of the sequences of a dense tensor once its first two axes are one: int32, (batch + 1,)."""
    batch, length = dense.shape[:2]
    return torch.arange(batch + 1, device=dense.device, dtype=torch.int32) * length


def _number(longest: Any, rows: Tensor) -> Any:
    """Longest length of packed ``rows`` as a number; reading it from a tensor waits for the GPU."""
    return rows.shape[0] if longest is None else int(longest) if isinstance(longest, Tensor) else longest
