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


@dataclass(frozen=True, slots=True)
class GradientMemory:
    """Bytes of shared memory of a kernel of the backward: two operands once, the two others once per stage."""

    kept: tuple[int, int]
    moved: tuple[int, int]
    stages: int
    names: tuple[str, str, str, str]

    @property
    def total(self) -> int:
        """The sum in bytes."""
        return sum(self.kept) + self.stages * sum(self.moved)

    def __str__(self) -> str:
        a, b, c, d = (f"{name} {size}" for name, size in zip(self.names, (*self.kept, *self.moved), strict=True))
        return f"{a} + {b} + {self.stages} stages x ({c} + {d})"


def gradient_memory(
    *,
    kept_rows: int,
    moved_rows: int,
    stages: int,
    width_qk: int,
    width_v: int,
    element_bytes: int,
    names: tuple[str, str, str, str],
) -> GradientMemory:
    """Return what a tile of a kernel of the backward needs: ``names`` of the operands, those that are kept first."""
    return GradientMemory(
        kept=(kept_rows * width_qk * element_bytes, kept_rows * width_v * element_bytes),
        moved=(moved_rows * width_qk * element_bytes, moved_rows * width_v * element_bytes),
        stages=stages,
        names=names,
    )
