"""Bounds of scores hold whatever the products are, and no score is called bounded that is not."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import numpy as np
import pytest

from attngen.lang.bounded import bounding_maximum, score_bounds
from attngen.lang.check import compile_variant
from attngen.lang.variant import Scalar, Tensor, Variant
from tests.lang.walker import Walker
from tests.sampling import seeds

SCALARS = (Scalar("cap", "fp32", min=0.5, max=30.0), Scalar("gain", "fp32"), Scalar("n", "int32", min=1, max=4))
TENSORS = (Tensor("bias", "fp32", ("h",), range=(-2.0, 3.0)), Tensor("free", "fp32", ("h",)))
KINDS = dict.fromkeys(("s", "cap", "gain", "bias", "free"), "float") | dict.fromkeys(("n", "q_pos", "kv", "h"), "int")


def _variant(score: str, *scalars: Scalar) -> Variant:
    return compile_variant("v", mask="q_pos >= kv", score=score, scalars=scalars or SCALARS, tensors=TENSORS)


@pytest.mark.parametrize(
    ("score", "expected"),
    [
        ("30 * tanh(s / 30)", (-30, 30)),
        ("cap * tanh(s / cap)", (-30, 30)),
        ("clamp(s, -5.0, 8.0)", (-5, 8)),
        ("max(-4.0, min(s * s, 9.0))", (0, 9)),
        ("10 * sigmoid(s) + bias[h]", (-2, 13)),
        ("cap * tanh(s / cap) if kv % n == 0 else -1.0", (-30, 30)),
        ("sin(s) * cos(s) * cap", (-30, 30)),
        ("tanh(s) * free[h]", None),
        ("30 * tanh(s / 30) + gain", None),
        ("30 * tanh(s / 30) - 0.5 * (q_pos - kv)", "wide"),
        ("min(s, 10.0)", None),
        ("30 * tanh(s / 30) if kv % 2 == 0 else s", None),
        ("30 * tanh(s / 30) if s > 0 else -inf", None),
        ("s", None),
    ],
)
def test_bounds_of_scores(score: str, expected: tuple[float, float] | str | None) -> None:
    variant = _variant(score)
    limits = score_bounds(variant.score, variant.ranges)
    if expected is None:
        assert limits is None
    elif expected == "wide":  # by the longest sequence
        assert limits is not None
        assert limits[1] > 2**28
    else:
        assert limits == pytest.approx(expected, rel=1e-4)


def test_a_scalar_without_maximum_bounds_nothing_and_the_one_that_would_is_named() -> None:
    variant = _variant("cap * tanh(s / cap)", Scalar("cap", "fp32", min=0.001))
    assert score_bounds(variant.score, variant.ranges) is None
    assert bounding_maximum(variant, "cap", 55.45) == 55.0
    assert bounding_maximum(_variant("30 * tanh(s / 30)"), "cap", 55.45) is None
    assert bounding_maximum(_variant("s * gain"), "gain", 55.45) is None


def _score(chance: random.Random, depth: int) -> str:
    """Return a random score, most of whose terms are bounded."""
    if depth == 0:
        return chance.choice(
            ["s", "tanh(s)", "sigmoid(s / cap)", "cap", "bias[h]", "1.5", "-0.25", "float(n)", "sin(s)"]
        )
    a, b = _score(chance, depth - 1), _score(chance, depth - 1)
    return chance.choice(
        [
            f"({a}) + ({b})", f"({a}) - ({b})", f"({a}) * ({b})", f"min({a}, {b})", f"max({a}, {b})", f"abs({a})",
            f"clamp({a}, -cap, 7.0)", f"cap * tanh(({a}) / cap)", f"({a}) if kv % n == 0 else ({b})",
            f"({a}) / (1.0 + abs({b}))", f"exp(min({a}, 3.0))",
        ]
    )  # fmt: skip


@seeds(400, always=8)
def test_bounds_hold_for_every_product(seed: int) -> None:
    chance = random.Random(seed)
    score = _score(chance, 3)
    variant = _variant(score)
    limits = score_bounds(variant.score, variant.ranges)
    if limits is None:
        return
    for _ in range(30):
        size = 10.0 ** chance.uniform(-6, 38)
        names = {
            "s": chance.choice([0.0, size, -size, math.inf, -math.inf, chance.gauss(0, 5)]), "gain": chance.gauss(0, 9),
            "cap": chance.choice([0.5, 30.0, chance.uniform(0.5, 30.0)]), "n": chance.randint(1, 4),
            "q_pos": chance.randint(0, 9), "kv": chance.randint(0, 9), "h": 0,
        }  # fmt: skip
        tensors = {
            "bias": np.array([chance.uniform(-2, 3)], np.float32),
            "free": np.array([chance.gauss(0, 5)], np.float32),
        }
        value = float(Walker(names, tensors, {}, KINDS, np.float32).evaluate(score))
        if value == value:
            assert Fraction(limits[0]) <= Fraction(value) <= Fraction(limits[1]), (score, names, tensors)
