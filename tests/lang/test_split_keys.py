"""A key as the first one of a lane plus a constant: the same values, and one product with the constant."""

from __future__ import annotations

import itertools

import pytest

from attngen.lang.check import compile_variant
from attngen.lang.facts import index
from attngen.lang.folding import KV_FIRST, LOG2E, PRODUCT, fold_logit, split_keys, split_slope
from attngen.lang.ir import names, walk
from attngen.lang.variant import Scalar
from tests.lang.bruteforce import evaluate

FIRST, KEY = KV_FIRST, index("key")


@pytest.mark.parametrize(
    "score",
    [
        "s + slope * (kv - q_pos)",
        "s + slope * (q_pos - kv)",
        "s - kv * slope",
        "s * slope + 2.0 * kv",
        "abs(kv * slope - 3.0) + s",
        "s - slope * abs(q_pos - kv)",
        "s - slope * abs(kv - (q_pos + 2))",
    ],
)
def test_the_values_stay(score: str) -> None:
    variant = compile_variant("test", True, score, [Scalar("slope", "fp32")], [])
    before = fold_logit(variant.score, variant.ranges, fast_math=True).value
    after = split_keys(before, FIRST, KEY)
    assert "kv" not in names(after)
    for first, key, q_pos in itertools.product((0, 128, 4096), (0, 1, 57), (3, 5000)):
        env = {"kv": first + key, KV_FIRST.name: first, "key": key, "q_pos": q_pos, PRODUCT.name: 1.75, "slope": 0.125}
        env |= {"softmax_scale": 0.25, LOG2E.name: 1.4426950408889634}
        assert evaluate(after, env, {}) == pytest.approx(evaluate(before, env, {}), rel=1e-5, abs=1e-5)


@pytest.mark.parametrize(
    ("score", "splits"),
    [
        ("s + slope * (kv - q_pos)", True),
        ("s + slope * (kv - q_pos) - 0.5", True),
        ("s - kv * slope", False),
        ("s + abs(kv * slope)", False),
        ("s", False),
    ],
)
def test_the_factor_of_the_key_stands_apart(score: str, splits: bool) -> None:
    variant = compile_variant("test", True, score, [Scalar("slope", "fp32")], [])
    value = split_keys(fold_logit(variant.score, variant.ranges, fast_math=True).value, FIRST, KEY)
    parts = split_slope(value, KEY)
    assert (parts is not None) == splits
    if parts is None:
        return
    rest, slope = parts
    assert "key" not in names(rest) | names(slope)
    env = {KV_FIRST.name: 128, "key": 57, "q_pos": 500, PRODUCT.name: 1.75, "slope": 0.125}
    env |= {"softmax_scale": 0.25, LOG2E.name: 1.4426950408889634}
    assert evaluate(rest, env, {}) + 57 * evaluate(slope, env, {}) == pytest.approx(evaluate(value, env, {}), rel=1e-5)


def test_an_element_multiplies_its_constant_once() -> None:
    variant = compile_variant("test", True, "s + slope * (kv - q_pos)", [Scalar("slope", "fp32")], [])
    after = split_keys(fold_logit(variant.score, variant.ranges, fast_math=True).value, FIRST, KEY)
    beside = [
        node
        for node in walk(after)
        if "key" in names(node) and not {"q_pos", PRODUCT.name, KV_FIRST.name} & names(node)
    ]
    assert {getattr(node, "op", "") for node in beside} == {"mul", "to_float", ""}
