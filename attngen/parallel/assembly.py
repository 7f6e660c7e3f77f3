"""Keys of one call, gathered from a rank's own rows and from received ones, and the way back of their gradients.

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
    def received_at(self) -> int | None:
        """Where the received rows begin among the keys, if they are one run in the order in which they arrive."""
        places = np.flatnonzero(self.source >= self.held)
        in_order = self.received > 0 and np.array_equal(self.source[places], np.arange(self.received) + self.held)
        return int(places[0]) if in_order and int(places[-1]) - int(places[0]) + 1 == len(places) else None

    @cached_property
    def _received(self) -> Gather:
        """The keys that are received rows."""
        places = np.flatnonzero(self.source >= self.held)
        return Gather(len(places), np.arange(len(places)), self.source[places] - self.held, places)

    @cached_property
    def _own(self) -> Gather:
        """The keys that are own rows or holes."""
        places = np.flatnonzero(self.source < self.held)
        there = np.flatnonzero(self.source[places] >= 0)
        return Gather(len(places), there, self.source[places][there], places)

    @cached_property
    def _back(self) -> Gather:
        """The sums of gradients of received rows."""
        keys = np.flatnonzero(self.source >= self.held)
        return Gather(self.received, self.source[keys] - self.held, keys)

    @property
    def own(self) -> tuple[np.ndarray, np.ndarray]:
        """The own rows that are keys, and which keys these are."""
        keys = np.flatnonzero((self.source >= 0) & (self.source < self.held))
        return self.source[keys], keys

    def room(self, k: Tensor, v: Tensor) -> Tensor:
        """Memory for the keys, (batch, keys, width), K and V side by side. k and v are own rows, (rows, batch, heads,
        head_dim)."""
        return k.new_empty((k.shape[1], self.rows, k.shape[2] * k.shape[3] + v.shape[2] * v.shape[3]))

    def place(self, keys: Tensor) -> Tensor | None:
        """The part of the keys that received rows are, (rows, batch, width), if rows that arrive can be written
        there."""
        if self.received_at is None or len(keys) != 1:
            return None
        return keys.narrow(1, self.received_at, self.received).transpose(0, 1)

    def put_own(self, keys: Tensor, k: Tensor, v: Tensor) -> None:
        """Put own rows, and zeros for holes, among the keys."""
        self._own(_sides(keys.transpose(0, 1), k, v), (k, v))

    def put_received(self, keys: Tensor, k: Tensor, v: Tensor, received: Tensor) -> None:
        """Put received rows, (rows, batch, width), among the keys."""
        self._received(_sides(keys.transpose(0, 1), k, v), _sides(received, k, v))

    def back(self, dk: Tensor, dv: Tensor) -> Tensor:
        """Gradients of the received rows, (rows, batch, width), from those of keys, (batch, keys, heads, head_dim)."""
        back = dk.new_empty((self.received, dk.shape[0], dk.shape[2] * dk.shape[3] + dv.shape[2] * dv.shape[3]))
        gradients = dk.transpose(0, 1), dv.transpose(0, 1)
        self._back(_sides(back, *gradients), gradients)
        return back


def _sides(rows: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """K and V, (rows, batch, heads, head_dim) with the heads of ``k`` and ``v``, that lie side by side."""
    left, right = rows.split([x.shape[2] * x.shape[3] for x in (k, v)], dim=2)
    return left.unflatten(2, k.shape[2:]), right.unflatten(2, v.shape[2:])
