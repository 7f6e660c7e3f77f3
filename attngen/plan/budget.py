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
    *, tile_m: int, tile_n: int, stages: int, width_qk: int, width_v: int, kept_bytes: int, operands: Operands
) -> SharedMemory:
    """Shared memory of a tile; widths are padded head dims in elements, of which those of Q have ``kept_bytes``."""
    return SharedMemory(
        q=tile_m * width_qk * kept_bytes,
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
    kept_bytes: int,
    operands: Operands,
    by_keys: bool,
) -> GradientMemory:
    """Shared memory of a tile of a backward kernel, which keeps K and V if it is ``by_keys``, else Q and dO, whose
    elements have ``kept_bytes`` there."""
    names, moved = ("K", "V", "Q", "dO"), (operands.q, operands.dout)
    if not by_keys:
        names, moved = ("Q", "dO", "K", "V"), (operands.k, operands.v)
    return GradientMemory(
        kept=(kept_rows * width_qk * kept_bytes, kept_rows * width_v * kept_bytes),
        moved=(moved_rows * width_qk * moved[0].bytes, moved_rows * width_v * moved[1].bytes),
        stages=stages,
        names=names,
    )


@dataclass(frozen=True, slots=True)
class TangentMemory:
    """Bytes of shared memory of a forward-mode derivative: Q and its tangent once, and K and V, with theirs if it
    ``moves_keys``, once per stage."""

    rows: int
    keys: int
    stages: int
    moves_keys: bool

    @property
    def total(self) -> int:
        """The sum in bytes."""
        return self.rows + self.stages * self.keys

    def __str__(self) -> str:
        keys = "K, dK, V and dV" if self.moves_keys else "K and V"
        return f"Q and dQ {self.rows} + {self.stages} stages x {keys} {self.keys}"


def tangent_memory(
    *, tile_m: int, tile_n: int, stages: int, width_qk: int, width_v: int, kept_bytes: int, operands: Operands,
    moves_keys: bool,
) -> TangentMemory:  # fmt: skip
    """Shared memory of a tile of a forward-mode derivative; widths as in ``shared_memory``."""
    keys = tile_n * (width_qk * operands.k.bytes + width_v * operands.v.bytes)
    return TangentMemory(2 * tile_m * width_qk * kept_bytes, keys * (2 if moves_keys else 1), stages, moves_keys)
