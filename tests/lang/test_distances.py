"""Parts of a score that depend on the distance of a query and a key alone; they have the same value as such."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from attngen.lang.distances import DISTANCE, POS_DISTANCE, by_distance, is_slight
from attngen.lang.ir import Expr, Type, Var, rewrite
from attngen.lang.printing import canonical
from attngen.lang.variant import Variant
from attngen.plan.traits import distance_values_of_score, without_distance_values
from tests.plan.specs import planned

TENSORS = "table: {dtype: fp32, shape: [h, 64]}, far: {dtype: int64, shape: [64]}, f: {dtype: fp32, shape: [seqlen_k]}"
NAMED = {DISTANCE: Var("by_rows", Type.INT), POS_DISTANCE: Var("by_positions", Type.INT)}


def scored(score: str) -> Variant:
    declared = f"variants:\n  own: {{score: '{score}', tensors: {{{TENSORS}}}, scalars: {{w: {{type: int32}}}}}}\n"
    return planned("own", declared=declared, backend="cuda", arch="sm90a").variant


def parts(score: str) -> tuple[Expr, ...]:
    return distance_values_of_score(scored(score), fast_math=True)


class Table:
    """A tensor, as the text of an expression indexes it."""

    def __getitem__(self, index: Any) -> float:
        return math.sin(hash(index) % 1009)


def value(expr: Expr, **names: Any) -> float:
    def select(condition: bool, a: float, b: float) -> float:
        return a if condition else b

    functions = {"log": lambda x: math.log(abs(x) + 1), "cos": math.cos, "select": select}
    names |= {**functions, "LOG2E": math.log2(math.e)}
    result: float = eval(canonical(rewrite(expr, NAMED.get)), names)
    return result


@pytest.mark.parametrize(
    "score",
    [
        "s + table[h, clamp(kv - q, -w, w) + w]",
        "s + table[h, (q - kv if q - kv < 8 else 8 + int(log(abs(q_pos - kv)))) + (16 if kv > q else 0)]",
        "s - 0.5 * cos((q_pos - kv) / 7.0)",
        "s * cos(2 * (q - kv) + 3 * w) + 1.0",
        "s - 0.25 * abs(kv - q)",
        "s - cos(1.0 * (q_pos - 2 - kv))",
    ],
)
def test_parts_have_the_same_value_by_distance(score: str) -> None:
    (part,) = parts(score)
    for _ in range(50):
        q, kv, ahead = random.randrange(900), random.randrange(900), random.randrange(40)
        names = {"h": 3, "w": 5, "table": Table()}
        distances = {"by_rows": q - kv, "by_positions": q + ahead - kv}
        apart = value(by_distance(part), **names, **distances)
        assert apart == pytest.approx(value(part, q=q, kv=kv, q_pos=q + ahead, **names), abs=1e-5)


@pytest.mark.parametrize(
    "score",
    [
        "s + 0.5 * (kv - q)",  # a multiply-add of a value of the key
        "s + f[kv] - table[h, q % 64]",
        "s + table[h, (q - kv) * 2 // (kv + 1)]",
        "s + table[h, clamp(2 * q - kv, 0, 63)]",
        "s * cos(s + (q - kv))",
        "s + table[h, far[clamp(q - kv, 0, 63)]]",  # an index of 64 bits
    ],
)
def test_others_do_not(score: str) -> None:
    assert not parts(score)


def test_a_magnitude_alone_is_slight() -> None:
    assert is_slight(parts("s - 0.25 * abs(kv - q)")[0])
    assert not is_slight(parts("s - 0.25 * log(1.0 + abs(kv - q))")[0])
    assert not is_slight(parts("s + table[h, min(abs(kv - q), 63)]")[0])


def test_what_is_left_loads_nothing() -> None:
    own = scored("s + table[h, clamp(q - kv, 0, 63)] - cos(0.5 * abs(q_pos - kv))")
    assert len(distance_values_of_score(own, fast_math=True)) == 2
    left = without_distance_values(own, fast_math=True)
    assert left.score is not None
    assert "table" not in canonical(left.score)
    assert "cos" not in canonical(left.score)
