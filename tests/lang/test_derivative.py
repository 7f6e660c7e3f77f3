"""The symbolic derivative against torch's autograd of torch's own functions."""

from __future__ import annotations

from random import Random

import pytest
import torch

from attngen.lang.check import compile_variant
from attngen.lang.derivative import ZERO, differentiate, differentiate_loads
from attngen.lang.eager import evaluate
from attngen.lang.ir import Const, Expr, Load, Type, Var, walk
from attngen.lang.printing import canonical
from attngen.lang.variant import Scalar, Tensor
from tests.lang import randoms
from tests.lang.plain_torch import plain
from tests.sampling import few


def score(text: str) -> Expr:
    scalars = [Scalar("x", "fp32", grad=True), Scalar("c", "bool")]
    tensors = [Tensor("t", "fp32", (4,), grad=True), Tensor("one", "fp32", grad=True)]
    return compile_variant("v", None, text, scalars, tensors).score or Var("s", Type.FLOAT)


@few("seed", range(60), always=(*range(0, 20, 2), 45))
def test_random_scores_agree_with_autograd(seed: int) -> None:
    expr = randoms.expression(seed, kind="float", depth=3, logit=True)
    f64 = torch.float64
    s = randoms.logits(seed).to(f64).requires_grad_()
    gain = torch.tensor(0.75, dtype=f64, requires_grad=True)
    tensors = {name: t.to(f64) if t.is_floating_point() else t for name, t in randoms.tensors(seed).items()}
    for name in ("table", "bias"):
        tensors[name] = tensors[name].clone().requires_grad_()
    env = {**randoms.indices(), **randoms.scalars(seed), "gain": gain, "s": s}
    value = torch.broadcast_to(plain(expr, env, tensors, f64), s.shape)
    if not value.requires_grad:
        return
    weight = torch.randn(s.shape, dtype=f64, generator=torch.Generator().manual_seed(seed))
    wanted = torch.autograd.grad(
        value, [s, gain, tensors["table"], tensors["bias"]], weight, allow_unused=True, materialize_grads=True
    )
    with torch.no_grad():

        def total(slope: Expr) -> torch.Tensor:
            return weight * torch.broadcast_to(evaluate(slope, env, tensors, f64), s.shape)

        table = torch.zeros(16, dtype=f64)
        for load, slope in differentiate_loads(expr, "table"):
            where = torch.broadcast_to(evaluate(load.indices[0], env, tensors, f64), s.shape)
            table.index_put_((where,), total(slope), accumulate=True)
        derivatives = [
            total(differentiate(expr, "s")),
            total(differentiate(expr, "gain")).sum(),
            table,
            total(differentiate(expr, "bias")).sum(),
        ]
    for one, other in zip(derivatives, wanted, strict=True):  # torch's are NaN where a branch is not taken
        torch.testing.assert_close(
            torch.where(other.isnan(), other, one), other, rtol=1e-6, atol=1e-6, equal_nan=True, msg=canonical(expr)
        )
    of_eager = torch.autograd.grad(
        torch.broadcast_to(evaluate(expr, env, tensors, f64), s.shape),
        [s, gain, tensors["table"], tensors["bias"]], weight, allow_unused=True, materialize_grads=True,
    )  # fmt: skip
    for one, other in zip(derivatives, of_eager, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6, equal_nan=True, msg=canonical(expr))


@pytest.mark.parametrize(
    "text",
    [
        "s",
        "s * s",
        "abs(s)",
        "min(s, 1.0)",
        "max(0.0, s)",
        "floor(s)",
        "s + round(s) + trunc(s) + sign(s) + int(s)",
    ],
)
def test_kinks_are_those_of_torch(text: str) -> None:
    expr = score(text)
    s = torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0], requires_grad=True)
    (wanted,) = torch.autograd.grad(plain(expr, {"s": s}).sum(), s, allow_unused=True, materialize_grads=True)
    derivative = torch.broadcast_to(evaluate(differentiate(expr, "s"), {"s": s.detach()}), s.shape)
    assert derivative.tolist() == wanted.tolist()


def test_a_clamp_has_the_slope_1_at_both_ends() -> None:
    """That of torch differs between releases: before 2.14 it is 1, since then a half."""
    s = torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0])
    assert evaluate(differentiate(score("clamp(s, -1, 1)"), "s"), {"s": s}).tolist() == [0.0, 1.0, 1.0, 1.0, 0.0]


def test_a_clamp_between_bounds_that_cross() -> None:
    expr = score("clamp(s, x, one)")
    s = torch.tensor([-3.0, 0.0, 3.0], requires_grad=True)
    x, one = torch.tensor(1.0, requires_grad=True), torch.tensor(-1.0, requires_grad=True)
    env, tensors = {"s": s, "x": x}, {"one": one}
    wanted = torch.autograd.grad(plain(expr, env, tensors).sum(), [s, x, one])
    derivatives = [torch.broadcast_to(evaluate(differentiate(expr, n), env, tensors), (3,)) for n in ("s", "x", "one")]
    assert derivatives[0].tolist() == wanted[0].tolist()
    assert [f.sum().item() for f in derivatives[1:]] == [w.item() for w in wanted[1:]]


def test_a_branch_that_is_not_taken_is_selected_away() -> None:
    slope = differentiate(score("sqrt(s) if s > 0 else -inf"), "s")
    assert evaluate(slope, {"s": torch.tensor([-1.0, 0.0, 4.0])}).tolist() == [0.0, 0.0, 0.25]


