"""Fuzzed specs become kernels that compute what the float64 reference computes.

A few of the sample are interpreted here, and a few compiled; ``tests/gpu/test_fuzzed.py`` compiles and runs all.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from attngen.build.pipeline import Prepared, compile_kernels
from attngen.lab.verify.interpreted import try_interpreted
from attngen.store.store import Store
from tests.fuzz.specs import SEEDS, backward_of, interpretable, prepared, regressions

INTERPRETED, COMPILED, BACKWARDS = (17,), (85,), (13,)


def problems(kernels: Sequence[Prepared]) -> dict[str, tuple[str, ...]]:
    """Problems of kernels in the interpreter, by their names."""
    verdicts = list(try_interpreted(kernels, 0, None, lambda name, total: None))
    assert [verdict.plan.name for verdict in verdicts if verdict.status == "not run"] == []
    return {verdict.plan.name: verdict.problems for verdict in verdicts if verdict.status == "failed"}


def test_the_same_seed_gives_the_same_kernel() -> None:
    assert prepared(3) == prepared(3)
    assert prepared(3).source != prepared(4).source


@pytest.mark.exhaustive
def test_a_few_keep_their_contract() -> None:
    assert problems([*map(interpretable, INTERPRETED), *regressions()]) == {}


@pytest.mark.exhaustive
@pytest.mark.long
def test_many_keep_their_contract() -> None:
    assert problems([interpretable(seed) for seed in SEEDS[::3]]) == {}
    assert problems([backward_of(interpretable(seed)) for seed in SEEDS[1::6]]) == {}


@pytest.mark.exhaustive
def test_a_few_backwards_keep_their_contract() -> None:
    assert problems([backward_of(interpretable(seed)) for seed in BACKWARDS]) == {}


@pytest.mark.exhaustive
def test_a_few_compile(tmp_path: Path) -> None:
    check_compile([*map(prepared, COMPILED)], tmp_path)


@pytest.mark.exhaustive
def test_regressions_compile(tmp_path: Path) -> None:
    check_compile(regressions(), tmp_path)


def check_compile(kernels: Sequence[Prepared], folder: Path) -> None:
    compiled, failures = compile_kernels(kernels, store=Store(folder))
    assert [str(failure.error) for failure in failures] == []
    assert len(compiled) == len(kernels)
