"""The environment of a compile: free of variables that change what Triton, LLVM or ptxas produce.

A cache key cannot see the environment, so nothing in it may matter.
"""

from __future__ import annotations

import os
import re
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager

#: Names that Triton, its LLVM and its ptxas read, with room for those that later versions add.
_SCRUBBED = re.compile(
    r"(TRITON|PTXAS|NVPTX|MLIR|LLVM|AMDGCN|GLUON)_.*"
    r"|(DISABLE|ENABLE|USE|DUMP)_(PTXAS|LLVM|MMA|IR|TTGIR|HOPPER|WARP).*"
    r"|NVCC_(APPEND|PREPEND)_FLAGS|CUDA_CACHE_.*"
)

#: One compile at a time in a process: the environment, tempfile's folder and standard output are global.
_LOCK = threading.RLock()


def is_scrubbed(name: str) -> bool:
    """Whether a variable of this name is hidden from compilers."""
    return _SCRUBBED.fullmatch(name) is not None


@contextmanager
def scrubbed(scratch: str, **variables: str) -> Iterator[None]:
    """Hide every variable that could change the result, set ``variables``, and send temporary files to ``scratch``.

    All is put back on exit, also variables that the compiler set itself.
    """
    with _LOCK:
        before = {name: value for name, value in os.environ.items() if is_scrubbed(name)}
        folder = tempfile.tempdir
        try:
            for name in before:
                del os.environ[name]
            os.environ.update(variables)
            tempfile.tempdir = scratch
            yield
        finally:
            tempfile.tempdir = folder
            for name in [name for name in os.environ if is_scrubbed(name) or name in variables]:
                del os.environ[name]
            os.environ.update(before)
