"""Backward kernels in CUDA under compute-sanitizer: ``python -m tests.gpu.sanitized_gradients TOOL``."""

from __future__ import annotations

import sys
from functools import cache

import torch

from attngen.inspect.cases import Case
from tests.gpu.family import Kernels, rendered
from tests.gpu.gradient_runs import gradient_run
from tests.gpu.test_backward import LEFT_OUT, PLANNED

_PLANNED = {
    name.removeprefix("backward "): (spec, plan)
    for name, (spec, plan) in PLANNED.items()
    if plan.direction == "backward" and plan.backend == "cuda" and name not in LEFT_OUT
}
#: Every choice of roles, iteration and layout has a kernel here.
KERNELS = list(_PLANNED)
SIZES = ((1, 1), (1, 129), (129, 1), (63, 65), (128, 128), (129, 257))
#: Shapes of a kernel under memcheck, which takes long: the next one begins with the next shape.
_AT_ONCE = 2


@cache
def kernels() -> Kernels:
    """Return the kernels by their labels, built for the GPU that is here."""
    return Kernels(rendered(_PLANNED))


def main(tool: str) -> None:
    """Run every kernel on the shapes that a tool is for."""
    for place, name in enumerate(KERNELS):
        turned = SIZES[place % len(SIZES) :] + SIZES[: place % len(SIZES)]
        for rows, keys in turned[:_AT_ONCE] if tool == "memcheck" else SIZES[-1:]:
            gradients = gradient_run(kernels()[name], Case("sanitized", (rows,), (keys,), heads=2, kv_heads=1), rows)()
            assert all(torch.isfinite(gradient).all() for gradient in gradients)
    torch.cuda.synchronize()
    print(f"{len(KERNELS)} kernels ran")


if __name__ == "__main__":
    main(sys.argv[1])
