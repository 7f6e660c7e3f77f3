"""Resources that a tile takes; a refusal shows the sum."""

from __future__ import annotations

from dataclasses import dataclass

from attngen.plan.operands import Operands


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
    *, tile_m: int, tile_n: int, stages: int, width_qk: int, width_v: int, operands: Operands
) -> SharedMemory:
    """Shared memory of a tile; widths are padded head dims in elements."""
    return SharedMemory(
        q=tile_m * width_qk * operands.q.bytes,
        k=tile_n * width_qk * operands.k.bytes,
        v=tile_n * width_v * operands.v.bytes,
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
    operands: Operands,
    by_keys: bool,
) -> GradientMemory:
    """Shared memory of a tile of a backward kernel, which keeps K and V if it is ``by_keys``, else Q and dO."""
    keys = ("K", width_qk * operands.k.bytes), ("V", width_v * operands.v.bytes)
    queries = ("Q", width_qk * operands.q.bytes), ("dO", width_v * operands.dout.bytes)
    kept, moved = (keys, queries) if by_keys else (queries, keys)
    (a, a_row), (b, b_row), (c, c_row), (d, d_row) = *kept, *moved
    return GradientMemory(
        kept=(kept_rows * a_row, kept_rows * b_row),
        moved=(moved_rows * c_row, moved_rows * d_row),
        stages=stages,
        names=(a, b, c, d),
    )
