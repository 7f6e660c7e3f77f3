"""Keys of one call, put together of a rank's own rows and of those that arrived, and the way back of their gradients.

Where a key is there twice, since two segments see it, its gradients are added up.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from torch import Tensor

from attngen.parallel.gathers import Gather


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
    def _put(self) -> Gather:
        """The keys, of own rows and arrived ones."""
        there = np.flatnonzero(self.source >= 0)
        return Gather(self.rows, there, self.source[there])

    @cached_property
    def _back(self) -> Gather:
        """The sums of gradients of arrived rows."""
        keys = np.flatnonzero(self.source >= self.held)
        return Gather(self.received, self.source[keys] - self.held, keys)

    @property
    def own(self) -> tuple[np.ndarray, np.ndarray]:
        """The own rows that are keys, and which keys these are."""
        keys = np.flatnonzero((self.source >= 0) & (self.source < self.held))
        return self.source[keys], keys

    def keys(self, k: Tensor, v: Tensor, arrived: Tensor) -> Tensor:
        """The keys, (batch, keys, width), K and V side by side, of own rows of k and v, (rows, batch, heads, head_dim),
        and of arrived rows, (rows, batch, width)."""
        widths = [x.shape[2] * x.shape[3] for x in (k, v)]
        keys = k.new_empty((k.shape[1], self.rows, sum(widths)))
        sides = zip((k, v), keys.transpose(0, 1).split(widths, dim=2), arrived.split(widths, dim=2), strict=True)
        for x, place, came in sides:
            self._put(place.unflatten(2, x.shape[2:]), x, came.unflatten(2, x.shape[2:]))
        return keys

    def back(self, dk: Tensor, dv: Tensor) -> Tensor:
        """Gradients of the arrived rows, (rows, batch, width), from those of keys, (batch, keys, heads, head_dim)."""
        widths = [x.shape[2] * x.shape[3] for x in (dk, dv)]
        back = dk.new_empty((self.received, dk.shape[0], sum(widths)))
        for gradient, place in zip((dk, dv), back.split(widths, dim=2), strict=True):
            self._back(place.unflatten(2, gradient.shape[2:]), gradient.transpose(0, 1))
        return back
