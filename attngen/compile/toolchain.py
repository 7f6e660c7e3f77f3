"""Which compiler is installed, told apart by version and by content, without importing it.

Part of every cache key: two installations that could compile differently have different toolchains.
"""

from __future__ import annotations

from functools import cache
from hashlib import sha256
from importlib import metadata


@cache
def toolchain(backend: str) -> dict[str, str | None]:
    """Return the identity of a backend's compiler; the version is None where it is not installed.

    ``content`` is a hash over the hashes that the wheel records of its files, so that a development build that
    keeps its version counts as another compiler.
    """
    if backend != "triton":
        raise ValueError(f"unknown backend {backend!r}")
    try:
        distribution = metadata.distribution("triton")
    except metadata.PackageNotFoundError:
        return {"triton": None, "content": None}
    record = distribution.read_text("RECORD") or ""
    # Lines of the installer itself (its name, whether it was asked for, byte code) differ between installations.
    lines = sorted(line for line in record.splitlines() if ",sha256=" in line and ".dist-info/" not in line)
    return {"triton": distribution.version, "content": sha256("\n".join(lines).encode()).hexdigest()[:16]}
