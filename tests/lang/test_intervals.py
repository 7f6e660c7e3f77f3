"""Bounds hold for every value: numbers by evaluation at random points, tiles by brute force over the mask."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from attngen.lang.bands import Facts, classify
from attngen.lang.check import compile_variant
from attngen.lang.facts import KV_START, Q_START
from attngen.lang.interval_rules import RULES
from attngen.lang.intervals import bounds
from attngen.lang.ir import MAX_SEQLEN, OPERATORS, Const, Expr, Op, Type, walk
from attngen.lang.overflow import saturate, widen
from attngen.lang.printing import canonical
from attngen.lang.simplify import FOLD, make
from attngen.lang.variant import Scalar, Tensor
from tests.lang import bruteforce
from tests.lang.bruteforce import (
    FACTS,
    INT32,
    Masks,
    UnguardedError,
    World,
    check_classify,
    const,
    load,
    mask_of,
    op,
    var,
)
from tests.sampling import few, seeds

RANGES = {"x": (-3, 5), "y": (2, 7), "p": (0, 1), "t": (0, 9), "f": (-1.5, 2.0)}


def test_every_operator_has_a_rule() -> None:
    assert RULES.keys() == OPERATORS.keys()


@pytest.mark.parametrize(
    ("expr", "expected"),
    [
        (op("sub", var("q_pos"), var("kv")), (2 - 2 * MAX_SEQLEN, MAX_SEQLEN - 1)),
        (op("sub", var("kv"), var("seqlen_k")), (-MAX_SEQLEN, -1)),
        (op("sub", var("q_pos"), var("q")), (1 - MAX_SEQLEN, MAX_SEQLEN - 1)),
        (op("sub", var("x"), var("x")), (0, 0)),
        (op("mul", var("x"), var("x")), (0, 25)),
        (op("mul", var("x"), var("y")), (-21, 35)),
        (op("floordiv", var("x"), var("y")), (-2, 2)),
        (op("floordiv", var("y"), const(-2)), (-4, -1)),
        (op("floordiv", var("x"), var("x")), (-math.inf, math.inf)),
        (op("mul", op("floordiv", var("kv"), var("y")), var("y")), (0, MAX_SEQLEN - 1)),
        (op("mod", var("x"), var("y")), (0, 6)),
        (op("mod", var("y"), const(16)), (2, 7)),
        (op("mod", var("x"), const(-4)), (-3, 0)),
        (op("abs", var("x")), (0, 5)),
        (op("bitand", var("x"), const(6)), (0, 6)),
        (op("bitor", var("x"), var("y")), (-8, 7)),
        (op("invert", var("x")), (-6, 2)),
        (op("lshift", var("x"), const(3)), (-24, 40)),
        (op("rshift", var("x"), const(1)), (-2, 2)),
        (op("pow", var("x"), const(2)), (0, 25)),
        (op("pow", var("x"), const(3)), (-27, 125)),
        (op("pow", op("floordiv", var("x"), var("x")), const(2)), (0, math.inf)),
        (op("pow", op("floordiv", var("x"), var("x")), const(3)), (-math.inf, math.inf)),
        (op("lt", var("x"), var("y")), (False, True)),
        (op("lt", var("kv"), var("seqlen_k")), (True, True)),
        (op("eq", var("x"), const(6)), (False, False)),
        (op("to_int", op("lt", var("x"), const(9))), (1, 1)),
        (op("to_int", op("to_float", var("x"))), (-3, 5)),
        (op("to_int", op("truediv", op("to_float", var("y")), const(1.5))), (1, 4)),  # never NaN
        (op("to_int", op("add", bruteforce.Var("f", Type.FLOAT), const(3.0))), (0, 5)),  # NaN becomes 0
        (op("to_int", op("log", op("to_float", var("y")))), (0, 1)),
        # kernels approximate it, and read a table at the result
        (
            op("to_int", op("mul", op("erf", op("min", bruteforce.Var("f", Type.FLOAT), const(0.5))), const(1000.0))),
            (-968, 522),
        ),
        (op("to_int", op("mul", op("tanh", bruteforce.Var("s", Type.FLOAT)), const(15.5))), (-15, 15)),
        (op("to_int", op("exp", op("to_float", var("kv")))), (0, 2**31 - 1)),
        (op("to_int", op("log", op("to_float", var("x")))), (-(2**31), 2**31 - 1)),
        (bruteforce.Load("t", (var("kv"),), Type.INT), (0, 9)),
        (op("select", op("lt", var("x"), const(9)), var("y"), const(100)), (2, 7)),
    ],
    ids=lambda value: "" if isinstance(value, tuple) else canonical(value),
)
def test_numbers(expr: Expr, expected: tuple[float, float]) -> None:
    assert bounds(expr, RANGES) == expected


F = bruteforce.Var("f", Type.FLOAT)


@pytest.mark.parametrize(
    ("expr", "low", "high"),
    [
        (op("add", const(1.0), op("exp", F)), 1.2, 8.4),
        (op("add", const(1.0), op("mul", F, F)), 0.99999, 5.0001),
        (op("sqrt", op("abs", F)), 0.0, 1.4143),
        (op("log", F), -math.inf, math.inf),
        (op("tanh", F), -0.91, 0.97),
        (op("sin", F), -1.00001, 1.00001),
        (op("truediv", const(1.0), op("max", F, const(0.5))), 0.4999, 2.0001),
        (op("truediv", const(1.0), F), -math.inf, math.inf),
        (op("mul", op("exp2", op("mul", F, const(1e9))), const(2.0)), 0.0, math.inf),
        (op("exp", op("mul", F, const(-1e4))), 0.0, math.inf),
        (op("rsqrt", op("abs", F)), 0.7, math.inf),
        (op("rsqrt", op("max", F, const(0.0))), -math.inf, math.inf),  # of -0.0, too
        (op("round", F), -2.0, 2.0),
        (op("trunc", F), -1.0, 2.0),
        (op("erf", F), -0.9662, 0.9954),
        (op("expm1", F), -0.7769, 6.3891),
        (op("log1p", op("abs", F)), 0.0, 1.0987),
        (op("log1p", F), -math.inf, math.inf),
        (op("atan2", F, const(1.0)), -0.9828, 1.1072),
        (op("atan2", const(1.0), F), -3.1416, 3.1416),
        (op("pow", op("add", op("abs", F), const(0.5)), F), 0.2499, 6.2506),
        (op("pow", op("abs", F), F), 0.0, math.inf),
        (op("pow", F, op("abs", F)), -math.inf, math.inf),
    ],
    ids=lambda value: canonical(value) if isinstance(value, Op) else "",
)
def test_floats_allow_for_rounding(expr: Expr, low: float, high: float) -> None:
    lo, hi = bounds(expr, RANGES)
    assert low <= lo
    assert hi <= high
    for f in np.linspace(-1.5, 2.0, 29, dtype=np.float32):
        if (value := _float32(expr, f)) == value:
            assert lo <= value <= hi


def _float32(expr: Expr, f: np.float32) -> np.float32:
    functions = {"truediv": np.divide, "rsqrt": lambda x: 1 / np.sqrt(x), "max": np.maximum, "abs": np.abs}
    functions |= {"pow": np.power, "atan2": np.arctan2, "erf": math.erf}
    if isinstance(expr, Const):
        return np.float32(expr.value)
    if not isinstance(expr, Op):
        return f
    with np.errstate(all="ignore"):
        function = functions.get(expr.op) or FOLD.get(expr.op) or getattr(np, expr.op)
        return np.float32(function(*(_float32(a, f) for a in expr.args)))


@seeds(150, always=8)
def test_numbers_hold_at_random_points(seed: int) -> None:
    source = random.Random(seed)
    expr, world = Masks(source).number(4), World.random(source)
    lo, hi = bounds(expr, FACTS)
    env = dict(world.env, h=1)
    if not env["seqlen_q"] or not env["seqlen_k"]:
        return
    for _ in range(20):
        q, kv = source.randrange(int(env["seqlen_q"])), source.randrange(int(env["seqlen_k"]))
        env |= {"q": q, "kv": kv, "q_pos": q + env["seqlen_k"] - env["seqlen_q"]}
        env |= {"q_global": q + env[Q_START.name], "kv_global": kv + env[KV_START.name]}
        assert lo <= _exact(expr, env, world) <= hi


def _exact(expr: Expr, env: bruteforce.Env, world: World) -> float:
    """Evaluate without a check for overflow; a load outside its tensor gives a value that it may hold."""
    if not isinstance(expr, Op):
        return bruteforce.evaluate(expr, env, world.arrays)
    args = [_exact(a, env, world) for a in expr.args]
    return args[0] if expr.op in ("floordiv", "mod") and args[1] == 0 else FOLD[expr.op](*args)


# --- tiles ------------------------------------------------------------------------------------------------


@seeds(120, always=12)
def test_no_wrong_empty_and_no_wrong_full(seed: int) -> None:
    source = random.Random(seed)
    mask = Masks(source).mask(seed % 4)
    for _ in range(2):
        try:
            check_classify(mask, World.random(source), source)
        except UnguardedError:
            continue


def test_most_tiles_of_the_usual_masks_are_decided() -> None:
    decided = np.zeros(2, int)
    for seed in range(20):
        source = random.Random(seed)
        window = op("and", op("ge", var("q_pos"), var("kv")), op("lt", op("sub", var("q_pos"), var("kv")), const(4)))
        decided += check_classify(window, World.random(source), source)
    assert decided[0] > 400
    assert decided[1] > 100


@pytest.mark.parametrize(
    ("mask", "may", "must"),
    [
        ("q_pos >= kv", "q_pos_hi >= kv_lo", "q_pos_lo >= kv_hi"),
        ("kv < seqlen_k", "True", "True"),
        ("kv < size[b]", "kv_lo < size[b]", "kv_hi < size[b]"),
        ("pad[b, kv]", "True", "False"),
        ("gain > 0.5 or q == kv", "gain > 0.5 or q_lo <= kv_hi and q_hi >= kv_lo",
         "gain > 0.5 or q_hi <= kv_lo and q_lo >= kv_hi"),
        ("gain * 2 > 0.5", "True", "False"),
        ("not bias[q] < gain", "True", "False"),
        ("kv / 2 < q", "True", "False"),
    ],
)  # fmt: skip
def test_classify_reads_as_written_by_hand(mask: str, may: str, must: str) -> None:
    scalars = (Scalar("gain", "fp32"),)
    tensors = (Tensor("size", "int32", ("b",)), Tensor("pad", "bool", ("b", "seqlen_k")), Tensor("bias", "fp32", (9,)))
    variant = compile_variant("test", mask, None, scalars, tensors)
    conditions = classify(variant.mask, Facts.of(variant))
    assert tuple(canonical(e) for e in conditions) == (may, must)


def test_nan_decides_nothing() -> None:
    """With NaN, ``gain < x`` and ``gain >= x`` both fail, so neither may stand for the negation of the other."""
    less = op("lt", op("select", op("gt", var("q"), var("kv")), var("gain"), const(1.0)), const(4.0))
    for mask in (less, op("not", less)):
        may, must = classify(mask, FACTS)
        assert (canonical(may), canonical(must)) == ("True", "False")


@pytest.mark.parametrize(
    ("mask", "may", "must"),
    [
        ("int(float(kv)) < 9", "int(float(kv_lo)) < 9", "int(float(kv_hi)) < 9"),
        ("int(round(min(float(kv), 99.0))) >= 9", "int(round(min(kv_hi, 99.0))) >= 9",
         "int(round(min(kv_lo, 99.0))) >= 9"),
        ("int(log(kv + 1.0)) < 30", "True", "True"),  # by numbers: log may be rounded another way elsewhere
        ("int(log(kv + 1.0)) < 3", "True", "False"),
        ("int(bias[kv]) < 9", "True", "False"),
    ],
)  # fmt: skip
def test_floats_that_become_integers_are_classified(mask: str, may: str, must: str) -> None:
    variant = compile_variant("test", mask, None, (), (Tensor("bias", "fp32", ("seqlen_k",)),))
    assert tuple(canonical(e) for e in classify(variant.mask, Facts.of(variant))) == (may, must)


def test_packed_heads_are_an_interval() -> None:
    mask = op("lt", var("h"), var("kv"))
    assert [canonical(e) for e in classify(mask, Facts(), "packed")] == ["h_lo < kv_hi", "h_hi < kv_lo"]
    assert [canonical(e) for e in classify(mask, Facts())] == ["h < kv_hi", "h < kv_lo"]


# --- overflow ---------------------------------------------------------------------------------------------


def test_wide_marks_exactly_what_may_leave_int32() -> None:
    wide = widen(make("sub", make("add", var("shift"), var("kv")), var("kv_lo")), FACTS)
    assert wide is not None
    assert [n.wide for n in walk(wide) if isinstance(n, Op)] == [True, True]
    narrow = widen(op("sub", var("q_pos"), var("kv")), FACTS)
    assert isinstance(narrow, Op)
    assert not narrow.wide
    assert widen(op("add", var("big"), const(1)), FACTS) is None
    assert widen(const(2**70), FACTS) is None


@few("window", [1, 7, 2**30 - 2, 2**30, 2**31 - 1], always=range(0, 999, 3))
@pytest.mark.parametrize("lengths", [(1, 1), (1, MAX_SEQLEN), (MAX_SEQLEN, 1), (MAX_SEQLEN, MAX_SEQLEN)])
@pytest.mark.parametrize("sign", ["add", "sub"])
def test_saturated_ends_are_the_same_within_the_sequence(window: int, lengths: tuple[int, int], sign: str) -> None:
    q, k = lengths
    end = make(sign, var("q_pos_lo"), var("window"))
    clamped = widen(saturate(end, var("seqlen_k"), FACTS), FACTS)
    assert clamped is not None
    assert not any(n.wide for n in walk(clamped) if isinstance(n, Op))
    for row in (0, q // 2, q - 1):
        env = {"q_pos_lo": row + k - q, "window": window, "seqlen_k": k}
        exact = FOLD[sign](env["q_pos_lo"], window)
        value = bruteforce.evaluate(clamped, env, {})
        assert value in INT32
        assert min(max(value, 0), k) == min(max(exact, 0), k)


def test_int64_that_wraps_around_is_left_alone() -> None:
    """Seen: ``kv <= big - kv`` became ``kv <= big // 2``, which fails for big = -2**63."""
    mask = op("le", var("kv"), op("sub", var("big"), var("kv")))
    assert [canonical(e) for e in classify(mask, FACTS)] == ["True", "False"]
    world = World.random(random.Random(1))
    world.env["big"] = -(2**63)
    assert mask_of(mask, world.env, world.arrays, 1).size >= 0


def test_loads_read_inside_the_tensor() -> None:
    """``q_pos`` is negative where there are more queries than keys."""
    mask = op("ge", load("doc", var("b"), var("q_pos")), load("doc", var("b"), var("kv")))
    may, must = classify(mask, FACTS)
    assert canonical(may) == "doc[b, max(q_pos_hi, 0)] >= doc[b, kv_lo]"
    assert canonical(must) == "doc[b, max(q_pos_lo, 0)] >= doc[b, kv_hi]"
