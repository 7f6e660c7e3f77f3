"""Split-KV kernels under compute-sanitizer: ``python -m tests.gpu.sanitized_decode TOOL``."""

from __future__ import annotations

import sys

import torch

from tests.gpu.decode_calls import LAYOUTS, Form, ready
from tests.gpu.test_decode import kernels

#: Masks of each kind, and head dims that copies cut into boxes of 64 and of 32 columns.
SUBJECTS = [
    *(Form(variant, layout) for variant in ("causal", "sliding_window", "causal_sink", "tree") for layout in LAYOUTS),
    *(Form("causal", layout, dim, torch.float16) for dim in (64, 80, 96, 256) for layout in ("dense", "paged")),
]
#: Keys of each sequence and rows of queries; memcheck, whose inputs end with their allocation, takes odd lengths.
SHAPES = {"memcheck": [([1, 17], 1), ([63], 3), ([129, 0, 65], 1), ([1000], 2)]}


def main(tool: str) -> None:
    """Run every subject on the shapes that a tool is for."""
    kernels()
    for form in SUBJECTS:
        for lengths, rows in SHAPES.get(tool, [([300, 17], 2)]):
            out, _ = ready(form, lengths, rows=rows, seed=len(lengths)).run()
            assert torch.isfinite(out).all()
    torch.cuda.synchronize()
    print(f"{len(SUBJECTS)} kernels ran")


if __name__ == "__main__":
    main(sys.argv[1])
