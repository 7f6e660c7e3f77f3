"""The C++ compiler of this machine, for kernels and headers that tests run on the CPU.

It takes longer to read the standard library than most sources: what ``tests/host`` includes of it is compiled ahead,
once for each set of options, and the worker processes of a run share it.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from fcntl import LOCK_EX, flock
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from attngen.resources import root

COMPILER = shutil.which("g++")
HOST = root() / "tests" / "host"

_OPTIONS = ("-std=c++20", "-O1", "-w", "-U_FORTIFY_SOURCE", "-ffp-contract=off", "-fPIC")
_SHARED = "ATTNGEN_TESTS_HOST"


def share() -> None:
    """Have all processes that this one starts take what is compiled ahead from one folder, which its end removes."""
    if _SHARED not in os.environ:
        os.environ[_SHARED] = mkdtemp(prefix="attngen-ahead-")
        atexit.register(shutil.rmtree, os.environ[_SHARED], ignore_errors=True)


def compile_host(
    source: Path, made: Path, folder: Path, *options: str, define: Mapping[str, Any] | None = None, check: bool = True,
    ahead: bool = True,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """Compile a source that includes files of a folder and of ``tests/host``: to an object, a library or a program, by
    the suffix of what is made. What only few sources are compiled with is not worth compiling ``ahead``.
    """
    assert COMPILER is not None
    kind = {".o": ["-c"], ".so": ["-shared"]}.get(made.suffix, [])
    names = [f"-D{name}={value}" for name, value in (define or {}).items()]
    first = _ahead(options) if ahead else []
    command = [COMPILER, *_OPTIONS, *options, *kind, *first, f"-I{folder}", f"-I{HOST}", *names]
    done = subprocess.run([*command, str(source), "-o", str(made)], capture_output=True, text=True, check=False)
    assert done.returncode == 0 or not check, done.stderr
    return done


@cache
def _ahead(options: Iterable[str]) -> list[str]:
    """Options that take the standard library as it was compiled with these."""
    share()
    folder = Path(os.environ[_SHARED]) / hashlib.sha256(repr(options).encode()).hexdigest()[:16]
    folder.mkdir(exist_ok=True)
    header, made = HOST / "standard.h", folder / "standard.h.gch"
    with open(folder / "lock", "w") as lock:
        flock(lock, LOCK_EX)
        if not made.exists():
            command = [str(COMPILER), *_OPTIONS, *options, "-x", "c++-header", str(header), "-o", str(made)]
            subprocess.run(command, check=True)
    return [f"-I{folder}", "-include", header.name]
