"""Statistics of tiles: what becomes one, what they decide, and that no tile is called empty or full wrongly."""

from __future__ import annotations

import random

import numpy as np
import pytest

from attngen.errors import SpecError
from attngen.lang.bands import classify
from attngen.lang.check import compile_variant
from attngen.lang.facts import KV_START, Q_START, Facts
from attngen.lang.ir import spelled
from attngen.lang.printing import canonical
from attngen.lang.simplify import TRUE
from attngen.lang.statistics import separated
from attngen.lang.variant import Scalar, Tensor
from tests.lang import bruteforce
from tests.lang.bruteforce import Masks, UnguardedError, World, check_statistics, evaluate, known_of
from tests.sampling import few

TENSORS = (
    Tensor("id", "int32", ("b", "seqlen_k")), Tensor("long", "int64", ("seqlen_k",)),
    Tensor("width", "int32", ("seqlen_q",)), Tensor("start", "int32", ("n",)), Tensor("image", "bool", ("seqlen_k",)),
    Tensor("time", "fp32", ("seqlen_k",)),
    Tensor("allowed", "bool", ("seqlen_q", "seqlen_k")), Tensor("used", "int32", ("b",)),
)  # fmt: skip
SCALARS = (Scalar("nx", "int32", min=1),)


@pytest.mark.parametrize(
    ("mask", "rest", "values"),
    [
        ("q_pos >= kv", "q_pos >= kv", []),
        ("kv < used[b] and q_pos - kv < 9", None, []),
        ("allowed[q, kv]", "allowed[q, kv]", []),
        ("id[b, q_pos] == id[b, kv]", "Q0 == K0", ["id[b, q_pos]", "id[b, kv]"]),
        ("long[q] == long[kv]", "Q0 == K0", ["long[q]", "long[kv]"]),
        ("q_pos >= kv and q_pos - kv < width[q]", "q_pos >= kv and Q0 < kv", ["q_pos - width[q]"]),
        ("start[id[b, kv + 1]] <= q_pos", "K0 <= q_pos", ["start[id[b, kv + 1]]"]),
        ("image[q] and image[kv] or q == kv", "Q0 and K0 or q == kv", ["image[q]", "image[kv]"]),
        ("q // nx == kv // nx", "q // nx == kv // nx", []),
        ("abs(id[b, q] // nx - kv // nx) < 3", "abs(Q0 - kv // nx) < 3", ["id[b, q] // nx"]),
        ("time[q] > time[kv]", "Q0 > K0 if Q0.numbers and K0.numbers else ?", ["time[q]", "time[kv]"]),
        ("time[q] * 2 > time[kv]", None, ["time[q]", "time[kv]"]),
    ],
)  # fmt: skip
def test_an_expression_of_one_side_is_one_statistic(mask: str, rest: str | None, values: list[str]) -> None:
    variant = compile_variant("test", mask, None, SCALARS, TENSORS)
    parts = separated(variant.mask, Facts.of(variant))
    assert [canonical(each.value) for each in parts.statistics] == values
    text = spelled(canonical(parts.mask)).replace(".of_queries_", "Q").replace("of_queries_", "Q")
    text = text.replace(".of_keys_", "K").replace("of_keys_", "K").replace("?nan0", "?")
    if rest is not None:
        assert text == rest


@pytest.mark.parametrize(
    ("mask", "values"),
    [
        ("q >= kv or image[q] and id[b, q] == id[b, kv]", ["image[q]", "id[b, q] where image[q]", "id[b, kv]"]),
        ("id[b, q] == id[b, kv] and id[b, kv] > 0", ["id[b, kv] > 0", "id[b, q]", "id[b, kv] where id[b, kv] > 0"]),
        (
            "image[q] and not (id[b, q] > 0 and id[b, q] == id[b, kv])",
            ["image[q]", "id[b, q] > 0 where image[q]", "id[b, q] where image[q] and id[b, q] > 0", "id[b, kv]"],
        ),
        ("image[q] or id[b, q] == id[b, kv]", ["image[q]", "id[b, q]", "id[b, kv]"]),
        ("q > 3 and id[b, q] == id[b, kv]", ["id[b, q]", "id[b, kv]"]),  # decided in closed form
    ],
)
def test_conditions_of_one_side_guard_the_statistics_beside_them(mask: str, values: list[str]) -> None:
    variant = compile_variant("test", mask, None, SCALARS, TENSORS)
    actual = [
        canonical(each.value) + (f" where {canonical(each.guard)}" if each.guard != TRUE else "")
        for each in separated(variant.mask, Facts.of(variant)).statistics
    ]
    assert sorted(actual) == sorted(values)


