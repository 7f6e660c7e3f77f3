"""Rounded and compared values come out as written, whatever ``fast_math`` makes of the numbers beside them."""

from __future__ import annotations

import pytest
import torch

from attngen.lang.check import compile_variant
from attngen.lang.derivative import differentiate
from attngen.lang.eager import evaluate
from attngen.lang.facts import index
from attngen.lang.folding import KV_FIRST, LOG2E, ONE, PRODUCT, fold_logit, fold_slope, split_keys
from attngen.lang.ir import Expr, Load, Op
from attngen.lang.usage import decides
from attngen.lang.variant import Scalar, Tensor
from tests.lang import randoms
from tests.lang.harness import RANGES
from tests.sampling import few, seeds

SCALARS = [Scalar("n", "int32", min=1), Scalar("cap", "fp32", min=0.125)]
TENSORS = [Tensor("weight", "fp32", ("h",), grad=True)]
SCORES = [
    "s if (q_pos + 1) / n >= 1.0 else -s",
    "-s if (q_pos + 1) / n < 1.0 else s",
    "s if floor((kv + 1) / n) >= 1.0 else -s",
    "s * floor((kv + 1) / n)",
    "s + ceil((kv + 1) / n) / cap",
    "s if (kv - q_pos) * 0.1 >= 0.3 else -s",
    "s if (kv + 1) * cap / n >= cap else -s",
    "s * (floor(kv / n) if kv / n >= 1.0 else kv / n)",
    "(s if sqrt((kv + 1) / n) >= 1.0 else -s) / cap",
]


def decisions(expr: Expr) -> set[Expr]:
    """Return the outermost nodes that decide."""
    if decides(expr):
        return {expr}
    below = expr.args if isinstance(expr, Op) else expr.indices if isinstance(expr, Load) else ()
    return set[Expr]().union(*(decisions(part) for part in below))


@few("score", SCORES, always=(3,))
def test_quotients_at_the_boundary(score: str) -> None:
    """In float32, where ``x * (1.0 / n)`` is less than 1 at ``x == n`` for n = 41, 47, 55 and others."""
    variant = compile_variant("v", None, score, SCALARS)
    assert variant.score is not None
    folded = fold_logit(variant.score, variant.ranges, fast_math=True)
    first, key = KV_FIRST, index("key")
    split = split_keys(folded.value, first, key)
    kv = torch.arange(128)
    for n in range(1, 128):
        env = {"n": n, "cap": 0.7, "q_pos": kv[:, None], "kv": kv, KV_FIRST.name: kv // 64 * 64, "key": kv % 64}
        env |= {PRODUCT.name: 1.0, "softmax_scale": 1.0, LOG2E.name: 1.0, "s": 1.0}
        wanted = evaluate(variant.score, env)
        for value in (folded.value, split):
            torch.testing.assert_close(evaluate(value, env) * evaluate(folded.multiplier, env), wanted)


@pytest.mark.parametrize("fast_math", [True, False])
@seeds(60, always=4)
def test_folding_leaves_decisions_alone(seed: int, fast_math: bool) -> None:
    expr = randoms.expression(seed, kind="float", depth=4, logit=True)
    folded = fold_logit(expr, RANGES, fast_math=fast_math)
    assert decisions(split_keys(folded.value, KV_FIRST, index("key"))) <= decisions(folded.natural)
    slope = fold_slope(folded, ["table", "bias"], fast_math=fast_math)
    plain = differentiate(folded.natural, PRODUCT.name)
    assert decisions(slope.varying or ONE) <= decisions(plain)
    for load, by_load in slope.loads:
        assert decisions(by_load) <= decisions(differentiate(folded.natural, load))


def test_ties_share_the_gradient_also_where_a_quotient_meets_a_constant() -> None:
    """``max(x / n, 1.0)`` at ``x == n``: half of the gradient goes each way, as in torch."""
    variant = compile_variant("v", None, "s * max(weight[h] * (q_pos + 1) / n, 1.0)", SCALARS, TENSORS)
    slope = fold_slope(fold_logit(variant.score, variant.ranges, fast_math=True), ["weight"], fast_math=True)
    ((_, by_weight),) = slope.loads
    n = torch.arange(1, 128)
    env = {"n": n, "cap": 1.0, "q_pos": n - 1, "h": 0, PRODUCT.name: 1.0, "softmax_scale": 1.0}
    gradient = evaluate(by_weight, env, {"weight": torch.ones(1)})
    torch.testing.assert_close(gradient, torch.full((127,), 0.5))
