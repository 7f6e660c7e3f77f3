"""The only table of what kernels may do although it costs speed elsewhere: who, how much, and why."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spills:
    """Bytes of a thread that a launch may spill, and why."""

    bytes: int
    reason: str


#: A few values that are stored before the loops and read after them cost nothing measurable.
SPILLS = Spills(32, "stored before the loops and read after them: no cost was measured")
#: Consumers that take turns: with so many spills a backward was measured faster than in an order without turns
#: (softcap at head_dim 128: 551 against 490 TFLOP/s on an H200, with 72 bytes of spills).
PINGPONG_SPILLS = Spills(72, "faster with turns and these spills than without turns")
