"""Tiny kernels, which show whether a compiler works at all on this machine."""

from __future__ import annotations

import time
from functools import cache

from attngen.arch import ARCHES
from attngen.compile.inspect import resources_of_log
from attngen.compile.options import triton_options
from attngen.compile.ptx import cuda_major
from attngen.compile.toolchain import chosen_nvrtc, missing, reinstall, toolchain
from attngen.drivers import min_driver
from attngen.errors import CompileError, ToolchainError

_TRITON = """
import triton
import triton.language as tl


@triton.jit
def probe(x):
    tl.store(x + tl.program_id(0), 1)
"""

_CUDA = 'extern "C" __global__ void probe(int* x) { x[blockIdx.x] = 1; }'


def probe(backend: str, arch: str) -> tuple[float, int]:
    """Compile a tiny kernel; returns the seconds that it took, and the oldest driver for such kernels.

    Raises ToolchainError if it does not compile.
    """
    start = time.perf_counter()
    if lacking := missing(backend, arch):
        raise ToolchainError(lacking)
    try:
        driver = min_driver(_compile(backend, arch), ARCHES[arch].capability)
    except ToolchainError:
        raise
    except CompileError as error:
        compiler, remedy = _compiler(backend, arch)
        raise ToolchainError(
            f"{compiler} does not work: it cannot compile a kernel of one line for {arch}: {error}; {remedy}"
        ) from None
    return time.perf_counter() - start, driver


def _compile(backend: str, arch: str) -> int:
    """Compile the tiny kernel; returns the CUDA major release of its cubin."""
    if backend == "cuda":
        from attngen.compile.cuda import compile_text

        resources_of_log(compile_text("probe", _CUDA, {}, arch)[1])
        nvrtc = chosen_nvrtc()
        assert nvrtc is not None  # it has just compiled
        return nvrtc.release[0]
    from attngen.compile.triton import compile_function
    from attngen.plan.model import Argument

    parameters, options = (Argument("x", "pointer", "*i32"),), triton_options(1, 1)
    compiled = compile_function(_TRITON, "probe", parameters, ARCHES[arch], options)
    return cuda_major(compiled.ptx, compiled.cubin)


def _compiler(backend: str, arch: str) -> tuple[str, str]:
    """The name of a compiler, and advice if it does not work."""
    nvrtc = chosen_nvrtc()
    if backend == "cuda" and nvrtc is not None:
        return str(nvrtc), nvrtc.remedy
    version = str(toolchain("triton", arch)["triton"])
    return f"Triton {version}", reinstall("triton", version)


@cache
def require_working(backend: str, arch: str) -> None:
    """Raise ToolchainError if the compiler of a backend does not work; looks once in a process."""
    probe(backend, arch)


def probe_job(backend: str, arch: str, _last: bool) -> tuple[float, int]:
    """``probe`` for a worker of ``attngen.store.jobs``."""
    return probe(backend, arch)
