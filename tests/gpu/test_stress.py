"""Many launches of many shapes on kernels whose warps wait for each other: none hangs, and the same inputs give the
same bits, whatever ran before."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from attngen.inspect.cases import Case
from tests.gpu.family import Run, bits, compiled_labels

#: Every choice of roles, skipping, iteration and layout has a kernel here.
KERNELS = [name for name in compiled_labels() if name.endswith(("-wgmma", "-pack"))]
ROUNDS = 4


def case(chance: random.Random, name: str) -> Case:
    """Return random lengths: short and long, even and uneven, none at all."""
    batch, kv_heads = chance.choice([1, 2, 5]), chance.choice([1, 2])
    heads = kv_heads * chance.choice([1, 4, 8] if name.endswith("-pack") else [1, 3, 8])

    def lengths() -> tuple[int, ...]:
        drawn = [chance.choice([0, 1, 64, 127, chance.randrange(700), chance.randrange(1500)]) for _ in range(batch)]
        drawn[0] = drawn[0] or 1  # without any row no kernel is launched
        return tuple(drawn) if "varlen" in name else (max(drawn),) * batch

    return Case("stress", lengths(), lengths(), heads=heads, kv_heads=kv_heads)


def stress(shapes: int, seed: int) -> int:
    """Launch kernels in random order, each shape several times; return how many launches there were."""
    chance = random.Random(seed)
    launches = 0
    for _ in range(shapes):
        runs = []
        for name in chance.sample(KERNELS, 4):
            runs.append(Run.of(name, case(chance, name), seed=chance.randrange(2**31)))
        first: dict[int, list[Tensor]] = {}
        for index in chance.sample([n for n in range(len(runs)) for _ in range(ROUNDS)], ROUNDS * len(runs)):
            results = [bits(tensor) for tensor in runs[index].results()]
            launches += 1
            for before, now in zip(first.setdefault(index, results), results, strict=True):
                assert torch.equal(before, now), runs[index].kernel.name
    torch.cuda.synchronize()
    return launches


def test_a_thousand_launches_of_random_shapes() -> None:
    assert stress(shapes=64, seed=1) >= 1000


@pytest.mark.exhaustive
def test_ten_thousand_launches_of_random_shapes() -> None:
    assert stress(shapes=625, seed=2) >= 10_000
