"""Smart constructors: what they write, and that they never change a value."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from attngen.lang import simplify as s
from attngen.lang.ir import Const, Expr, Op, Type, Var
from attngen.lang.printing import canonical
from tests.lang import bruteforce
from tests.lang.bruteforce import Masks, UnguardedError, World, mask_of
from tests.sampling import seeds

x, y, n, c = (Var(name, Type.INT) for name in ("x", "y", "n", "chunk"))
p, r = Var("p", Type.BOOL), Var("r", Type.BOOL)
f, g = Var("f", Type.FLOAT), Var("g", Type.FLOAT)
zero, one = s.integer(0), s.integer(1)


@pytest.mark.parametrize(
    ("expr", "text"),
    [
        (s.add(s.add(x, one), s.integer(2)), "x + 3"),
        (s.sub(s.add(x, y), x), "y"),
        (s.sub(s.sub(x, y), s.integer(-1)), "x - y + 1"),
        (s.sub(one, x), "1 - x"),
        (s.neg(s.sub(x, y)), "y - x"),
        (s.mul(s.add(x, one), s.integer(2)), "x * 2 + 2"),
        (s.mul(s.add(x, one), c), "(x + 1) * chunk"),
        (s.mul(x, zero), "0"),
        (s.floordiv(s.add(x, s.integer(128)), s.integer(128)), "x // 128 + 1"),
        (s.floordiv(s.add(x, s.integer(127)), s.integer(128)), "(x + 127) // 128"),
        (s.floordiv(s.floordiv(x, s.integer(4)), s.integer(8)), "x // 32"),
        (s.floordiv(s.mul(x, n), n), "x"),
        (s.floordiv(s.sub(x, one), s.integer(1)), "x - 1"),
        (s.floordiv(s.add(s.mul(x, s.integer(-6)), one), s.integer(-3)), "x * 2 - 1"),
        (s.ceildiv(s.add(x, one), n), "x // n + 1"),
        (s.ceildiv(x, n), "(x + n - 1) // n"),
        (s.ceildiv(s.mul(x, n), n), "x"),
        (s.ceildiv(s.add(x, one), s.integer(64)), "x // 64 + 1"),
        (s.mod(s.add(x, s.integer(130)), s.integer(64)), "(x + 2) % 64"),
        (s.mod(s.mul(x, n), n), "0"),
        (s.minimum(s.add(x, one), s.add(x, s.integer(3))), "x + 1"),
        (s.maximum(s.minimum(x, y), y), "max(min(x, y), y)"),
        (s.minimum(s.minimum(x, y), y), "min(x, y)"),
        (s.maximum(s.maximum(x, s.integer(3)), s.integer(5)), "max(x, 5)"),
        (s.lt(x, s.add(x, one)), "True"),
        (s.not_(s.lt(x, y)), "x >= y"),
        (s.not_(s.lt(f, g)), "not f < g"),
        (s.not_(s.eq(f, g)), "f != g"),
        (s.eq(p, r), "not p ^ r"),
        (s.xor(p, s.TRUE), "not p"),
        (s.and_(p, s.TRUE), "p"),
        (s.or_(p, s.and_(r, s.FALSE)), "p"),
        (s.select(s.not_(p), x, y), "y if p else x"),
        (s.select(p, s.TRUE, r), "p or r"),
        (s.select(p, x, x), "x"),
        (s.sub(f, Const(0.0, Type.FLOAT)), "f"),
        (s.add(f, Const(-0.0, Type.FLOAT)), "f"),
        (s.add(Const(-0.0, Type.FLOAT), f), "f"),
        (s.mul(Const(1.0, Type.FLOAT), f), "f"),
        (s.truediv(f, Const(1.0, Type.FLOAT)), "f"),
        (s.neg(s.neg(f)), "f"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_reads_as_written_by_hand(expr: Expr, text: str) -> None:
    assert canonical(expr) == text


def test_floats_keep_what_nan_and_inf_decide() -> None:
    inf = Const(math.inf, Type.FLOAT)
    assert isinstance(s.mul(f, Const(0.0, Type.FLOAT)), Op)
    assert isinstance(s.sub(f, f), Op)
    assert isinstance(s.eq(f, f), Op)
    assert isinstance(s.le(f, f), Op)
    assert math.isnan(s.minimum(Const(math.nan, Type.FLOAT), inf).value)
    assert s.sub(inf, inf).value != s.sub(inf, inf).value
    assert s.sub(inf, inf) == Const(math.nan, Type.FLOAT)


def test_floats_keep_the_sign_of_zero() -> None:
    plus, minus = Const(0.0, Type.FLOAT), Const(-0.0, Type.FLOAT)
    for kept in (s.add(f, plus), s.add(plus, f), s.sub(f, minus), s.sub(plus, f), s.sub(minus, f), s.mul(f, minus)):
        assert isinstance(kept, Op)
    assert isinstance(s.select(p, plus, minus), Op)
    assert isinstance(s.maximum(plus, f), Op)
    for folded, value in (
        (s.add(plus, minus), 0.0), (s.add(minus, minus), -0.0), (s.mul(plus, Const(-1.0, Type.FLOAT)), -0.0),
        (s.neg(plus), -0.0), (s.neg(minus), 0.0), (s.absolute(minus), 0.0), (s.make("round", minus), -0.0),
    ):  # fmt: skip
        assert folded == Const(value, Type.FLOAT)


@pytest.mark.parametrize("op", ["floordiv", "mod"])
def test_division_by_a_literal_zero_stays(op: str) -> None:
    assert isinstance(s.make(op, s.integer(7), zero), Op)
    assert isinstance(s.make(op, x, zero), Op)


def test_results_beyond_int64_are_not_folded() -> None:
    assert isinstance(s.mul(s.integer(2**40), s.integer(2**40)), Op)
    assert isinstance(s.make("lshift", one, s.integer(100)), Op)
    assert isinstance(s.make("pow", s.integer(3), s.integer(10**9)), Op)


def test_wide_marks_survive() -> None:
    wide = Op("add", (x, y), Type.INT, wide=True)
    assert s.simplify(Op("sub", (wide, one), Type.INT)) == Op("sub", (wide, one), Type.INT, wide=True)


@pytest.mark.parametrize("d", [-4, -3, -1, 1, 2, 3, 4])
def test_division_rules_round_to_the_floor(d: int) -> None:
    for a in range(-9, 10):
        check_division(a, d)


def check_division(a: int, d: int) -> None:
    numerators = {s.add(x, s.integer(a)): 1, s.add(s.mul(x, s.integer(6)), s.integer(a)): 6}
    for numerator, factor in numerators.items():
        for value in (-7, -1, 0, 5):
            env = {"x": value, "n": d}
            for divisor in (s.integer(d), n):
                assert bruteforce.evaluate(s.floordiv(numerator, divisor), env, {}) == (factor * value + a) // d
                assert bruteforce.evaluate(s.mod(numerator, divisor), env, {}) == (factor * value + a) % d
            if d > 0:
                assert bruteforce.evaluate(s.ceildiv(numerator, n), env, {}) == -(-(factor * value + a) // d)


@seeds(150, always=20)
def test_simplifying_never_changes_a_mask(seed: int) -> None:
    source = random.Random(seed)
    mask, world = Masks(source).mask(3), World.random(source)
    try:
        before = mask_of(mask, world.env, world.arrays, world.heads)
    except UnguardedError:
        return
    after = mask_of(s.simplify(mask), world.env, world.arrays, world.heads)
    assert np.array_equal(before, after)
