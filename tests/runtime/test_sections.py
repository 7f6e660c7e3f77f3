"""How many heads run side by side in a forward: as L2 holds, and no last section of a few."""

from __future__ import annotations

import heapq

import pytest

from attngen.runtime.geometry import balanced


@pytest.mark.parametrize(
    ("most", "every", "size"),
    [
        (3, 10, 2),  # not 3, 3, 3 and 1
        (5, 16, 4),
        (6, 21, 6),  # 6, 6, 6 and 3
        (4, 16, 4),
        (8, 3, 3),
        (1, 7, 1),
        (0, 7, 1),
        (65536, 40, 40),
    ],
)
def test_the_last_section_is_not_a_small_one(most: int, every: int, size: int) -> None:
    assert balanced(most, every) == size


def test_sections_stay_within_half_of_what_l2_holds() -> None:
    for most in range(1, 40):
        for every in range(1, 90):
            size = balanced(most, every)
            assert min(most, every) <= 2 * size <= 2 * min(most, every)


def ends(heads: int, size: int, q_tiles: int = 128, blocks: int = 132) -> float:
    """Return when the last block of a causal call is done, in units of a perfect division."""
    order = [q_tiles - i // min(size, heads - at) for at in range(0, heads, size)
             for i in range(q_tiles * min(size, heads - at))]  # fmt: skip
    free = [0.0] * blocks
    for steps in order:
        heapq.heapreplace(free, free[0] + steps)
    return max(free) * blocks / sum(order)


def test_a_last_section_of_one_head_leaves_blocks_idle() -> None:
    assert ends(10, 3) > 1.05
    assert ends(10, balanced(3, 10)) < 1.01
