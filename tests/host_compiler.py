"""The C++ compiler of this machine, for kernels and headers that tests run on the CPU.

It takes longer to read the standard library than most sources: what ``tests/host`` includes of it is compiled ahead,
once for each set of options. The worker processes of a run share that, and kernels that several of them run.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping
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


def shared(name: str, make: Callable[[Path], object]) -> Path:
    """A file that one process of the run makes, and all others take."""
    share()
    made = Path(os.environ[_SHARED]) / name
    made.parent.mkdir(exist_ok=True)
    with open(f"{made}.lock", "w") as lock:
        flock(lock, LOCK_EX)
        if not made.exists():
            make(made)
    return made


@cache
def _ahead(options: Iterable[str]) -> list[str]:
    """Options that take the standard library as it was compiled with these."""
    header = HOST / "standard.h"
    command = [str(COMPILER), *_OPTIONS, *options, "-x", "c++-header", str(header), "-o"]
    name = f"{hashlib.sha256(repr(options).encode()).hexdigest()[:16]}/standard.h.gch"
    made = shared(name, lambda made: subprocess.run([*command, str(made)], check=True))
    return [f"-I{made.parent}", "-include", header.name]
