"""Number of heads side by side: as many as L2 holds, and no last group of a few."""

from __future__ import annotations

import heapq
from types import SimpleNamespace
from typing import Any

import pytest

from attngen.runtime.geometry import heads_in_l2 as heads_of
from attngen.runtime.geometry.heads_in_l2 import balanced


@pytest.mark.parametrize(
    ("wanted", "every", "most", "size"),
    [
        (3, 10, 3, 2),  # not 3, 3, 3 and 1
        (5, 16, 5, 4),
        (6, 21, 6, 6),  # 6, 6, 6 and 3
        (4, 16, 4, 4),
        (8, 3, 8, 3),
        (1, 7, 1, 1),
        (0, 7, 0, 1),
        (65536, 40, 65536, 40),
        (6, 64, 9, 8),  # with room for half as many more
        (3, 32, 4, 4),
        (2, 16, 3, 2),
        (1, 8, 1, 1),
        (5, 7, 7, 7),
    ],
)
def test_the_last_group_is_not_a_small_one(wanted: int, every: int, most: int, size: int) -> None:
    assert balanced(wanted, every, most) == size


def test_groups_stay_near_what_is_wanted() -> None:
    for wanted in range(1, 30):
        for every in range(1, 70):
            for most in (wanted, 3 * wanted // 2):
                assert 5 * min(wanted, every) <= 8 * balanced(wanted, every, most) <= 8 * min(most, every)


def test_the_last_group_is_as_full_as_it_can_be() -> None:
    for wanted in range(1, 40):
        for every in range(1, 90):
            for most in (min(wanted, every), min(3 * wanted // 2, every)):
                sizes = range(-(-5 * min(wanted, every) // 8), most + 1)
                best = max(sizes, key=lambda size: (((every - 1) % size + 1) / size, size))
                assert balanced(wanted, every, max(most, 1)) == (most if every % most == 0 else best)


def test_powers_of_two_keep_theirs() -> None:
    for wanted in (1, 2, 4, 8, 16, 64):
        for every in (1, 2, 8, 16, 32, 128):
            assert balanced(wanted, every, wanted) == balanced(wanted, every, 3 * wanted // 2) == min(wanted, every)


def ends(heads: int, size: int, q_tiles: int = 128, blocks: int = 132) -> float:
    """Time at which the last block of a causal call is done, in units of a perfect division."""
    order = [q_tiles - i // min(size, heads - at) for at in range(0, heads, size)
             for i in range(q_tiles * min(size, heads - at))]  # fmt: skip
    free = [0.0] * blocks
    for steps in order:
        heapq.heapreplace(free, free[0] + steps)
    return max(free) * blocks / sum(order)


def test_a_last_group_of_one_head_leaves_blocks_idle() -> None:
    assert ends(10, 3) > 1.05
    assert ends(10, balanced(3, 10, 3)) < 1.01


@pytest.mark.parametrize(
    ("seqlen", "steps", "size"),
    [
        (8192, [9] * 56 + list(range(8, 0, -1)), 2),  # a window of 1,024
        (8192, list(range(64, 0, -1)), 8),  # causal
        (8192, [64] * 64, 8),  # no mask
        (8192, list(range(16, 0, -1)) * 4, 8),  # chunks
        (32768, [9] * 256, 2),
        (2048, [3] * 14 + [2, 1], 8),  # a window of 256: 16 tiles of keys fill no GPU in twos
    ],
)
def test_tiles_of_equal_and_few_steps_take_as_many_heads_as_blocks_need(
    seqlen: int, steps: list[int], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heads_of, "steps_of", lambda launch, call: tuple(steps))
    monkeypatch.setattr(heads_of, "sequences_at_work", lambda call: call.batch)
    launch: Any = SimpleNamespace(
        l2_keys=6 * seqlen, least_heads_in_l2=1, tile_m=128, tile_n=128, tile_map=None, visible=[None]
    )
    call: Any = SimpleNamespace(batch=1, heads=8, kv_heads=8, seqlen_q=seqlen, seqlen_k=seqlen, ragged=False)
    assert heads_of.heads_in_l2(launch, call, 8, by_keys=True) == size
