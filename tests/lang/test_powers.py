"""Polynomials in place of exp2: as good as exp2 for probabilities of 16 bits, and only where a score is bounded."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from attngen.lang.check import compile_variant
from attngen.lang.folding import fold_logit
from attngen.lang.ir import Op
from attngen.lang.powers import Powers, argument_of, powers_of, special_functions
from attngen.lang.variant import Scalar, Tensor

CAP = Scalar("cap", "fp32", min=0.5, max=30.0)
BIAS = Tensor("bias", "fp32", ("h",), range=(-2.0, 3.0))


def powers(score: str, constant: float = 0.0, *, cap: Scalar = CAP) -> tuple[Powers | None, int]:
    variant = compile_variant("v", mask="q_pos >= kv", score=score, scalars=(cap,), tensors=(BIAS,))
    logit = fold_logit(variant.score, variant.ranges, fast_math=True)
    return powers_of(logit, variant.score, variant.ranges, constant), special_functions(logit)


@pytest.mark.parametrize(
    ("score", "function", "argument", "constant"),
    [
        ("sigmoid(s)", lambda t: 0.5 + 0.5 * t, np.linspace(-1, 1, 1001), 0.0),
        ("sigmoid(s)", lambda t: 0.5 + 0.5 * t, np.linspace(-1, 1, 1001), 7.0),
        ("tanh(s)", lambda t: t, np.linspace(-1, 1, 1001), 0.0),
        ("2 * sigmoid(s)", lambda t: 1 + t, np.linspace(-1, 1, 1001), 2.0),
        ("sin(s)", lambda t: t, np.linspace(-1, 1, 1001), 0.0),
        ("clamp(s, -0.5, 1.0)", lambda t: t, np.linspace(-0.5, 1, 1001), 0.0),
    ],
)
def test_polynomials_are_as_good_as_exp2_for_16_bits(
    score: str, function: Callable[[np.ndarray], np.ndarray], argument: np.ndarray, constant: float
) -> None:
    polynomial, _ = powers(score, constant)
    assert polynomial is not None
    x: np.ndarray = argument.astype(np.float32)
    result: np.ndarray = np.zeros(argument.shape, np.float32)
    for term in reversed(polynomial.terms):
        result = result * x + np.float32(term)
    wanted = np.exp2(function(argument) * math.log2(math.e) - constant)
    assert np.abs(result / wanted - 1).max() < 2.0**-12.9


@pytest.mark.parametrize(
    "score", ["s", "silu(s)", "30 * tanh(s / 30)", "cap * tanh(s / cap)", "sigmoid(s) * 8", "min(s, 1.0)"]
)
def test_wide_and_unbounded_scores_keep_exp2(score: str) -> None:
    assert powers(score)[0] is None


def test_functions_of_a_pair_are_counted() -> None:
    assert powers("sigmoid(s)")[1] == powers("tanh(s) + bias[h]")[1] == 1
    assert powers("tanh(s) * cos(s)")[1] == 2
    assert powers("clamp(s, -0.5, 1.0) * exp(bias[h])")[1] == 0


def test_a_sigmoid_becomes_the_tanh_of_which_it_is_made() -> None:
    variant = compile_variant("v", score="sigmoid(s)")
    assert isinstance(variant.score, Op)
    logit = fold_logit(variant.score, variant.ranges, fast_math=True)
    argument = argument_of(logit.value)
    assert isinstance(argument, Op)
    assert argument.op == "tanh"
    assert argument_of(variant.score.args[0]) == variant.score.args[0]
