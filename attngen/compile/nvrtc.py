"""NVRTC through CuPy: a compiler as a library, which needs no GPU, no driver and no header of the toolkit.

CuPy calls whichever NVRTC its process holds, 13 before 12, and searches for one, 13 before 12 again, where it holds
none. So the library that the cache key names is loaded before CuPy's first call.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType

from attngen.compile.toolchain import Nvrtc, installed_cupy, reinstall
from attngen.errors import ToolchainError

#: The variable that OpenBLAS reads when numpy loads it.
_THREADS = "OPENBLAS_NUM_THREADS"


@cache
def load(nvrtc: Nvrtc) -> ModuleType:
    """CuPy's module of the functions of NVRTC, by an installed NVRTC. Raises ToolchainError if either does not work.

    NVRTC opens libnvrtc-builtins by name while it compiles. That of 13.0 has no run path to the folder that both lie
    in, so the builtins are loaded first: the loader then finds them by their soname.
    """
    release = ".".join(map(str, nvrtc.release))
    try:
        for name in (f"libnvrtc-builtins.so.{release}", nvrtc.library.name):
            _keep_loaded(str(nvrtc.library.with_name(name)))
    except OSError as error:
        raise broken(nvrtc, f"it cannot be loaded: {error}") from None
    try:
        with _no_thread():
            from cupy_backends.cuda.libs import nvrtc as functions

            held = functions.getVersion()  # CuPy's first call, which imports all of it, and numpy
    except Exception as error:  # an installation may be damaged in any way
        raise _broken_cupy(error) from None
    if held != nvrtc.release:
        raise _other_library(nvrtc, ".".join(map(str, held)))
    module: ModuleType = functions
    return module


def broken(nvrtc: Nvrtc, fault: str) -> ToolchainError:
    """The error of an NVRTC that does not work."""
    return ToolchainError(f"{nvrtc} ({nvrtc.distribution}) does not work: {fault}; {nvrtc.remedy}")


@cache
def _keep_loaded(path: str) -> ctypes.CDLL:
    return ctypes.CDLL(path)


@contextmanager
def _no_thread() -> Iterator[None]:
    """Keep OpenBLAS, if it is loaded meanwhile, from starting threads, since the process may fork."""
    before = os.environ.get(_THREADS)
    os.environ[_THREADS] = "1"
    try:
        yield
    finally:
        del os.environ[_THREADS]
        os.environ.update({} if before is None else {_THREADS: before})


def _broken_cupy(error: Exception) -> ToolchainError:
    """The error of a CuPy that cannot be imported, or that finds no NVRTC."""
    said = f"{type(error).__name__}: {error}".strip().splitlines()[0]
    ((distribution, version),) = installed_cupy().items()
    return ToolchainError(f"CuPy {version} ({distribution}) does not work: {said}; {reinstall(distribution, version)}")


def _other_library(nvrtc: Nvrtc, held: str) -> ToolchainError:
    """The error of a process in which CuPy calls another release than the one that the cache key names."""
    from cuda.pathfinder import load_nvidia_dynamic_lib

    path = load_nvidia_dynamic_lib("nvrtc").abs_path  # by which CuPy found it
    if path is None or nvrtc.library.samefile(path):
        return broken(nvrtc, f"{nvrtc.library} is NVRTC {held}")
    return ToolchainError(
        f"{nvrtc} ({nvrtc.distribution}) cannot compile in this process, which had loaded NVRTC {held} before "
        f"({path}), as an import of torch does: CuPy calls that one; compile in a process of its own, as "
        "'attngen build' and attngen.jit() do"
    )
