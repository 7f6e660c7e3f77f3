"""Kernels in 8 bits under compute-sanitizer: ``python -m tests.gpu.sanitized_fp8 TOOL``."""

from __future__ import annotations

import sys
import time

import torch

from attngen.inspect.cases import Case
from tests.gpu.fp8_runs import NAMES, a_run

#: Few and small: memcheck slows a kernel down a hundred times.
SIZES = ((1, 129), (65, 63), (129, 193))


def main(tool: str) -> None:
    """Run every kernel on small odd shapes."""
    for name in NAMES:
        begun = time.monotonic()
        for rows, keys in SIZES if tool == "memcheck" else SIZES[-1:]:
            out, _ = a_run(name, Case("sanitized", (rows,), (keys,), heads=2, kv_heads=1), rows)()
            assert torch.isfinite(out).all()
        print(f"{name} {time.monotonic() - begun:.1f} s", flush=True)
    torch.cuda.synchronize()
    print(f"{len(NAMES)} kernels ran")


if __name__ == "__main__":
    main(sys.argv[1])
