"""Keys of one call, put together of a rank's own rows and of those that arrived, and the way back of their gradients.

Where a key is there twice, since two segments see it, its gradients are added up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from torch import Tensor

from attngen.parallel.rows import Rows


class _Part(NamedTuple):
    """Own rows, or received ones, among the keys, each once; each was there ``again`` times before."""

    rows: Rows
    own: bool
    again: int


@dataclass(frozen=True, eq=False)
class Assembly:
    """Where each key comes from: ``source`` counts a rank's ``held`` own rows first, then ``received`` ones; −1 is a
    hole, which holds zeros."""

    source: np.ndarray
    held: int
    received: int

    @classmethod
    def of(cls, positions: np.ndarray, places: np.ndarray, tile: int, held: int, received: int) -> Assembly:
        """The keys at some positions of the sequence; ``places`` are those of ``Transfer``."""
        start = places[positions // tile] if len(positions) else positions
        return cls(np.where(start < 0, -1, start + positions % tile), held, received)

    @property
    def rows(self) -> int:
        """How many keys there are."""
        return len(self.source)

    @cached_property
    def _parts(self) -> list[_Part]:
        again = _times_before(self.source)
        parts = []
        for own in (True, False):
            here = (self.source >= 0) & ((self.source < self.held) == own)
            for times in range(int(again[here].max()) + 1 if here.any() else 0):
                to = np.flatnonzero(here & (again == times))
                parts.append(_Part(Rows(self.source[to] - (0 if own else self.held), to), own, times))
        return parts

    @cached_property
    def _has_holes(self) -> bool:
        return bool((self.source < 0).any())

    @cached_property
    def _covers(self) -> bool:
        """Whether every row that arrived is among the keys."""
        return len(np.unique(self.source[self.source >= self.held])) == self.received

    def keys(self, k: Tensor, v: Tensor, arrived: Tensor) -> Tensor:
        """The keys, (batch, keys, width), K and V side by side, of own rows of k and v, (rows, batch, heads, head_dim),
        and of arrived rows, (rows, batch, width)."""
        widths = [x.shape[2] * x.shape[3] for x in (k, v)]
        shape = (k.shape[1], self.rows, sum(widths))
        keys = k.new_zeros(shape) if self._has_holes else k.new_empty(shape)
        by_row = keys.transpose(0, 1)
        for part in self._parts:
            if not part.own:
                part.rows.copy(by_row, arrived)
                continue
            for x, place in zip((k, v), by_row.split(widths, dim=2), strict=True):
                part.rows.copy(place.unflatten(2, x.shape[2:]), x)
        return keys

    def back(self, dk: Tensor, dv: Tensor) -> Tensor:
        """Gradients of the arrived rows, (rows, batch, width), from those of keys, (batch, keys, heads, head_dim)."""
        widths = [x.shape[2] * x.shape[3] for x in (dk, dv)]
        shape = (self.received, dk.shape[0], sum(widths))
        back = dk.new_empty(shape) if self._covers else dk.new_zeros(shape)
        for gradient, place in zip((dk, dv), back.split(widths, dim=2), strict=True):
            place, rows = place.unflatten(2, gradient.shape[2:]), gradient.transpose(0, 1)
            for part in self._parts:
                if not part.own:
                    (part.rows.add_back if part.again else part.rows.copy_back)(place, rows)
        return back

    @property
    def own_rows(self) -> np.ndarray:
        """The own rows that are keys, ascending."""
        return np.unique(self.source[(self.source >= 0) & (self.source < self.held)])

    def among(self, rows: np.ndarray) -> Assembly:
        """The same keys, if only these own ``rows`` (ascending, all that are keys among them) were numbered."""
        own = (self.source >= 0) & (self.source < self.held)
        moved = np.where(self.source < 0, -1, self.source - self.held + len(rows))
        moved[own] = np.searchsorted(rows, self.source[own])
        return Assembly(moved, len(rows), self.received)

    def add_own(self, totals: Sequence[Tensor], dk: Tensor, dv: Tensor, *, first: bool) -> None:
        """Add the gradients of keys that are own rows to ``totals``, (rows, batch, heads, head_dim), which have no
        values yet if ``first``."""
        own = [part for part in self._parts if part.own]
        covers = first and bool(own) and own[0].rows.count == self.held
        for total, gradient in zip(totals, (dk, dv), strict=True):
            if first and not covers:
                total.zero_()
            for number, part in enumerate(own):
                put = part.rows.copy_back if covers and not number else part.rows.add_back
                put(total, gradient.transpose(0, 1))


def _times_before(source: np.ndarray) -> np.ndarray:
    """How often each number was there before."""
    order = np.argsort(source, kind="stable")
    ordered = source[order]
    first = np.concatenate([[True], ordered[1:] != ordered[:-1]]) if len(ordered) else np.zeros(0, dtype=bool)
    start = np.maximum.accumulate(np.where(first, np.arange(len(ordered)), 0))
    times: np.ndarray = np.empty(len(source), dtype=np.int64)
    times[order] = np.arange(len(ordered)) - start
    return times
