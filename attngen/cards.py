"""Evidence for the CUDA kernels on each GPU: compiled, verified, measured. docs/cards.md has the same words."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Support:
    """GPUs of an arch, and how far its kernels have been tested."""

    cards: str
    evidence: str


_RETARGETED = "compiled, verified by retargeting, not measured"

SUPPORT = {
    "sm80": Support("A100, A800, A30", _RETARGETED),
    "sm86": Support("A10, A40, RTX 30", _RETARGETED),
    "sm89": Support("L4, L40S, RTX 40", _RETARGETED),
    "sm90a": Support("H100, H200", "verified and measured"),
    "sm100a": Support("B200", "Triton alone: compiled, not run"),
    "sm120a": Support("RTX 50, RTX PRO", _RETARGETED),
    "ptx80": Support("later GPUs", "PTX: compiled by the driver there; run on an H100"),
}