@pytest.mark.parametrize(
    ("queries", "keys", "may"),
    [([0, 3], [0, 4], False), ([0, 3], [0, 3], True), ([0, 0], [0, 4], False), ([2, 9], [5, 9], True)],
)
def test_a_value_that_no_pair_may_share_hides_a_tile(queries: list[int], keys: list[int], may: bool) -> None:
    variant = compile_variant("test", "id[b, q] > 0 and id[b, q] == id[b, kv]", None, SCALARS, TENSORS)
    facts = Facts.of(variant)
    parts = separated(variant.mask, facts)
    count = len(queries)
    world = World({"b": 0, "seqlen_q": 4, "seqlen_k": 4}, {"id": np.array([[*queries, *keys]])})
    env = dict(world.env)
    for each in parts.statistics:
        own = range(count) if each.axis == "q" else range(count, count + len(keys))
        env |= known_of(each, {**env, Q_START.name: 0, KV_START.name: 0}, world, own)
    conditions = classify(parts.mask, facts, statistics=parts.statistics)
    assert [bool(evaluate(each, env, {})) for each in conditions] == [may, False]


@few("seed", range(1000), always=(*range(24), 54), often=range(0, 1000, 10))
def test_no_wrong_empty_and_no_wrong_full(seed: int) -> None:
    source = random.Random(seed)
    mask = Masks(source).mask(seed % 4)
    for _ in range(2):
        try:
            check_statistics(mask, World.random(source), source)
        except UnguardedError:
            continue


def test_a_mask_that_could_leave_int64_is_drawn_again() -> None:
    """Of this one a tile was wrongly full: its numbers wrapped around, and specs refuse it."""
    seed = 1334
    drawn = Masks(random.Random(seed)).boolean(seed % 4)
    with pytest.raises(SpecError, match="beyond int64"):
        compile_variant("drawn", canonical(drawn), None, bruteforce.DECLARED_SCALARS, bruteforce.TENSORS)
    assert Masks(random.Random(seed)).mask(seed % 4) != drawn


@pytest.mark.parametrize(
    ("mask", "queries", "keys"),
    [
        ("id[b, q_pos] == id[b, kv]", [3, 3, 9], [5]),
        ("id[b, q_pos] != id[b, kv]", [3, 9], [5, 7]),
        ("id[b, q_pos] & id[b, kv] != 0", [6], [9]),
        ("id[b, q_pos] & id[b, kv] != 0", [6, 6], [-2]),
        ("(id[b, q_pos] | id[b, kv]) == -1", [6, 6], [-7]),
        ("(id[b, q_pos] ^ id[b, kv]) > 3", [5], [6, 6]),
    ],
)
def test_what_values_of_tiles_decide_whose_ranges_overlap(mask: str, queries: list[int], keys: list[int]) -> None:
    variant = compile_variant("test", mask, None, SCALARS, TENSORS)
    parts = separated(variant.mask, Facts.of(variant))
    may, must = classify(parts.mask, Facts.of(variant), statistics=parts.statistics)
    env: dict[str, float] = {}
    for each in parts.statistics:
        values = queries if each.axis == "q" else keys
        env |= dict(zip((end.name for end in each.ends), (min(values), max(values)), strict=True))
        env[each.residues.name] = sum({1 << value % 32 for value in values})
    seen = {bool(eval(_of_numbers(mask), {"q": q, "kv": kv})) for q in queries for kv in keys}
    assert (evaluate(may, env, {}), evaluate(must, env, {})) == (any(seen), all(seen))


def _of_numbers(mask: str) -> str:
    """The mask in Python, over a query's and a key's id."""
    return mask.replace("id[b, q_pos]", "q").replace("id[b, kv]", "kv").replace("q & kv != 0", "(q & kv) != 0")
