"""Random expressions at the ends of numbers: zeros of both signs, infinities and NaN, and the ends of int64."""

from __future__ import annotations

import math
from itertools import product
from random import Random

import torch

from attngen.errors import SpecError
from attngen.lang.check import compile_variant
from attngen.lang.constant_conditions import fold_conditions
from attngen.lang.eager import evaluate
from attngen.lang.intervals import bounds
from attngen.lang.ir import Const, Expr, Op, Type, Var, rewrite
from attngen.lang.literals import fold_literals
from attngen.lang.printing import canonical
from attngen.lang.simplify import simplify
from attngen.lang.variant import Scalar
from tests.sampling import few

_UNARY = (
    "neg", "abs", "floor", "ceil", "trunc", "round", "exp", "log", "tanh", "sigmoid", "silu", "sqrt", "rsqrt", "sin",
    "cos", "tan", "expm1", "log1p", "erf",
)  # fmt: skip
_NUMBERS = torch.tensor([0.0, -0.0, 1.0, -1.0, 0.5, -2.0, math.inf, -math.inf, math.nan], dtype=torch.float64)


def floating(random: Random, depth: int) -> Expr:
    """A float over x and y, without min and max, which may choose either of two zeros."""
    if depth == 0:
        numbers = [Const(value, Type.FLOAT) for value in (0.0, -0.0, 1.0, -1.0, 0.5, math.inf)]
        return random.choice([*numbers, *[Var(name, Type.FLOAT) for name in "xxy"]])
    args = [floating(random, depth - 1) for _ in range(4)]
    kind = random.random()
    if kind < 0.45:
        return Op(random.choice(("add", "sub", "mul", "truediv", "atan2")), tuple(args[:2]), Type.FLOAT)
    if kind < 0.8:
        return Op(random.choice(_UNARY), tuple(args[:1]), Type.FLOAT)
    condition = Op(random.choice(("lt", "le", "eq", "ne")), tuple(args[2:]), Type.BOOL)
    return Op("select", (condition, *args[:2]), Type.FLOAT)


@few("start", range(0, 800, 50))
def test_simplified_and_folded_floats_are_the_same_to_the_sign_of_zero(start: int) -> None:
    env = {"x": _NUMBERS[:, None], "y": _NUMBERS[None, :]}
    for seed in range(start, start + 50):
        random = Random(seed)
        expr = floating(random, random.randint(1, 4))
        value = evaluate(expr, env, float_dtype=torch.float64)
        for other in (simplify(expr), rewrite(expr, fold_literals)):
            again = evaluate(other, env, float_dtype=torch.float64)
            first, second = torch.broadcast_tensors(value, again)
            alike = torch.isclose(first, second, rtol=1e-9, atol=1e-300) & (first.signbit() == second.signbit())
            assert bool((alike | (first.isnan() & second.isnan())).all()), (canonical(expr), canonical(other))
        low, high = bounds(expr, {})
        numbers = value[~value.isnan()]
        assert bool(((numbers >= low) & (numbers <= high)).all()), (canonical(expr), low, high)


_ENDS = (-(2**63) + 1, -(2**62), -(2**40), -(2**31), -5, -1, 0, 1, 7, 2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1)
_PYTHON = {"clamp": lambda x, low, high: min(max(x, low), high), "min": min, "max": max, "abs": abs, "__builtins__": {}}


def integer(random: Random, depth: int) -> str:
    if depth == 0:
        return random.choice(["x", "y", "w", "1", "-1", "3", "1000000000", "2147483647"])
    a, b = integer(random, depth - 1), integer(random, depth - 1)
    return random.choice([
        f"({a} + {b})", f"({a} - {b})", f"({a} * {b})", f"(-{a})", f"abs({a})", f"({a} // max({b}, 1))",
        f"({a} % max({b}, 2))", f"min({a}, {b})", f"max({a}, {b})", f"clamp({a}, -9, 9)", f"({a} << ({b} & 31))",
        f"({a} >> ({b} & 31))", f"({a} & {b})", f"({a} | {b})", f"({a} ^ {b})", f"(~{a})", f"({a} ** 2)",
        f"({a} if {b} > 3 else {b})", f"({a} // -1)",
    ])  # fmt: skip


@few("start", range(0, 800, 50))
def test_integers_that_are_taken_are_exact_at_the_ends_of_their_ranges(start: int) -> None:
    """Python's integers give the values of all that is not refused as beyond int64."""
    taken = 0
    for seed in range(start, start + 50):
        random = Random(seed)
        ranges = {name: sorted(random.sample(_ENDS, 2)) for name in "xyw"}
        scalars = [Scalar(name, "int64", min=low, max=high) for name, (low, high) in ranges.items()]
        text = f"{integer(random, random.randint(1, 3))} >= {random.choice(_ENDS)}"
        try:
            variant = compile_variant("ends", text, None, scalars)
        except SpecError as error:
            if "beyond int64" not in str(error):
                raise
            continue
        taken += 1
        for point in product(*[(low, high, min(max(0, low), high)) for low, high in ranges.values()]):
            env = dict(zip(ranges, point, strict=True))
            wanted = bool(eval(text, _PYTHON, env))
            for mask in (variant.mask, fold_conditions(variant).mask):
                assert bool(evaluate(mask, env)) is wanted, (text, env)
    assert taken > 15
