"""Which compiler is installed, identified by version and content, without importing it.

Part of every cache key: two installations that could compile differently have different toolchains.
"""

from __future__ import annotations

from functools import cache
from hashlib import sha256
from importlib import metadata
from importlib.util import find_spec

#: What compiles the sources of a backend. Triton's wheel also holds the tools that read a cubin.
_PACKAGES = {"triton": ("triton",), "cuda": ("nvidia-cuda-nvrtc",)}


def missing(backend: str) -> str | None:
    """Return what is lacking to compile the sources of a backend, and what to do about it; None if all is there."""
    if backend == "triton" and toolchain("triton")["triton"] is None:
        return "Triton is not installed; pip install 'attngen[build]'"
    if backend == "cuda" and find_spec("cupy_backends") is None:
        return (
            "CuPy, which CUDA kernels are compiled with, is not installed; pip install 'attngen[build]', or say "
            "'backend: triton' in the spec"
        )
    return None


@cache
def toolchain(backend: str) -> dict[str, str | None]:
    """Return the identity of a backend's compiler; the version is None where it is not installed.

    ``content`` is a hash over the hashes that the wheel records of its files, so that a development build that
    keeps its version counts as another compiler.
    """
    packages = _PACKAGES[backend]
    versions, contents = {}, []
    for package in packages:
        versions[package], lines = _installed(package)
        contents += lines
    return {**versions, "content": sha256("\n".join(contents).encode()).hexdigest()[:16] if contents else None}


def _installed(package: str) -> tuple[str | None, list[str]]:
    """Return the version of an installed package and the lines that record its files."""
    try:
        distribution = metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return None, []
    record = distribution.read_text("RECORD") or ""
    # What the installer itself wrote differs between installations: its name, byte code, and the commands that it puts
    # beside the interpreter (../../../bin), which begin with the interpreter's path.
    return distribution.version, sorted(
        line
        for line in record.splitlines()
        if ",sha256=" in line and ".dist-info/" not in line and not line.startswith(("../", "/"))
    )
