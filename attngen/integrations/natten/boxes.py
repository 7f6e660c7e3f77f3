"""Boxes of a grid of tokens: each holds 128 tokens, which are consecutive rows of a call.

A tile of queries then sees the tiles of keys whose boxes its windows touch. Tiles of rows of the grid would be as long
as a row along one axis, and touch many more.
"""

from __future__ import annotations

from itertools import product
from math import prod
from typing import NamedTuple

#: Tokens of a box: the rows of a tile of queries and of keys in most kernels, or a multiple of them.
BOX = 128
_POWERS = BOX.bit_length() - 1

#: Numbers of tokens, and so on, along the three axes of a grid.
Lengths = tuple[int, int, int]


class Axis(NamedTuple):
    """Neighbourhoods along one axis: its tokens, and the window, stride, dilation and direction of NATTEN."""

    tokens: int
    size: int
    step: int
    dilation: int
    causal: bool

    @property
    def leader(self) -> int:
        """Position, in a group of ``step`` queries, of the one whose window all of them see."""
        return self.step - 1 if self.causal else self.step // 2

    @property
    def before(self) -> int:
        """Keys of a window that come before its leader."""
        return self.size - 1 if self.causal else self.size // 2

    def first_key(self, query: int, tokens: int) -> int:
        """First key that a query sees, both counted among the ``tokens`` of one residue."""
        leader = min(query // self.step * self.step + self.leader, tokens - 1)
        return min(max(leader - self.before, 0), tokens - self.size)

    def end(self, query: int, tokens: int) -> int:
        """End of the keys that a query sees."""
        end = self.first_key(query, tokens) + self.size
        return min(end, query + 1) if self.causal else end

    def residues(self) -> list[tuple[int, int]]:
        """Numbers of tokens whose coordinates are equal modulo the dilation, and how many residues have so many."""
        shorter, longer = divmod(self.tokens, self.dilation)
        return [(shorter + 1, longer), (shorter, self.dilation - longer)] if longer else [(shorter, self.dilation)]

    def extent(self, q_length: int, k_length: int) -> int:
        """Places of a residue: its tokens, filled up to whole boxes of queries and of keys."""
        length = max(q_length, k_length)
        return -(-self.residues()[0][0] // length) * length

    def visits(self, q_length: int, k_length: int) -> tuple[int, int]:
        """Pairs of boxes along the axis of which some query sees some key, and of which all queries see all keys."""
        some = every = 0
        for tokens, residues in self.residues():
            for query in range(0, self.extent(q_length, k_length), q_length):
                last = query + q_length - 1
                low, high = self.first_key(query, tokens), self.end(last, tokens)
                some += residues * (-(-high // k_length) - low // k_length)
                low, high = self.first_key(last, tokens), self.end(query, tokens)
                every += residues * max(high // k_length - -(-low // k_length), 0)
        return some, every


#: Neighbourhoods along the three axes of a grid.
Axes = tuple[Axis, Axis, Axis]


class Boxes(NamedTuple):
    """Lengths of the boxes of queries and of keys along each axis, and the tiles of one head that they lead to."""

    q: Lengths
    k: Lengths
    visited: int
    full: int


#: Lengths of every box: powers of two, whose product is ``BOX``.
_SHAPES: list[Lengths] = [
    (1 << a, 1 << b, 1 << _POWERS - a - b) for a in range(_POWERS + 1) for b in range(_POWERS + 1 - a)
]


def chosen(axes: Axes) -> Boxes:
    """The boxes with the fewest visited tiles of 128 queries and 128 keys; of several, those with the most full tiles.

    Boxes of queries and of keys need not have one shape: where windows are long along two axes, queries that are near
    along one of them and keys that are near along the other one share more.
    """
    powers = [1 << power for power in range(_POWERS + 1)]
    visits = [{pair: axis.visits(*pair) for pair in product(powers, powers)} for axis in axes]
    choices = []
    for q, k in product(_SHAPES, _SHAPES):
        pairs = zip(q, k, strict=True)
        some, every = zip(*(along[pair] for along, pair in zip(visits, pairs, strict=True)), strict=True)
        choices.append(Boxes(q, k, prod(some), prod(every)))
    return min(choices, key=lambda each: (each.visited, -each.full, each.q != each.k))
