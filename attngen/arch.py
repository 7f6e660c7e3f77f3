"""Limits and features of each GPU architecture, kept nowhere else.

Source: CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability".
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Arch:
    """One compile target. Shared memory and registers are per block, in bytes and 32-bit registers."""

    name: str
    capability: int  # 10 * major + minor
    shared_memory: int
    registers: int
    descriptors: bool  # tensor memory accelerator (TMA)
    pdl: bool  # programmatic dependent launch
    wgmma: bool
    specific: bool  # an "a" target: runs on exactly its own capability
    tensor_memory: bool = False  # accumulators of tcgen05, beside which mma.sync is slow
    portable: bool = False  # PTX, which the driver compiles for the device: for all from this capability on

    @property
    def target(self) -> str:
        """Name of the target that compilers are given."""
        return f"sm{self.capability}" if self.portable else self.name

    def runs_on(self, capability: int) -> bool:
        """Whether a kernel for this arch loads on a device of ``capability``: a cubin does within a major version."""
        if self.portable:
            return capability >= self.capability
        if self.specific:
            return capability == self.capability
        return capability // 10 == self.capability // 10 and capability >= self.capability


_KIB = 1024

_ROWS = (
    Arch("sm80", 80, 163 * _KIB, 65536, False, False, False, False),
    Arch("sm86", 86, 99 * _KIB, 65536, False, False, False, False),
    Arch("sm89", 89, 99 * _KIB, 65536, False, False, False, False),
    Arch("sm90a", 90, 227 * _KIB, 65536, True, True, True, True),
    Arch("sm100a", 100, 227 * _KIB, 65536, True, True, False, True, tensor_memory=True),
    Arch("sm120a", 120, 99 * _KIB, 65536, True, True, False, True),
    Arch("ptx80", 80, 99 * _KIB, 65536, False, False, False, False, portable=True),
)

ARCHES: dict[str, Arch] = {row.name: row for row in _ROWS}


def arch_of(capability: int) -> Arch | None:
    """The best target for a device, or None for a device that no target runs on."""
    suitable = [arch for arch in ARCHES.values() if arch.runs_on(capability)]
    return max(suitable, key=lambda arch: (not arch.portable, arch.capability, arch.specific), default=None)
