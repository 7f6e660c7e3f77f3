"""Kernels by mma.sync under compute-sanitizer: ``python -m tests.gpu.sanitized_cards TOOL``."""

from __future__ import annotations

import sys

import torch

from attngen.inspect.cases import Case
from attngen.runtime.kernels.module import read_kernel
from tests.gpu.generated_memory import run
from tests.gpu.test_cards import built, cards

#: Query rows and keys: a single one, a tile less and more by one, several tiles.
SIZES = ((1, 129), (129, 1), (63, 65), (129, 257))


def names() -> list[str]:
    """Return the kernels of 16 bits, whose inputs are made to end with their allocation."""
    plans = [kernel.plan for kernel in cards()]
    return [plan.name for plan in plans if plan.operands.q.bytes == plan.operands.k.bytes == 2]


def main(tool: str) -> None:
    """Run every kernel on the shapes that a tool is for."""
    for place, name in enumerate(names()):
        kernel = read_kernel(built()[name])
        for rows, keys in (SIZES[place % 3], SIZES[-1]) if tool == "memcheck" else SIZES[-1:]:
            pages = 16 if kernel.layout == "paged" else 0
            run(kernel, Case("sanitized", (rows,), (keys,), heads=2, kv_heads=1, page_size=pages))
    torch.cuda.synchronize()
    print(f"{len(names())} kernels ran")


if __name__ == "__main__":
    main(sys.argv[1])
