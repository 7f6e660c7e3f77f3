"""Keys of one call, put together of a rank's own rows and of those that arrived, and the way back of their gradients.

Where a key is there twice, since two segments see it, its gradients are added up.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

#: Most runs that are copied one by one.
_MOST_RUNS = 24


class _Run(NamedTuple):
    """Rows that lie one after the other in both places."""

    to: int  # the first row of the keys
    start: int  # the first row among own or arrived rows
    count: int
    own: bool
    again: int  # how often these rows were among the keys before


class _Rows(NamedTuple):
    """The same by indices."""

    to: Tensor
    start: Tensor
    own: bool
    again: int


@dataclass(frozen=True, eq=False)
class Assembly:
    """Where each key comes from: ``source`` counts a rank's ``held`` own rows first, then ``received`` ones; −1 is a
    hole, which holds zeros."""

    source: np.ndarray
    held: int
    received: int
    _parts: list[_Run] | None = None
    _indices: dict[torch.device, list[_Rows]] = field(default_factory=dict)

    @classmethod
    def of(cls, positions: np.ndarray, places: np.ndarray, tile: int, held: int, received: int) -> Assembly:
        """The keys at some positions of the sequence; ``places`` are those of ``Transfer``."""
        start = places[positions // tile] if len(positions) else positions
        source = np.where(start < 0, -1, start + positions % tile)
        return cls(source, held, received, _runs(source, held))

    @property
    def rows(self) -> int:
        """How many keys there are."""
        return len(self.source)

    @cached_property
    def _has_holes(self) -> bool:
        return bool((self.source < 0).any())

    @cached_property
    def _covers(self) -> bool:
        """Whether every row that arrived is among the keys."""
        return len(np.unique(self.source[self.source >= self.held])) == self.received

    def keys(self, own: Tensor, arrived: Tensor) -> Tensor:
        """The keys, (batch, keys, width), of own and arrived rows, (rows, batch, width)."""
        shape = (own.shape[1], self.rows, own.shape[2])
        keys = own.new_zeros(shape) if self._has_holes else own.new_empty(shape)
        by_row = keys.transpose(0, 1)
        if self._parts is not None:
            for run in self._parts:
                rows = own if run.own else arrived
                by_row.narrow(0, run.to, run.count).copy_(rows.narrow(0, run.start, run.count))
        else:
            for part in self._on(own.device):
                by_row.index_copy_(0, part.to, (own if part.own else arrived).index_select(0, part.start))
        return keys

    def back(self, dk: Tensor, dv: Tensor, total: Tensor | None) -> Tensor:
        """Gradients of the arrived rows, (rows, batch, width), from those of the keys, (batch, keys, heads, head_dim).
        Those of own rows are added to ``total``."""
        shape = (self.received, dk.shape[0], sum(gradient.shape[2] * gradient.shape[3] for gradient in (dk, dv)))
        back = dk.new_empty(shape) if self._covers else dk.new_zeros(shape)
        at = 0
        for gradient in (dk, dv):
            rows = gradient.transpose(0, 1).flatten(2)  # (keys, batch, width)
            self._add(rows, back.narrow(2, at, rows.shape[2]),
                      None if total is None else total.narrow(2, at, rows.shape[2]))  # fmt: skip
            at += rows.shape[2]
        return back

    def _add(self, rows: Tensor, back: Tensor, total: Tensor | None) -> None:
        if self._parts is not None:
            for run in self._parts:
                gradients = rows.narrow(0, run.to, run.count)
                if not run.own:
                    place = back.narrow(0, run.start, run.count)
                    place.add_(gradients) if run.again else place.copy_(gradients)
                elif total is not None:
                    total.narrow(0, run.start, run.count).add_(gradients)
            return
        for part in self._on(rows.device):
            gradients = rows.index_select(0, part.to)
            if part.own:
                if total is not None:
                    total.index_add_(0, part.start, gradients.to(total.dtype))
            elif part.again:
                back.index_add_(0, part.start, gradients)
            else:
                back.index_copy_(0, part.start, gradients)

    def _on(self, device: torch.device) -> list[_Rows]:
        """Indices by where rows lie and how often they were there before: no row is twice in one of these."""
        if device not in self._indices:
            again = _times_before(self.source)
            parts = []
            for own in (True, False):
                here = (self.source >= 0) & ((self.source < self.held) == own)
                for times in range(int(again[here].max()) + 1 if here.any() else 0):
                    to = np.flatnonzero(here & (again == times))
                    start = self.source[to] - (0 if own else self.held)
                    parts.append(_Rows(torch.from_numpy(to).to(device), torch.from_numpy(start).to(device), own, times))
            self._indices[device] = parts
        return self._indices[device]


def _times_before(source: np.ndarray) -> np.ndarray:
    """How often each number was there before."""
    order = np.argsort(source, kind="stable")
    ordered = source[order]
    first = np.concatenate([[True], ordered[1:] != ordered[:-1]]) if len(ordered) else np.zeros(0, dtype=bool)
    start = np.maximum.accumulate(np.where(first, np.arange(len(ordered)), 0))
    times = np.empty(len(source), dtype=np.int64)
    times[order] = np.arange(len(ordered)) - start
    return times


def _runs(source: np.ndarray, held: int) -> list[_Run] | None:
    """Few runs that make up all, or None."""
    if not len(source):
        return []
    again = _times_before(source)
    ends = (np.diff(source) != 1) | (np.diff(again) != 0) | (source[1:] == held)
    ends |= (source[1:] < 0) != (source[:-1] < 0)
    ends &= ~((source[1:] < 0) & (source[:-1] < 0))
    starts = np.concatenate([[0], np.flatnonzero(ends) + 1])
    if len(starts) > _MOST_RUNS:
        return None
    counts = np.diff(np.concatenate([starts, [len(source)]]))
    return [
        _Run(int(to), int(source[to]) - (0 if source[to] < held else held), int(count), bool(source[to] < held),
             int(again[to]))
        for to, count in zip(starts, counts, strict=True)
        if source[to] >= 0
    ]  # fmt: skip
