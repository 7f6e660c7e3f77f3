"""Generated specs under memcheck: ``python -m tests.gpu.generated_memory FOLDER...``, folders of kernels.

Memory is not cached by torch here (PYTORCH_NO_CUDA_MEMORY_CACHING), so that each input ends with its allocation.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import torch

from attngen.inspect.cases import Case
from attngen.lab.verify.inputs import Element, Inputs, make_inputs
from attngen.lab.verify.poison import poisoned, poisoned_gradients
from attngen.runtime.kernels.module import Kernel, read_kernel
from attngen.runtime.launch.pinned import Pinned, PinnedGradients

#: Queries and keys; twice as many query heads as KV heads.
_SIZES = ((65, 129), (129, 65), (1, 200))


def tight_inputs(kernel: Kernel, case: Case) -> Inputs:
    """Return inputs that end with their allocation."""
    element = Element(kernel.dtype, kernel.head_dim_qk, kernel.head_dim_v, kernel.scale_block)
    made = make_inputs(kernel.variant, case, kernel.layout, element, "cuda", case.seqlen_k, calm=0.0)
    return replace(made, **{name: getattr(made, name).nan_to_num(nan=0.0).clone() for name in "qkv"})


def run(kernel: Kernel, case: Case) -> None:
    """Launch a kernel once. A backward gets an output and a log-sum-exp that no forward made: only places count."""
    given = tight_inputs(kernel, case)
    call = given.bind(kernel.variant)
    if kernel.direction == "forward":
        Pinned(kernel, call, poisoned(kernel, call, given.q, given.k, given.v).buffers)()
    else:
        out = torch.randn(call.out_shape(), device="cuda").to(given.q.dtype)
        lse = torch.randn(call.lse_shape(), device="cuda")
        tensors = {"q": given.q, "k": given.k, "v": given.v, "out": out, "lse": lse, "dout": out.clone()}
        PinnedGradients(kernel, call, poisoned_gradients(kernel, call, tensors, None)[0])()
    torch.cuda.synchronize()


def main(folders: list[str]) -> None:
    """Run kernels one after the other, and say which one begins: after a report, nothing else can run."""
    torch.cuda.set_device(os.getpid() % torch.cuda.device_count())
    for folder in folders:
        kernel = read_kernel(Path(folder))
        print(f"\nbegin {kernel.name}", flush=True)
        for rows, keys in _SIZES:
            case = Case("sanitized", (rows, 3), (keys, 5)) if kernel.layout == "varlen" else Case("", (rows,), (keys,))
            run(kernel, case)


if __name__ == "__main__":
    main(sys.argv[1:])
