"""Evaluators that share nothing: eager torch and the emitted Triton against a walk in plain Python."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attngen.errors import SpecError
from attngen.lang.check import compile_variant
from attngen.lang.eager import evaluate
from attngen.lang.ir import Expr, Op, Type
from attngen.lang.printing import canonical
from tests.lang import harness, randoms
from tests.lang.phrases import LET, Phrases
from tests.lang.randoms import BATCH, HEADS, SEQLEN_K, SEQLEN_Q
from tests.lang.walker import Walker

SHAPE = (BATCH, HEADS, SEQLEN_Q, SEQLEN_K)
KINDS = ("bool", "int", "float")


@dataclass(frozen=True)
class Subject:
    """An expression as text and as checked."""

    seed: int
    kind: str
    text: str
    expr: Expr


def compiled(text: str, kind: str) -> Expr | None:
    """Return the checked expression; None where integers outgrow int64, or nothing but ``s`` is left."""
    declared: tuple[Any, ...] = (randoms.SCALARS, randoms.TENSORS, LET)
    try:
        if kind == "bool":
            return compile_variant("random", text, None, *declared).mask
        score = compile_variant("random", None, text, *declared).score
    except SpecError as error:
        if "beyond int64" not in error.message:
            raise
        return None
    if kind == "float":
        return score
    # an integer score is converted to float; its argument is the integer
    return score.args[0] if isinstance(score, Op) and score.op == "to_float" else None


def subject(seed: int, kind: str, *, exact: bool) -> Subject:
    phrases = Phrases(seed, exact=exact, logit=kind != "bool")
    while True:
        text = phrases.write(kind, phrases.chance.choice((1, 2, 3, 4)))
        expr = compiled(text, kind)
        if expr is not None:
            return Subject(seed, kind, text, expr)


def subjects(seeds: range, *, exact: bool) -> list[Subject]:
    return [subject(seed, KINDS[seed % 3], exact=exact) for seed in seeds]


@cache
def kinds() -> dict[str, str]:
    """Kind of value of each name, by the words of docs/language.md."""
    dtypes = {s.name: s.dtype for s in randoms.SCALARS} | {t.name: t.dtype for t in randoms.TENSORS}
    of_dtype = {"bool": "bool", "fp32": "float", "fp16": "float", "bf16": "float"}
    return dict.fromkeys(randoms.indices(), "int") | {"s": "float"} | {
        name: of_dtype.get(dtype, "int") for name, dtype in dtypes.items()
    }  # fmt: skip


def walkers(seed: int, count: int, real: type[np.floating[Any]]) -> Iterator[tuple[tuple[int, ...], Walker]]:
    """Yield some places of the grid, with a walker there, on the data of a seed."""
    chance = random.Random(seed)
    tensors = {name: (t.double() if t.is_floating_point() else t).numpy() for name, t in randoms.tensors(seed).items()}
    scalars = randoms.scalars(seed) | {s.name: s.const for s in randoms.SCALARS if s.const is not None}
    indices = {n: torch.as_tensor(v).broadcast_to(SHAPE) for n, v in randoms.indices().items()}
    logits = randoms.logits(seed)
    for _ in range(count):
        place = tuple(chance.randrange(extent) for extent in SHAPE)
        names = {name: value[place].item() for name, value in indices.items()} | scalars
        yield place, Walker(names | {"s": logits[place].item()}, tensors, LET, kinds(), real)


def eager(one: Subject, dtype: torch.dtype) -> torch.Tensor:
    names = {**randoms.indices(), **randoms.scalars(one.seed), "s": randoms.logits(one.seed)}
    return evaluate(one.expr, names, randoms.tensors(one.seed), dtype).broadcast_to(SHAPE)


def disagreements(
    one: Subject, computed: torch.Tensor, real: type[np.floating[Any]], count: int, within: float
) -> list[str]:
    """Points where values differ from the walker's by more than ``within``, relatively; exactly equal with 0."""
    wrong = []
    for place, walker in walkers(one.seed, count, real):
        wanted, value = walker.evaluate(one.text), computed[place].item()
        if one.kind == "float":
            same = bool(np.isclose(value, float(wanted), rtol=within, atol=within, equal_nan=True))
        else:
            same = int(value) == int(wanted)
        if not same:
            wrong.append(f"seed {one.seed}: {one.text}: {value} at {place}, not {wanted}")
    return wrong[:1]


