"""The ptxas that assembles the PTX of Triton's kernels.

For arches up to sm90a it is the newest of CUDA 12, whose cubins load on more drivers: that of NVIDIA's wheel where 12.9
is installed, else one of the two in Triton's wheel, ``ptxas`` and the newer ``ptxas-blackwell``. For newer arches
Triton chooses.

Kernels for Hopper need ptxas 12.9. 12.8 loses descriptors of wgmma: some kernels then multiply by what lies at another
address of shared memory. 13 serializes the wgmma of some kernels (C7513), and was not searched for lost descriptors.
docs/notebook/building.md has the search.
"""

from __future__ import annotations

from functools import cache
from importlib import metadata
from pathlib import Path

from attngen.arch import Arch
from attngen.compile.inspect import nvidia_tool, tool_release

#: NVIDIA's wheel that holds the ptxas of CUDA 12.
PTXAS_WHEEL = "nvidia-cuda-nvcc-cu12"

#: The newest capability for which ptxas of CUDA 12 assembles.
MOST_FOR_CUDA_12 = 90

#: The oldest ptxas that keeps the descriptors of wgmma.
_OLDEST_FOR_WGMMA = (12, 9)

#: The assemblers in Triton's wheels.
_OF_TRITON = ("ptxas", "ptxas-blackwell")


def assembler(arch: Arch) -> Path | None:
    """The ptxas to use for an arch instead of the one that Triton would choose; None leaves the choice to Triton."""
    if arch.capability > MOST_FOR_CUDA_12:
        return None
    if path := ptxas_of_wheel():
        return path
    of_cuda_12 = {path: release for path, release in _of_triton().items() if release[:1] == (12,)}
    return max(of_cuda_12, key=lambda path: of_cuda_12[path], default=None)


def unfit_assembler(arch: Arch) -> str | None:
    """The reason why no ptxas here may assemble kernels for an arch, and how to get one that may; None if one may."""
    if not arch.wgmma or ptxas_of_wheel():
        return None
    releases = _of_triton().values()
    if any(release[:1] == (12,) and release >= _OLDEST_FOR_WGMMA for release in releases):
        return None
    listed = " and ".join(".".join(map(str, release)) for release in releases if release) or "no ptxas"
    return (
        f"Triton kernels for {arch.name} need ptxas 12.9, and the Triton wheel has {listed}: 12.8 loses descriptors of "
        "wgmma, so that some kernels multiply wrong operands, and 13 may serialize wgmma; "
        f"pip install '{PTXAS_WHEEL}>=12.9,<13', or use Triton 3.6, 3.8 or 3.9, which bring ptxas 12.9"
    )


@cache
def ptxas_of_wheel() -> Path | None:
    """The ptxas of NVIDIA's wheel for CUDA 12; None where it is not installed, or older than wgmma needs."""
    try:
        wheel = metadata.distribution(PTXAS_WHEEL)
    except metadata.PackageNotFoundError:
        return None
    if tuple(map(int, wheel.version.split(".")[:2])) < _OLDEST_FOR_WGMMA:
        return None
    return next((Path(str(file.locate())) for file in wheel.files or () if file.name == "ptxas"), None)


def _of_triton() -> dict[Path, tuple[int, ...]]:
    """Path → release of each ptxas in Triton's wheel."""
    paths = [path for name in _OF_TRITON if (path := nvidia_tool(name)) is not None]
    return {path: tool_release(path) for path in paths}
