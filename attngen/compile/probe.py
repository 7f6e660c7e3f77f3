"""A tiny kernel for each arch: whether compiling works at all on this machine."""

from __future__ import annotations

import time

from attngen.arch import ARCHES
from attngen.compile.options import triton_options
from attngen.compile.triton import compile_function

_TEXT = """
import triton
import triton.language as tl


@triton.jit
def probe(x):
    tl.store(x + tl.program_id(0), 1)
"""


def probe(arch: str) -> str:
    """Compile the kernel for an arch and return how long that took; CompileError if it does not work."""
    from attngen.plan.model import Argument

    start = time.perf_counter()
    compile_function(_TEXT, "probe", (Argument("x", "pointer", "*i32"),), ARCHES[arch], triton_options(1, 1))
    return f"compiled a kernel in {time.perf_counter() - start:.2f} s"


def probe_job(arch: str, _last: bool) -> str:
    """``probe`` for a worker of ``attngen.store.jobs``."""
    return probe(arch)
