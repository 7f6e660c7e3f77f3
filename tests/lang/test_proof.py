"""A proved order of two expressions holds for every box and every run-time value."""

from __future__ import annotations

import random

import pytest

from attngen.lang import proof
from attngen.lang.bands import bands
from attngen.lang.check import compile_variant
from attngen.lang.facts import Facts
from attngen.lang.ir import Expr, Load, Op, Search, Type, Var, rewrite
from attngen.lang.proof import Proof
from attngen.lang.simplify import (
    Linear,
    add,
    ceildiv,
    floordiv,
    integer,
    maximum,
    minimum,
    mul,
    neg,
    select,
    simplify,
    sub,
)  # fmt: skip
from attngen.lang.variant import Scalar
from tests.lang.bruteforce import FACTS, World, const, evaluate, load, op, var
from tests.sampling import few

PROOF = Proof(FACTS.of_tiles())
q_pos_lo, q_pos_hi, kv_hi, window, step = (var(n) for n in ("q_pos_lo", "q_pos_hi", "kv_hi", "window", "step"))
FLAG = Var("flag", Type.BOOL)


def doc(position: Expr) -> Load:
    return load("doc", var("b"), position)


def first(value: Expr, strict: bool) -> Search:
    return Search("doc", 1, (var("b"), integer(0)), value, strict, var("seqlen_k"))


@pytest.mark.parametrize(
    ("x", "y"),
    [
        (q_pos_lo, q_pos_hi),
        (sub(q_pos_lo, window), q_pos_hi),
        (add(kv_hi, integer(1)), var("seqlen_k")),
        (floordiv(add(q_pos_lo, integer(1)), integer(128)), ceildiv(add(q_pos_hi, integer(1)), integer(128))),
        (mul(floordiv(q_pos_lo, step), step), q_pos_lo),
        (add(q_pos_lo, integer(1)), add(mul(floordiv(q_pos_hi, step), step), step)),
        (mul(floordiv(q_pos_lo, step), step), mul(floordiv(q_pos_hi, step), step)),
        (minimum(q_pos_lo, window), maximum(q_pos_hi, kv_hi)),
        (select(FLAG, q_pos_lo, integer(0)), maximum(q_pos_hi, integer(0))),
        (first(doc(maximum(q_pos_lo, integer(0))), False), first(doc(maximum(q_pos_hi, integer(0))), True)),
        (add(q_pos_hi, integer(1)), first(doc(maximum(q_pos_hi, integer(0))), True)),
        (first(doc(maximum(q_pos_hi, integer(0))), False), maximum(q_pos_hi, integer(0))),
    ],
)
def test_proofs_that_spare_a_minimum(x: Expr, y: Expr) -> None:
    assert PROOF.at_most(x, y)
    assert not PROOF.at_most(add(y, integer(1)), x)


def test_a_sequence_may_have_no_key() -> None:
    assert not PROOF.at_most(integer(1), var("seqlen_k"))
    assert not PROOF.at_most(integer(0), q_pos_hi)


_CORNERS = ("q_lo", "q_hi", "q_pos_lo", "q_pos_hi", "kv_lo", "kv_hi", "seqlen_q", "seqlen_k", "window", "step")


def _expr(source: random.Random, depth: int) -> Expr:
    if depth == 0:
        return source.choice([const(source.randrange(-3, 9)), *[var(source.choice(_CORNERS)) for _ in range(5)]])
    a, b = _expr(source, depth - 1), _expr(source, depth - 1)
    divisor = source.choice([const(2), const(3), const(8), var("step")])
    match source.randrange(10):
        case 0 | 1:
            return op(source.choice(["min", "max"]), a, b)
        case 2:
            return op("floordiv", a, divisor)
        case 3:
            return op("mul", op("floordiv", a, divisor), divisor)
        case 4:
            return op("select", FLAG, a, b)
        case 5:
            return op("mul", a, const(source.choice([-2, -1, 2, 3])))
        case 6:
            return first(doc(op("max", a, const(0))), source.random() < 0.5)
        case 7:
            return op("mod", a, divisor)
    return op(source.choice(["add", "sub"]), a, b)


def _similar(source: random.Random, expr: Expr) -> Expr:
    """Return an expression that is often greater, often by little."""

    def rule(node: Expr) -> Expr | None:
        match node:
            case Var(name=name) if name.endswith("_lo") and source.random() < 0.7:
                return var(name.replace("_lo", "_hi"))
            case Op(op="min") if source.random() < 0.3:
                return source.choice(node.args)
            case Search() if source.random() < 0.5:
                return first(node.value, True)
        return None

    return add(rewrite(expr, rule), integer(source.randrange(-1, 4)))


@few("seed", range(40), always=6)
def test_proved_orders_hold(seed: int) -> None:
    source = random.Random(seed)
    worlds = [World.random(source) for _ in range(12)]
    proof_of_seed = Proof(FACTS.of_tiles())  # steps of all proofs are limited
    for _ in range(40):
        x = simplify(_expr(source, source.randrange(1, 4)))
        y = simplify(_similar(source, x)) if source.random() < 0.8 else simplify(_expr(source, 2))
        if source.random() < 0.2:
            x, y = neg(y), neg(x)
        if not proof_of_seed.at_most(x, y):
            continue
        for world in worlds:
            boxes = list(world.boxes("q", "seqlen_q", source))
            keys = list(world.boxes("kv", "seqlen_k", source)) or [None]
            if not boxes or ("kv_" in repr((x, y)) and keys == [None]):
                continue
            env = world.corners(source.choice(boxes), source.choice(keys))
            assert _value(x, env, world) <= _value(y, env, world), (x, y)


def _value(expr: Expr, env: dict, world: World) -> float:
    wide = rewrite(expr, lambda n: Op(n.op, n.args, n.type, True) if isinstance(n, Op) else None)
    return evaluate(wide, env, world.arrays)


@pytest.mark.exhaustive
def test_a_mask_of_many_comparisons_takes_no_more_steps_than_all_may(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = 0
    step = Proof._nonnegative

    def counted(self: Proof, total: Linear, depth: int) -> bool:
        nonlocal taken
        taken += 1
        return step(self, total, depth)

    monkeypatch.setattr(Proof, "_nonnegative", counted)
    terms = [f"(q_pos - kv < w * {i} and kv // w != q // w + {i} and kv < x - {i})" for i in range(1, 30)]
    variant = compile_variant("v", " or ".join(terms), scalars=[Scalar("w", "int32", min=1), Scalar("x", "int32")])
    intervals = bands(variant.mask, Facts.of(variant))
    assert intervals.visible
    assert proof._STEPS_OF_ALL <= taken < 1.5 * proof._STEPS_OF_ALL