def agree_with_eager(seeds: range, points: int) -> None:
    """float32 step by step where both round alike, and float64 for everything."""
    wrong = []
    for one in subjects(seeds, exact=True):
        wrong += disagreements(one, eager(one, torch.float32), np.float32, points, 0.0)
    for one in subjects(seeds, exact=False):
        wrong += disagreements(one, eager(one, torch.float64), np.float64, points, 1e-9)
    assert wrong == []


def agree_with_triton(seeds: range, points: int, folder: Path) -> None:
    """Integers exactly; floats where float32 and float64 do not differ already."""
    chosen = subjects(seeds, exact=False)
    renumbered = [Subject(i, one.kind, one.text, one.expr) for i, one in enumerate(chosen)]  # the harness's data
    wrong = []
    for one, computed in zip(renumbered, harness.run_triton([one.expr for one in chosen], folder), strict=True):
        stable = torch.isclose(
            eager(one, torch.float32).double(), eager(one, torch.float64).double(), rtol=1e-3, atol=1e-3, equal_nan=True
        )
        lines = disagreements(one, computed, np.float64, points, 4e-3)
        wrong += lines if bool(stable.all()) else []
    assert wrong == []


def test_eager_agrees_with_plain_python() -> None:
    agree_with_eager(range(20), 12)


@pytest.mark.exhaustive
def test_triton_agrees_with_plain_python(tmp_path: Path) -> None:
    agree_with_triton(range(5000, 5024), 40, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("first", "last"),
    [
        (10_000, 10_200),
        *(pytest.param(n, n + 2_000, marks=pytest.mark.long) for n in range(10_200, 30_000, 2_000)),
    ],
)
def test_eager_agrees_with_plain_python_on_many(first: int, last: int) -> None:
    agree_with_eager(range(first, last), 12)


@pytest.mark.exhaustive
@pytest.mark.long
def test_triton_agrees_with_plain_python_on_many(tmp_path: Path) -> None:
    for first in range(30_000, 33_000, 100):
        agree_with_triton(range(first, first + 100), 30, tmp_path)


def test_an_index_out_of_extent_is_one_for_both() -> None:
    """Guards are asked first, by both; without one, both refuse."""
    for text, raises in {
        "doc[b, kv + 1]": True,
        "doc[b, kv + 1] if kv + 1 < seqlen_k else 0": False,
        "int(kv > 0 and doc[b, kv - 1] == 3)": False,
        "int(kv == 0 or doc[b, kv - 1] == 3)": False,
        "int(doc[b, kv - 1] == 3 or kv == 0)": True,
        "tiny[h, q]": True,
    }.items():
        expr = compiled(text, "int")
        assert expr is not None
        one = Subject(1, "int", text, expr)
        if not raises:
            assert disagreements(one, eager(one, torch.float32), np.float32, 500, 0.0) == []
            continue
        with pytest.raises(IndexError):
            eager(one, torch.float32)
        with pytest.raises(IndexError):
            disagreements(one, torch.zeros(SHAPE), np.float32, 5000, 0.0)


def test_nan_passes_where_the_language_says() -> None:
    nan = "(inf - inf)"
    for text, wanted in {
        f"min({nan}, 1.0)": float("nan"),
        f"max(1.0, {nan})": float("nan"),
        f"clamp({nan}, 0.0, 1.0)": float("nan"),
        f"float({nan} == {nan})": 0.0,
        f"float({nan} != {nan})": 1.0,
        f"float(not {nan} < 1.0)": 1.0,
        f"1.0 if {nan} >= 0.0 else 2.0": 2.0,
        "sqrt(-1.0 - abs(s))": float("nan"),
        "-inf if s < 100.0 else s": -float("inf"),
    }.items():
        (_, walker), *_ = walkers(0, 1, np.float32)
        assert str(float(walker.evaluate(text))) == str(wanted)
        expr = compiled(f"{text} + 0.0 * s", "float")
        assert expr is not None
        one = Subject(0, "float", f"{text} + 0.0 * s", expr)
        assert disagreements(one, eager(one, torch.float32), np.float32, 20, 0.0) == []


def test_a_planted_fault_is_found() -> None:
    """The comparison is not blind: a wrong operator, anywhere, is seen by one of a few seeds."""
    for right, wrong in (
        ("kv // -4", "-(kv // 4)"),
        ("kv % -4", "kv % 4"),
        ("kv <= q", "kv < q"),
        ("q >> 1", "q // 3"),
    ):
        kind = "bool" if "<" in right else "int"
        expr = compiled(wrong, kind)
        assert expr is not None
        assert canonical(expr) != right
        one = Subject(2, kind, right, expr)
        assert expr.type in (Type.BOOL, Type.INT)
        assert disagreements(one, eager(one, torch.float32), np.float32, 300, 0.0) != []
