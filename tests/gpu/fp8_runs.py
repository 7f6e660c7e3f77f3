"""The kernels in 8 bits that the GPU tests run, built once, and runs of them on random inputs."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

from torch import Tensor

from attngen.build.pipeline import Prepared, plans
from attngen.inspect.cases import Case
from attngen.lab.verify.inputs import make_inputs
from attngen.lab.verify.poison import poisoned
from attngen.lab.verify.trial import element_of
from attngen.operations import QUANTIZE
from attngen.runtime.launch.pinned import Pinned
from attngen.schema import load_spec
from tests.gpu.family import Kernels, rendered

_PLANNED = {
    plan.name: (spec, plan)
    for spec, plan in plans(load_spec(Path(__file__).with_name("fp8.yaml")))
    if plan.direction != QUANTIZE
}
NAMES = list(_PLANNED)


def to_build() -> list[Prepared]:
    return list(rendered(_PLANNED).values())


@cache
def kernels() -> Kernels:
    """Return all kernels by their names in the plan."""
    return Kernels(rendered(_PLANNED))


def a_run(name: str, case: Case, seed: int) -> Callable[[], tuple[Tensor, Tensor]]:
    """Function that launches a kernel on random inputs, into fresh poisoned memory, and returns what it wrote."""
    kernel = kernels()[name]
    inputs = make_inputs(kernel.variant, case, kernel.layout, element_of(kernel), "cuda", seed)
    call = inputs.bind(kernel.variant)

    def launched() -> tuple[Tensor, Tensor]:
        memory = poisoned(kernel, call, inputs.q, inputs.k, inputs.v)
        Pinned(kernel, call, memory.buffers)()
        assert memory.overrun() == ()
        assert memory.buffers.lse is not None
        return memory.buffers.out, memory.buffers.lse

    return launched


def a_case(chance: random.Random, name: str) -> Case:
    """Return random lengths: short and long, even and uneven, none at all."""
    batch, kv_heads = chance.choice([1, 2, 5]), chance.choice([1, 2])

    def lengths() -> tuple[int, ...]:
        drawn = [chance.choice([0, 1, 64, 127, chance.randrange(700), chance.randrange(1500)]) for _ in range(batch)]
        drawn[0] = drawn[0] or 1  # without any row no kernel is launched
        return tuple(drawn) if "varlen" in name else (max(drawn),) * batch

    group = chance.choice([1, 4, 8] if "_pack" in name else [1, 3, 8])  # packed heads share the rows of a tile
    return Case("stress", lengths(), lengths(), heads=kv_heads * group, kv_heads=kv_heads)
