"""Arithmetic of the resources that a tile takes; a refusal shows its sum."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Bytes of shared memory that the operands of one block take: Q once, K and V once per stage."""

    q: int
    k: int
    v: int
    stages: int

    @property
    def total(self) -> int:
        """The sum in bytes."""
        return self.q + self.stages * (self.k + self.v)

    def __str__(self) -> str:
        return f"Q {self.q} + {self.stages} stages x (K {self.k} + V {self.v})"


def shared_memory(
    *, tile_m: int, tile_n: int, stages: int, width_qk: int, width_v: int, element_bytes: int
) -> SharedMemory:
    """Return what a tile needs: widths are padded head dims in elements."""
    return SharedMemory(
        q=tile_m * width_qk * element_bytes,
        k=tile_n * width_qk * element_bytes,
        v=tile_n * width_v * element_bytes,
        stages=stages,
    )
