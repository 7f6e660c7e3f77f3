"""Lengths of packed sequences that the host knows beside their offsets, as plans over ranks do.

Offsets lie on the GPU, where the host does not read them. Who made them may note the lengths, so that a backward pass
knows which of its tiles come last.
"""

from __future__ import annotations

from torch import Tensor

#: Rows and keys of each sequence.
Lengths = tuple[tuple[int, int], ...]

_NAME = "_attngen_lengths"


def note_lengths(cu_seqlens_k: Tensor, lengths: Lengths) -> None:
    """Note the lengths of the sequences between these offsets of keys, which nobody changes from now on."""
    setattr(cu_seqlens_k, _NAME, lengths)


def lengths_of(cu_seqlens_k: Tensor) -> Lengths:
    """The lengths that were noted for these offsets; none if there are none."""
    known: Lengths = getattr(cu_seqlens_k, _NAME, ())
    return known
