"""Forward kernels under compute-sanitizer: ``python -m tests.gpu.sanitized TOOL``.

Memory is not cached by torch here (PYTORCH_NO_CUDA_MEMORY_CACHING), so that each input ends with its allocation.
"""

from __future__ import annotations

import sys

import torch

from attngen.inspect.cases import Case
from attngen.inspect.values import arguments_of
from attngen.runtime.arguments.checked import Packing
from tests.gpu.family import Run, kernels

#: One of each KV iteration, kind of load and layout.
SUBJECTS = (
    "causal-bf16-d64-dense-descriptor",
    "sink_window-bf16-d64-dense-descriptor",
    "packed_documents-bf16-d64-dense-descriptor",
    "dilated-bf16-d64-dense-descriptor",
    "allowed-bf16-d64-dense-descriptor",
    "causal-bf16-d64-varlen-descriptor",
    "causal-fp32-d64-dense-pointer",
    "sink_window-bf16-d80-dense-pointer",
    "sink_window-bf16-d80-varlen-pointer",
    "causal-bf16-d64-dense-wgmma",
    "packed_documents-bf16-d64-dense-wgmma",
    "allowed-bf16-d64-dense-wgmma",
    "dilated-bf16-d64-varlen-wgmma",
    "sink_window-bf16-d80-dense-wgmma",
    "sliding_window-bf16-d80-varlen-wgmma",
    "sliding_window-bf16-d48-dense-wgmma",
    "causal-bf16-d16-dense-wgmma",
    "sliding_window-bf16-d112-dense-wgmma",
    "head_window-bf16-d64-dense-wgmma-pack",
    "dilated-bf16-d64-varlen-wgmma-pack",
    "sliding_window-bf16-d80-dense-wgmma-pack",
)
SIZES = (1, 3, 63, 65, 127, 129)


def subjects(tool: str) -> list[str]:
    """Return the kernels that a tool can judge.

    racecheck follows barriers thread by thread. In the Hopper kernels one thread arrives for a warpgroup, whose 128
    threads wgmma has kept together; the tool does not see that, and takes their reads for unordered.
    """
    return [name for name in SUBJECTS if tool != "racecheck" or "wgmma" not in name.split("-")]


def run(name: str, rows: int, keys: int) -> None:
    """Launch a kernel once on tensors that end with their allocation."""
    kernel = kernels()[name]
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[kernel.dtype]
    varlen = kernel.layout == "varlen"
    case = Case("sanitized", (rows,), (keys,), heads=2, kv_heads=1)
    generator = torch.Generator().manual_seed(rows * 1000 + keys)
    arguments = {
        key: value.cuda() if isinstance(value, torch.Tensor) else value
        for key, value in arguments_of(kernel.variant, case, kernel.layout, generator).items()
    }
    lead = () if varlen else (1,)
    q = torch.randn(*lead, rows, 2, kernel.head_dim_qk, generator=generator).to(dtype).cuda()
    k = torch.randn(*lead, keys, 1, kernel.head_dim_qk, generator=generator).to(dtype).cuda()
    v = torch.randn(*lead, keys, 1, kernel.head_dim_v, generator=generator).to(dtype).cuda()
    packing = None
    if varlen:
        offsets = [torch.tensor([0, n], dtype=torch.int32).cuda() for n in (rows, keys)]
        packing = Packing(offsets[0], offsets[1], rows, keys)
    out, _ = Run.with_inputs(kernel, q, k, v, packing, None, arguments).results()
    assert torch.isfinite(out).all()


def main(tool: str) -> None:
    """Run every subject on the shapes that a tool is for."""
    shapes = [(a, b) for a in SIZES for b in SIZES if a == b or 129 in (a, b)] if tool == "memcheck" else [(65, 129)]
    for name in subjects(tool):
        for rows, keys in shapes:
            run(name, rows, keys)
    torch.cuda.synchronize()
    print(f"{len(subjects(tool))} kernels ran")


if __name__ == "__main__":
    main(sys.argv[1])
