"""Masks and scores that are the same everywhere, forward in both languages and backward, on every case."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

from attngen.build.pipeline import Prepared, plans
from attngen.lab.verify.gpu import try_pinned
from attngen.schema import load_spec
from tests.gpu.family import Kernels, label, rare, rendered, some_of

SPEC = Path(__file__).with_name("constants.yaml")
_PLANNED = {f"{plan.direction} {label(plan)}": (spec, plan) for spec, plan in plans(load_spec(SPEC))}
#: Near-duplicates, which only ``-m exhaustive`` compiles and runs.
LEFT_OUT = rare({name: plan for name, (_, plan) in _PLANNED.items()})


def to_build() -> list[Prepared]:
    return list(rendered(some_of(_PLANNED, LEFT_OUT)).values())


@cache
def kernels() -> Kernels:
    return Kernels(rendered(some_of(_PLANNED, LEFT_OUT)))


@pytest.mark.parametrize("name", [name for name in _PLANNED if name.startswith("forward")])
def test_forwards_of_constants(name: str) -> None:
    kernel = kernels()[name]

    assert try_pinned(kernel, torch.device("cuda"), 40_000, small=False).problems == ()


@pytest.mark.parametrize("name", [name for name in _PLANNED if name.startswith("backward")])
def test_backwards_of_constants(name: str) -> None:
    kernel = kernels()[name]

    assert try_pinned(kernel, torch.device("cuda"), 40_000, small=False).problems == ()
