"""Backwards in CUDA, whose warps and blocks wait for each other: many shapes in any order, and under the sanitizer."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from attngen.inspect.cases import Case
from tests.gpu.family import bits
from tests.gpu.gradient_runs import gradient_run
from tests.gpu.sanitized_gradients import KERNELS, kernels
from tests.gpu.test_memory import sanitize

ROUNDS = 4
#: Without the derivative that is infinite where the product of a query and a key is 0, as some of millions are.
STRESSED = [name for name in KERNELS if not name.startswith("head_gain")]


def case(chance: random.Random, name: str) -> Case:
    """Return random lengths: short and long, even and uneven, none at all, and keys that are not used."""
    batch, kv_heads = chance.choice([1, 2, 5]), chance.choice([1, 2])

    def lengths() -> tuple[int, ...]:
        drawn = [chance.choice([0, 1, 64, 127, chance.randrange(500), chance.randrange(1200)]) for _ in range(batch)]
        drawn[0] = drawn[0] or 1  # without any row no kernel is launched
        return tuple(drawn) if "varlen" in name else (max(drawn),) * batch

    keys = lengths()
    used = tuple(chance.randint(0, n) for n in keys) if chance.random() < 0.5 else None
    return Case("stress", lengths(), keys, heads=kv_heads * chance.choice([1, 3]), kv_heads=kv_heads, used=used)


def stress(shapes: int, seed: int) -> int:
    """Launch kernels in random order, each shape several times; return how many launches there were."""
    chance = random.Random(seed)
    launches = 0
    for _ in range(shapes):
        names = chance.sample(STRESSED, 4)
        runs = [gradient_run(kernels()[name], case(chance, name), chance.randrange(2**31)) for name in names]
        first: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        for index in chance.sample([n for n in range(len(runs)) for _ in range(ROUNDS)], ROUNDS * len(runs)):
            gradients = runs[index]()
            launches += 1
            for name, before, now in zip(
                ("dq", "dk", "dv"), first.setdefault(index, gradients), gradients, strict=True
            ):
                assert not now.isnan().any(), names[index]
                if name == "dq" and not kernels()[names[index]].ordered:  # added up in any order
                    torch.testing.assert_close(now, before, rtol=0, atol=4e-3 * (1e-6 + float(before.abs().max())))
                else:
                    assert torch.equal(bits(before), bits(now)), names[index]
    return launches


def test_a_thousand_launches_of_random_shapes() -> None:
    assert stress(shapes=64, seed=1) >= 1000


@pytest.mark.exhaustive
def test_ten_thousand_launches_of_random_shapes() -> None:
    assert stress(shapes=625, seed=2) >= 10_000


@pytest.mark.parametrize("tool", ["memcheck", "synccheck"])
def test_the_sanitizer_reports_nothing(tool: str) -> None:
    """racecheck follows barriers thread by thread, as ``tests.gpu.sanitized`` says."""
    kernels()  # compiled before, so that the sanitizer sees no compiler
    sanitize(tool, program="tests.gpu.sanitized_gradients", count=len(KERNELS), kernels=("bwd_",))
