"""Oldest drivers of cubins, and their names."""

from __future__ import annotations

from collections.abc import Mapping

#: Oldest driver that loads a cubin, as cuDriverGetVersion gives it: by CUDA major, or by capability if that is newer.
#: Source: CUDA Compatibility, "Minor Version Compatibility": a cubin runs on every driver of its CUDA major.
_OF_MAJOR = {11: 11000, 12: 12000, 13: 13000}
_OF_CAPABILITY = {89: 11080, 90: 11080, 100: 12080, 120: 12080}

#: Driver branch that came with a CUDA release. Source: CUDA Toolkit release notes, table of driver versions.
_BRANCHES = {11000: "r450", 11080: "r520", 12000: "r525", 12080: "r570", 12090: "r575", 13000: "r580"}

#: Command that installs the NVRTC whose cubins load on most drivers.
INSTALL_NVRTC_12 = "pip install 'nvidia-cuda-nvrtc-cu12>=12.9,<13'"


def min_driver(cuda_major: int, capability: int) -> int:
    """Return the oldest driver for a cubin that a compiler of this CUDA major made for this capability."""
    return max(_OF_MAJOR[cuda_major], _OF_CAPABILITY.get(capability, 0))


def cuda_release(version: int) -> str:
    """CUDA release of a driver version: ``12.4`` for 12040."""
    return f"{version // 1000}.{version % 1000 // 10}"


def driver_text(version: int) -> str:
    """Name of the oldest driver that a kernel needs: ``CUDA 12.0 (r525)``."""
    branch = _BRANCHES.get(version)
    return f"CUDA {cuda_release(version)}" + (f" ({branch})" if branch else "")


def drivers_text(drivers: Mapping[str, int]) -> str:
    """Names of the oldest drivers of arches: ``CUDA 12.0 (r525) or later for sm80, sm90a``."""
    parts = []
    for version in sorted(set(drivers.values())):
        arches = ", ".join(arch for arch, needed in drivers.items() if needed == version)
        parts.append(f"{driver_text(version)} or later for {arches}")
    return "; ".join(parts)
