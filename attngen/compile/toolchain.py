"""The installed compilers, identified by version and content, without loading them.

Part of every cache key: two installations that could compile differently have different toolchains.

Two releases of NVRTC may be installed side by side. The oldest one compiles, 12.9 where it is there: its cubins load on
drivers of CUDA 12 and later, those of NVRTC 13 on drivers of CUDA 13 only. CuPy calls it, whose version changes no
cubin and is in no key. ``attngen.compile.assembler`` chooses the ptxas of Triton's kernels.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib import metadata
from pathlib import Path

from attngen.arch import ARCHES
from attngen.compile.assembler import MOST_FOR_CUDA_12, PTXAS_WHEEL, ptxas_of_wheel, unfit_assembler
from attngen.drivers import INSTALL_NVRTC_12, drivers_text, min_driver

#: The oldest release of NVRTC that attngen compiles with.
OLDEST_NVRTC = (12, 9)

#: Wheels that hold an NVRTC, one for each CUDA major.
NVRTC_WHEELS = ("nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvrtc")

#: Distributions of CuPy for CUDA. All write the same folders, so that only one of them may be installed.
CUPY = ("cupy-cuda12x", "cupy-cuda13x", "cupy")

#: The oldest major version of CuPy that attngen calls NVRTC by, and the command that installs one.
_OLDEST_CUPY = 14
_INSTALL_CUPY = f"pip install 'cupy-cuda12x>={_OLDEST_CUPY}'"

#: An NVRTC that no wheel holds, in cache keys and manifests.
NVRTC_ELSEWHERE = "nvrtc"

_LIBRARY = re.compile(r"libnvrtc\.so\.\d+")


@dataclass(frozen=True, slots=True)
class Nvrtc:
    """An installed NVRTC. ``content`` is a hash of its files: builds of one version may differ."""

    distribution: str
    version: str
    content: str
    library: Path

    @property
    def release(self) -> tuple[int, ...]:
        """Major and minor version."""
        return tuple(int(part) for part in re.findall(r"\d+", self.version)[:2])

    @property
    def remedy(self) -> str:
        """Advice if it does not work."""
        if self.distribution == NVRTC_ELSEWHERE:
            return f"install another one: {INSTALL_NVRTC_12}"
        return reinstall(self.distribution, self.version)

    def min_driver(self, arch: str) -> int:
        """Oldest driver that loads its cubins for an arch."""
        return min_driver(self.release[0], ARCHES[arch].capability)

    def __str__(self) -> str:
        return f"NVRTC {self.version}"


def reinstall(distribution: str, version: str) -> str:
    """Advice to install a wheel that does not work once more."""
    return f"reinstall it: pip install --force-reinstall --no-deps {distribution}=={version}"


def chosen_nvrtc() -> Nvrtc | None:
    """The NVRTC that compiles; None if none is installed, or only ones that are too old."""
    usable = (one for one in installed_nvrtc() if one.release >= OLDEST_NVRTC)
    return min(usable, key=lambda one: one.release, default=None)


@cache
def installed_nvrtc() -> tuple[Nvrtc, ...]:
    """Every NVRTC that a wheel holds; without any, the one that cuda-pathfinder finds elsewhere."""
    if of_wheels := tuple(_nvrtc_of_wheels()):
        return of_wheels
    elsewhere = _nvrtc_elsewhere()
    return () if elsewhere is None else (elsewhere,)


def _nvrtc_of_wheels() -> Iterator[Nvrtc]:
    for name in NVRTC_WHEELS:
        version, lines = _installed(name)
        if version is None:
            continue
        for file in metadata.distribution(name).files or ():
            if _LIBRARY.fullmatch(file.name):
                yield Nvrtc(name, version, _hash(lines), Path(str(file.locate())))


def _nvrtc_elsewhere() -> Nvrtc | None:
    """The NVRTC of a CUDA toolkit, of conda or of the system. cuda-pathfinder comes with CuPy."""
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        path = Path(load_nvidia_dynamic_lib("nvrtc").abs_path or "").resolve(strict=True)
        files = [path, *sorted(path.parent.glob("libnvrtc-builtins.so*"))]
        content = _hash([f"{file.name} {file.stat().st_size}" for file in files])
    except Exception:  # its search raises what it meets; then there is none
        return None
    version = re.search(r"\d+\.\d+\.\d+$", path.name)
    return Nvrtc(NVRTC_ELSEWHERE, version[0], content, path) if version else None


def missing(backend: str, arch: str) -> str | None:
    """The missing piece of the toolchain for an arch in a backend, and how to install it; None if nothing is
    missing."""
    if backend == "triton":
        if toolchain("triton", arch)["triton"] is None:
            return "Triton is not installed; pip install 'attngen[build]'"
        return unfit_assembler(ARCHES[arch])
    return lacking_for_cuda() if backend == "cuda" else None


def lacking_for_cuda() -> str | None:
    """The missing piece of the toolchain for CUDA, and how to install it; None if nothing is missing."""
    fault = _cupy_fault() or _nvrtc_fault()
    return f"CUDA kernels cannot be compiled: {fault}, or say 'backend: triton' in the spec" if fault else None


def installed_cupy() -> dict[str, str]:
    """Distribution → version of each CuPy that is installed."""
    versions = {}
    for name in CUPY:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = str(metadata.version(name))
    return versions


def _cupy_fault() -> str | None:
    """The reason why CuPy cannot call NVRTC, and how to get one that can; None if it can."""
    versions = installed_cupy()
    listed = " and ".join(f"{name} {version}" for name, version in versions.items())
    if not versions:
        return f"CuPy is not installed; {_INSTALL_CUPY}"
    if len(versions) > 1:
        return (
            f"{listed} are both installed, and overwrite each other's files; "
            f"pip uninstall --yes {' '.join(versions)}, then {_INSTALL_CUPY}"
        )
    (version,) = versions.values()
    major = re.match(r"\d+", version)
    if major is None or int(major[0]) < _OLDEST_CUPY:
        return f"CuPy {_OLDEST_CUPY} or later is needed, found {listed}; {_INSTALL_CUPY}"
    return None


def _nvrtc_fault() -> str | None:
    """The reason why no NVRTC here compiles, and how to get one that does; None if one does."""
    if chosen_nvrtc() is not None:
        return None
    old = ", ".join(f"{one.distribution} {one.version}" for one in installed_nvrtc())
    least = ".".join(map(str, OLDEST_NVRTC))
    lacking = f"NVRTC {least} or later is needed, found {old}" if old else "NVRTC is not installed"
    return f"{lacking}; {INSTALL_NVRTC_12}"


def newer_driver_note(arches: Iterable[str]) -> str | None:
    """A note that CUDA kernels for some arches need a newer driver than by NVRTC 12.9; None if they do not."""
    nvrtc = chosen_nvrtc()
    cubins = [arch for arch in dict.fromkeys(arches) if not ARCHES[arch].portable]
    if nvrtc is None or nvrtc.release[0] == OLDEST_NVRTC[0] or not cubins:
        return None
    by_nvrtc_12 = {arch: min_driver(OLDEST_NVRTC[0], ARCHES[arch].capability) for arch in cubins}
    return (
        f"CUDA kernels are compiled by {nvrtc} and need a driver for "
        f"{drivers_text({arch: nvrtc.min_driver(arch) for arch in cubins})}; those by NVRTC 12.9 need "
        f"{drivers_text(by_nvrtc_12)}: {INSTALL_NVRTC_12}"
    )


@cache
def toolchain(backend: str, arch: str) -> dict[str, str | None]:
    """The identity of the compiler for a backend and an arch; the version is None where it is not installed.

    ``content`` is a hash over the hashes that the wheel records of its files, so that a development build that
    keeps its version counts as another compiler.
    """
    if backend == "cuda":
        nvrtc = chosen_nvrtc()
        if nvrtc is None:
            return {NVRTC_WHEELS[0]: None, "content": None}
        return {nvrtc.distribution: nvrtc.version, "content": nvrtc.content}
    version, lines = _installed("triton")  # its wheel also holds ptxas and the tools that read a cubin
    identity = {"triton": version, "content": _hash(lines) if lines else None}
    if ARCHES[arch].capability <= MOST_FOR_CUDA_12 and ptxas_of_wheel():
        identity[PTXAS_WHEEL] = metadata.version(PTXAS_WHEEL)
    return identity


def _installed(package: str) -> tuple[str | None, list[str]]:
    """The version of an installed package, and the lines that record its files."""
    try:
        distribution = metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return None, []
    record = distribution.read_text("RECORD") or ""
    # Lines of files that the installer wrote are left out, since they differ between installations: its name, byte
    # code, and commands beside the interpreter (../../../bin), which begin with the interpreter's path.
    return distribution.version, sorted(
        line
        for line in record.splitlines()
        if ",sha256=" in line and ".dist-info/" not in line and not line.startswith(("../", "/"))
    )


def _hash(lines: list[str]) -> str:
    return sha256("\n".join(lines).encode()).hexdigest()[:16]