@pytest.mark.parametrize(
    ("text", "wrt", "printed"),
    [
        ("s", "s", "1.0"),
        ("s + x", "s", "1.0"),
        ("s + x * kv", "x", "float(kv)"),
        ("s + 0.5 * s", "s", "1.0 + 0.5"),
        ("x", "s", "0.0"),
        ("s if q > kv else 0.0", "s", "1.0 if q > kv else 0.0"),
        ("tanh(s)", "s", "1.0 - tanh(s) * tanh(s)"),
        ("s ** 2", "s", "2.0 * s"),
        ("s ** 1", "s", "1.0"),
        ("s ** 0", "s", "0.0"),
        ("floor(s) + ceil(s)", "s", "0.0"),
        ("s + one", "one", "1.0"),
        ("expm1(s)", "s", "expm1(s) + 1.0"),
        ("log1p(s)", "s", "1.0 / (s + 1.0)"),
        ("atan(s)", "s", "1.0 / (s * s + 1.0)"),
        ("2.0 ** s", "s", "2.0 ** s * log(2.0)"),
        ("abs(x) ** s", "s", "abs(x) ** s * log(abs(x)) if not (abs(x) == 0.0 and s >= 0.0) else 0.0"),
    ],
)
def test_derivatives_are_short(text: str, wrt: str, printed: str) -> None:
    assert canonical(differentiate(score(text), wrt)) == printed


@pytest.mark.parametrize(
    "function", ["erf(s)", "expm1(s)", "log1p(s)", "atan(s)", "atan2(s, x)", "atan2(x, s)", "s ** x", "x ** s",
                 "s ** round(s)", "abs(s) ** s", "1 / s"],
)  # fmt: skip
def test_functions_have_the_derivatives_of_torch(function: str) -> None:
    """Derivatives agree at zeros, for whole exponents of negative numbers, and where torch's is NaN or infinite."""
    expr, f64 = score(f"{function} + 0 * x"), torch.float64
    s = torch.tensor([-2.0, -1.0, -0.5, 0.0, 0.25, 1.0, 3.0], dtype=f64).repeat(5, 1).requires_grad_()
    x = torch.tensor([-2.0, 0.0, 0.5, 1.0, 3.0], dtype=f64)[:, None].repeat(1, 7).requires_grad_()
    wanted = torch.autograd.grad(plain(expr, {"s": s, "x": x}, float_dtype=f64).sum(), [s, x])
    for name, one in zip(("s", "x"), wanted, strict=True):
        derivative = evaluate(differentiate(expr, name), {"s": s.detach(), "x": x.detach()}, float_dtype=f64)
        torch.testing.assert_close(derivative.broadcast_to(s.shape), one, equal_nan=True, msg=f"{function} by {name}")


def test_each_element_that_is_read_counts_once() -> None:
    expr = score("t[q & 3] * t[q & 3] + t[kv & 3] + s")
    pairs = differentiate_loads(expr, "t")
    assert [canonical(load) for load, _ in pairs] == ["t[q & 3]", "t[kv & 3]"]
    assert [canonical(slope) for _, slope in pairs] == ["t[q & 3] + t[q & 3]", "1.0"]
    assert differentiate_loads(expr, "one") == ()
    load = next(n for n in walk(expr) if isinstance(n, Load))
    assert differentiate(expr, load) == pairs[0][1]


def test_nothing_depends_on_an_unknown_name() -> None:
    assert differentiate(score("s + 1.0"), "nope") == ZERO == Const(0.0, Type.FLOAT)


#: Functions that have an infinite derivative somewhere, of what may be flat or not be chosen there.
_OUTER = ["sqrt({})", "({}) ** 0.5", "({}) ** 1.5", "log({})", "log2({})", "1.0 / max({}, 0.25)", "exp({})", "{}"]
_INNER = [
    "max({}, 0.0)", "min({}, 1.0)", "clamp({}, 0.0, 1.0)", "abs({})", "{} * {} if {} > 0 else 0.0",
    "({}) ** 2 if kv % 2 == 0 else 0.0", "0.0 if {} < 0 else {}", "max(min({}, 2.0), 0.0) + max({}, 0.0)",
    "clamp({}, 0.0, x)", "max({}, x) - x", "-min({}, 0.0)", "{} if kv < 2 else max({}, 0.0) if kv < 4 else 1.0",
]  # fmt: skip


@pytest.mark.exhaustive
def test_flat_and_unchosen_arms_take_no_part_in_an_infinite_derivative() -> None:
    """Wherever torch's derivative is finite, ours is the same: no 0 * inf anywhere along the chain."""
    random = Random(7)
    f64 = torch.float64
    numbers = torch.tensor([-2.0, -1.0, -0.5, 0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0], dtype=f64)[:, None].repeat(1, 6)
    compared = 0
    for _ in range(400):
        text = "s"
        for _ in range(random.randint(1, 2)):
            inner, outer = random.choice(_INNER), random.choice(_OUTER)
            text = outer.replace("{}", "(" + inner.replace("{}", f"({text})") + ")")
            if random.random() < 0.3:
                text = f"({text}) * s"
        expr = score(text)
        s = numbers.clone().requires_grad_()
        env = {"kv": torch.arange(6), "x": torch.tensor(1.0, dtype=f64)}
        value = torch.broadcast_to(plain(expr, {**env, "s": s}, float_dtype=f64), s.shape)
        if not value.requires_grad:
            continue
        (wanted,) = torch.autograd.grad(value, s, torch.ones_like(value), allow_unused=True, materialize_grads=True)
        derivative = evaluate(differentiate(expr, "s"), {**env, "s": s.detach()}, float_dtype=f64).broadcast_to(s.shape)
        finite = wanted.isfinite()
        compared += int(finite.sum())
        torch.testing.assert_close(derivative[finite], wanted[finite], rtol=1e-9, atol=1e-9, msg=text)
    assert compared > 10_000
