"""Boxes of tokens: the tiles that they lead to, counted by brute force over the mask of the variant."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from attngen.inspect.seen import seen
from attngen.integrations.natten.boxes import BOX, Axis, chosen
from attngen.integrations.natten.functions import orders_of
from attngen.integrations.shared.catalogue import variant
from tests.integrations.natten.neighbourhoods import Neighbourhood
from tests.sampling import few

AXES = [
    [(6, 3, 1, 1, False), (16, 5, 1, 1, False), (20, 9, 1, 1, False)],
    [(1, 1, 1, 1, False), (30, 16, 8, 1, False), (32, 16, 8, 1, False)],
    [(4, 2, 1, 2, False), (13, 4, 3, 1, True), (22, 5, 1, 2, False)],
    [(1, 1, 1, 1, False), (1, 1, 1, 1, False), (700, 40, 3, 2, True)],
    [(1, 1, 1, 1, False), (13, 5, 1, 1, False), (64, 50, 1, 1, False)],  # rows of the grid
    [(1, 1, 1, 1, False), (13, 5, 1, 1, False), (64, 25, 1, 2, False)],
    [(7, 3, 1, 1, False), (4, 3, 1, 1, False), (32, 20, 1, 1, True)],
]


def of_grid(rows: Tensor) -> Tensor:
    """Rows of queries and keys without those that hold no token: those that see nothing, or are not seen."""
    return rows[:, rows.any(0)]


@few("axes", AXES, ids=lambda axes: "x".join(str(axis[0]) for axis in axes), always=range(0, 999, 2))
def test_counts_are_those_of_the_mask(axes: list[tuple[int, int, int, int, bool]]) -> None:
    first, second, third = (Axis(*axis) for axis in axes)
    queries, keys, scalars, boxes = orders_of((first, second, third))
    mask = seen(variant("natten"), (queries.rows, keys.rows), None, scalars)[0, 0]
    padded = torch.zeros(-(-queries.rows // BOX) * BOX, -(-keys.rows // BOX) * BOX, dtype=torch.bool)
    padded[: queries.rows, : keys.rows] = mask
    tiles = padded.unflatten(0, (-1, BOX)).unflatten(2, (-1, BOX))
    assert boxes.visited == int(tiles.any(3).any(1).sum())
    assert boxes.full >= int(tiles.all(3).all(1).sum())
    # in the order of the grid it is the mask of NATTEN
    wanted = Neighbourhood(*zip(*axes, strict=True)).mask()
    tokens = torch.arange(1, len(wanted) + 1).view(1, *(axis[0] for axis in axes), 1)
    q, k = (order.to_rows(tokens).flatten() for order in (queries, keys))
    assert torch.equal(mask[q.argsort()[-len(wanted) :]][:, k.argsort()[-len(wanted) :]], wanted)
    assert not mask[:, k == 0].any()


@few(
    ("grid", "size", "stride", "most"),
    [
        ((30, 48, 80), (18, 24, 24), (1, 1, 1), 1.78),
        ((30, 48, 80), (18, 24, 24), (16, 8, 8), 1),
        ((1, 256, 256), (1, 80, 80), (1, 1, 1), 1.3),
        ((1, 256, 256), (1, 80, 80), (1, 16, 16), 1),
        ((1, 1, 4096), (1, 1, 512), (1, 1, 1), 1.3),
    ],
    ids=str,
    always=range(0, 999, 2),
)
def test_visited_tiles_over_visible_pairs(
    grid: tuple[int, ...], size: tuple[int, ...], stride: tuple[int, ...], most: float
) -> None:
    """No tile has a hidden pair where strides are whole boxes."""
    first, second, third = (Axis(n, k, s, 1, causal=False) for n, k, s in zip(grid, size, stride, strict=True))
    boxes = chosen((first, second, third))
    assert boxes.visited <= most * prod(grid) * prod(size) / BOX**2
    assert boxes.full == boxes.visited or most > 1
