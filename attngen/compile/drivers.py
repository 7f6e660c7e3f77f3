"""Which driver a cubin needs."""

from __future__ import annotations

#: Oldest driver that loads a cubin, as cuDriverGetVersion gives it: by CUDA major, or by capability if that is newer.
#: Source: CUDA Compatibility, "Minor Version Compatibility": a cubin runs on every driver of its CUDA major.
_OF_MAJOR = {11: 11000, 12: 12000, 13: 13000}
_OF_CAPABILITY = {89: 11080, 90: 11080, 100: 12080, 120: 12080}


def min_driver(cuda_major: int, capability: int) -> int:
    """Return the oldest driver for a cubin that a compiler of this CUDA major made for this capability."""
    return max(_OF_MAJOR[cuda_major], _OF_CAPABILITY.get(capability, 0))
