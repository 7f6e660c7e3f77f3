"""Keys of one call, gathered from a rank's own rows and from received ones, and the way back of their gradients.

Where a key is there twice, since two segments see it, its gradients are added up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
from torch import Tensor

from attngen.parallel.gathers import Gather, Rows, of_each, side_by_side, widths_of
from attngen.parallel.sharding import Sharding


@dataclass(frozen=True, eq=False)
class Assembly:
    """Source of each key: ``source`` counts a rank's ``held`` own rows first, then ``received`` ones; −1 is a hole,
    which holds zeros."""

    source: np.ndarray
    held: int
    received: int

    @classmethod
    def of(cls, positions: np.ndarray, places: np.ndarray, sharding: Sharding, held: int, received: int) -> Assembly:
        """The keys at some positions of the sequence; ``places`` are those of ``Transfer``."""
        tiles = sharding.tiles_of(positions)
        start = places[tiles] if len(positions) else positions
        return cls(np.where(start < 0, -1, start + positions - sharding.bounds[tiles]), held, received)

    @property
    def rows(self) -> int:
        """Number of keys."""
        return len(self.source)

    @cached_property
    def received_at(self) -> int | None:
        """First received row among the keys, if all of them are one run in the order in which they arrive."""
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
        """Memory for the keys, (batch, keys, width), K and V side by side. k and v are own rows, (batch, rows, heads,
        head_dim)."""
        return k.new_empty((k.shape[0], self.rows, sum(widths_of(k, v))))

    def place(self, keys: Tensor) -> Tensor | None:
        """The part of the keys that received rows are, (rows, batch, width), if rows that arrive can be written
        there."""
        batch, _, width = keys.shape
        if self.received_at is None or batch != 1:
            return None
        return keys.as_strided((self.received, 1, width), (width, width, 1), self.received_at * width)

    def own_rows(self, keys: Tensor, k: Tensor, v: Tensor) -> Callable[[], None]:
        """Copy of own rows, and of zeros for holes, to their places among the keys; runs when called."""
        return partial(self._own, side_by_side(keys, widths_of(k, v), batch_first=True), of_each(k, v))

    def put_received(self, keys: Tensor, columns: Sequence[int], widths: Sequence[int], received: Tensor) -> None:
        """Put received rows, (rows, batch, width), among the keys, K and V in the rows' ``columns``."""
        batch, rows, width = keys.shape
        sides = [Rows(keys, column, (rows, batch, each), (width, rows * width))
                 for column, each in zip(columns, widths, strict=True)]  # fmt: skip
        self._received(sides, side_by_side(received, widths))

    def back(self, dk: Tensor, dv: Tensor) -> Tensor:
        """Gradients of the received rows, (rows, batch, width), from those of keys, (batch, keys, heads, head_dim)."""
        widths = widths_of(dk, dv)
        back = dk.new_empty((self.received, dk.shape[0], sum(widths)))
        self._back(side_by_side(back, widths), of_each(dk, dv))
        return back
