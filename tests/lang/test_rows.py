"""The intervals of single rows: exactly the mask, together with what they leave over."""

from __future__ import annotations

import random

import numpy as np
import pytest

from attngen.lang.facts import KV_START, Q_START, Facts
from attngen.lang.ir import Expr, Search, walk
from attngen.lang.overflow import widen
from attngen.lang.printing import canonical
from attngen.lang.rows import own_intervals
from tests.lang.bruteforce import FACTS, Masks, UnguardedError, World, evaluate, mask_of, positions
from tests.lang.test_bands import variant
from tests.sampling import seeds

WINDOW = "q_pos - min(window, 1073741823) + 1"


@pytest.mark.parametrize(
    ("mask", "intervals", "rest"),
    [
        (True, [".."], "True"),
        ("q_pos >= kv", [".. q_pos + 1"], "True"),
        ("0 <= q_pos - kv and q_pos - kv < window", [f"{WINDOW} .. q_pos + 1"], "True"),
        ("kv < size[b] or q_pos >= kv", [".. max(size[b], q_pos + 1)"], "True"),
        ("q_pos >= kv and (kv < sinks or q_pos - kv < window)",
         [".. min(q_pos + 1, sinks)", f"{WINDOW} .. q_pos + 1"], "True"),
        ("q_pos >= kv and q_pos // chunk == kv // chunk", ["q_pos // chunk * chunk .. q_pos + 1"], "True"),
        ("q_pos >= kv and (q_pos - kv) % dilation == 0", [".. q_pos + 1"], "(q_pos - kv) % dilation == 0"),
        ("q_pos >= kv and doc[b, q_pos] == doc[b, kv]", [".. q_pos + 1"], "doc[b, q_pos] == doc[b, kv]"),
        ("allowed[q, kv]", [".."], "allowed[q, kv]"),
    ],
)  # fmt: skip
def test_usual_masks(mask: str | bool, intervals: list[str], rest: str) -> None:
    chosen = variant(mask)
    own, left = own_intervals(chosen.mask, Facts.of(chosen))
    ends = [[None if end is None else canonical(end) for end in (i.lo, i.hi)] for i in own]
    assert [f"{lo or ''} .. {hi or ''}".strip() for lo, hi in ends] == intervals
    assert canonical(left) == rest


def check_rows(mask: Expr, world: World) -> None:
    """Check every row."""
    truth = mask_of(mask, world.env, world.arrays, world.heads)
    own, rest = own_intervals(mask, FACTS)
    rest = widen(rest, FACTS)
    if rest is None:  # int64 may wrap around: a spec with such a mask is refused
        return
    ends = [end for interval in own for end in (interval.lo, interval.hi) if end is not None]
    assert not any(isinstance(node, Search) for end in ends for node in walk(end))
    keys = int(world.env["seqlen_k"])
    for h, q in np.ndindex(*truth.shape[:2]):
        env = {**world.env, "h": h, "q": q, "q_pos": q + keys - world.env["seqlen_q"]}
        env |= {"q_global": q + world.env[Q_START.name]}
        seen = positions(own, env, world.arrays, keys)
        for kv in range(keys):
            at = env | {"kv": kv, "kv_global": kv + world.env[KV_START.name]}
            assert truth[h, q, kv] == (seen[kv] and bool(evaluate(rest, at, world.arrays))), (h, q, kv)


@seeds(150, always=6)
def test_intervals_and_rest_are_the_mask(seed: int) -> None:
    source = random.Random(seed)
    mask, world = Masks(source).mask(seed % 4), World.random(source)
    try:
        check_rows(mask, world)
    except UnguardedError:
        return


@pytest.mark.exhaustive
def test_random_masks_have_intervals() -> None:
    """The test above says something only if it meets some."""
    results = [own_intervals(Masks(random.Random(seed)).mask(seed % 4), FACTS) for seed in range(150)]
    assert sum(any(i.lo is not None or i.hi is not None for i in intervals) for intervals, _ in results) > 30
