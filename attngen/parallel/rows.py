"""Copies of rows between tensors, by slices where they lie in few runs, and 16 bytes at a time where possible."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

#: Runs are copied by a slice each, else all rows by index: up to 12 runs of 4,096 rows or more in the mean, or up to 4
#: of any length. To enqueue a copy takes the host as long as a GPU takes to copy some thousand rows.
_MOST_LONG, _LONG, _MOST_SHORT = 12, 4096, 4

_WIDE = torch.complex128


class Run(NamedTuple):
    """Rows that lie one after the other: the first, how many, and where the first goes."""

    start: int
    rows: int
    to: int


def runs_of(rows: np.ndarray, to: np.ndarray | None = None) -> list[Run]:
    """The runs of some rows, which go to the places ``to``, by default one after the other."""
    if not len(rows):
        return []
    ends = np.diff(rows) != 1
    if to is not None:
        ends |= np.diff(to) != 1
    starts = np.concatenate([[0], np.flatnonzero(ends) + 1])
    counts = np.diff(np.concatenate([starts, [len(rows)]]))
    places = starts if to is None else to[starts]
    return [Run(int(a), int(b), int(c)) for a, b, c in zip(rows[starts], counts, places, strict=True)]


class Rows:
    """Some rows of a tensor and where they go in another: copies, and sums the other way."""

    def __init__(self, rows: np.ndarray, to: np.ndarray | None = None) -> None:
        self.count = len(rows)
        self._rows, self._to = rows, to
        runs = runs_of(rows, to)
        few = len(runs) <= (_MOST_LONG if len(rows) >= _LONG * len(runs) else _MOST_SHORT)
        self.runs = runs if few else None
        self._indices: dict[torch.device, tuple[Tensor, Tensor | None]] = {}

    def copy(self, to: Tensor, source: Tensor, dim: int = 0) -> None:
        """Copy the rows of ``source`` to their places."""
        to, source = self._wide(dim, to, source)
        if self.runs is not None:
            for run in self.runs:
                to.narrow(dim, run.to, run.rows).copy_(source.narrow(dim, run.start, run.rows))
            return
        rows, places = self._on(source.device)
        if places is not None:
            to.index_copy_(dim, places, source.index_select(dim, rows).to(to.dtype))
        elif to.is_contiguous() and to.dtype == source.dtype:
            torch.index_select(source, dim, rows, out=to)
        else:
            to.copy_(source.index_select(dim, rows))

    def copy_back(self, source: Tensor, to: Tensor, dim: int = 0) -> None:
        """Copy rows from their places back to where they were: the inverse of ``copy``."""
        source, to = self._wide(dim, source, to)
        if self.runs is not None:
            for run in self.runs:
                source.narrow(dim, run.start, run.rows).copy_(to.narrow(dim, run.to, run.rows))
            return
        rows, places = self._on(source.device)
        source.index_copy_(dim, rows, (to if places is None else to.index_select(dim, places)).to(source.dtype))

    @staticmethod
    def _wide(dim: int, *tensors: Tensor) -> Sequence[Tensor]:
        """The tensors with elements of 16 bytes, unless rows lie along the last axis, where an element is a row."""
        return wide(*tensors) if dim < tensors[0].dim() - 1 else tensors

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor | None]:
        if device not in self._indices:
            places = None if self._to is None else torch.from_numpy(self._to).to(device)
            self._indices[device] = torch.from_numpy(self._rows).to(device), places
        return self._indices[device]


def copy(to: Tensor, source: Tensor) -> None:
    """Copy a tensor of the same shape."""
    to, source = wide(to, source)
    to.copy_(source)


def wide(*tensors: Tensor) -> Sequence[Tensor]:
    """Views of tensors with elements of 16 bytes, which a GPU copies faster; the tensors if one has no such view."""
    each = 16 // tensors[0].element_size()
    if not all(tensor.dtype == tensors[0].dtype and _aligned(tensor, each) for tensor in tensors):
        return tensors
    return [tensor.view(_WIDE) for tensor in tensors]


def _aligned(tensor: Tensor, each: int) -> bool:
    strides = tensor.stride()
    return (
        strides[-1] == 1
        and tensor.shape[-1] % each == 0
        and tensor.storage_offset() % each == 0
        and tensor.data_ptr() % 16 == 0
        and all(stride % each == 0 for stride in strides[:-1])
    )
