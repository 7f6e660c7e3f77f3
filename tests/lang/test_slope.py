"""The derivative of a folded logit: its two factors multiply to the derivative of the score, times the scale."""

from __future__ import annotations

import pytest
import torch

from attngen.lang.check import compile_variant
from attngen.lang.eager import evaluate
from attngen.lang.folding import LOG2E, ONE, PRODUCT, fold_logit, fold_slope, is_finite
from attngen.lang.ir import names
from attngen.lang.variant import Scalar, Tensor
from tests.sampling import few

SCALE = 0.3
SCORES = [
    None,
    "s",
    "s + slope[h] * (kv - q_pos)",
    "cap * tanh(s / cap)",
    "s * slope[h] + cap",
    "cap * tanh(s / cap) + slope[h] * (kv - q)",
    "s if kv > 2 else s * s",
    "max(s, 0.0) * cap / 2",
    "silu(s) - exp(-abs(s))",
    "1.0 * (q - kv)",
    "s * cap / (1.0 + 0.05 * abs(q - kv)) + slope[h]",
    "s / (2.0 + kv) / (1.0 + q) if kv > 2 else 0.0",
]


@few("fast_math", [True, False], always=range(0, 999, 3))
@pytest.mark.parametrize("score", SCORES)
def test_the_factors_multiply_to_the_derivative(score: str | None, fast_math: bool) -> None:
    variant = compile_variant(
        "v", None, score=score, scalars=[Scalar("cap", "fp32", min=0.5)], tensors=[Tensor("slope", "fp32", ("h",))]
    )
    logit = fold_logit(variant.score, variant.ranges, fast_math=fast_math)
    slope = fold_slope(logit, ["slope"], fast_math=fast_math)
    generator = torch.Generator().manual_seed(0)
    product = torch.randn((4, 5, 6), generator=generator, dtype=torch.float64, requires_grad=True)
    tensors = {"slope": torch.rand(4, generator=generator, dtype=torch.float64, requires_grad=True)}
    env = {
        "h": torch.arange(4)[:, None, None], "q": torch.arange(5)[:, None], "q_pos": torch.arange(5)[:, None] + 1,
        "kv": torch.arange(6), "cap": 1.7, "softmax_scale": SCALE, LOG2E.name: 1.0, PRODUCT.name: product,
    }  # fmt: skip

    def value(expr: object, **more: object) -> torch.Tensor:
        result = evaluate(expr, {**env, **more}, tensors, float_dtype=torch.float64)  # type: ignore[arg-type]
        return result.broadcast_to(product.shape)

    score_of = product * SCALE if variant.score is None else value(variant.score, s=product * SCALE)
    wanted = torch.zeros_like(product)
    if score_of.requires_grad:
        wanted = torch.autograd.grad(score_of.sum(), product, retain_graph=True, allow_unused=True)[0]
    by_factors = value(slope.factor) * value(slope.varying or ONE)
    torch.testing.assert_close(by_factors.detach(), wanted)
    assert not names(slope.factor) & {"q", "q_pos", "kv", PRODUCT.name}
    if slope.loads:
        above = torch.randn(product.shape, generator=generator, dtype=torch.float64)
        total = sum((value(derivative) * above).sum((1, 2)) for _, derivative in slope.loads)
        (by_slope,) = torch.autograd.grad((score_of * above).sum(), tensors["slope"])
        torch.testing.assert_close(total.detach(), by_slope)  # type: ignore[union-attr]


def test_factors_come_out_of_numerators() -> None:
    """So that P times what varies, which 16 bits hold, is no smaller than need be."""
    for score in ("s / (1.0 + 0.05 * abs(q - kv))", "-inf if kv < 3 else 0.5 * s / (1.0 + abs(q - kv))"):
        variant = compile_variant("v", None, score=score)
        slope = fold_slope(fold_logit(variant.score, variant.ranges, fast_math=True), fast_math=True)
        assert "softmax_scale" in names(slope.factor), score
        assert slope.varying is not None
        assert "softmax_scale" not in names(slope.varying), score


def test_slopes_that_may_be_infinite() -> None:
    for score, finite in (
        ("tanh(s)", True), ("log(s)", False), ("s / (1 + s * s)", False), ("2 * sin(s)", True),
        ("-(abs(s) + 0.01) * (1.0 if kv % 4 != 3 else inf)", False),
    ):  # fmt: skip
        variant = compile_variant("v", None, score=score)
        slope = fold_slope(fold_logit(variant.score, variant.ranges, fast_math=True), fast_math=True)
        assert slope.varying is not None
        assert is_finite(slope.varying) is finite, score
