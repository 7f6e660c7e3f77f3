"""How long a Hopper forward takes for a launch, a tile of work and a step, as measured; the runtime predicts calls from
these (``runtime.prediction``) and takes the kernel that should be done first.

``attngen bench SPEC --oracle`` measures the kernels of a spec on calls of many shapes and fits such rows to the times.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attngen.lang.host import written
from attngen.plan.traits import bands_of
from attngen.schema.expand import KernelSpec

#: Whose steps are alike: forwards whose consumers multiply by wgmma, and those whose blocks share keys.
FORWARD, SPLIT_KV = "forward", "split_kv"

#: Nanoseconds of a launch, in a CUDA graph.
LAUNCH = 2500.0


@dataclass(frozen=True, slots=True)
class Measured:
    """Nanoseconds of a tile of work and of a step of a kernel with so many consumers, keys of a tile and columns."""

    kind: str
    consumers: int
    tile_n: int
    columns: int  # the larger of those of K and of V
    tile: float
    step: float


#: Fitted to ``docs/notebook/tiles.md``, "Waves".
TABLE = (
    Measured(FORWARD, 1, 128, 128, 1500.0, 1000.0),
    Measured(FORWARD, 2, 128, 128, 1500.0, 1600.0),
    Measured(FORWARD, 3, 80, 128, 1500.0, 1420.0),
    Measured(FORWARD, 3, 64, 128, 1500.0, 1150.0),
    Measured(FORWARD, 1, 128, 64, 1500.0, 600.0),
    Measured(FORWARD, 2, 128, 64, 1500.0, 1100.0),
    Measured(FORWARD, 3, 128, 64, 1500.0, 1350.0),
    Measured(SPLIT_KV, 8, 16, 128, 3000.0, 200.0),
    Measured(SPLIT_KV, 8, 16, 64, 3000.0, 100.0),
)


def times_of(kind: str, consumers: int, tile_n: int, columns: int) -> tuple[float, float, float]:
    """Return the nanoseconds of a launch, a tile of work and a step.

    Of a kernel that was not measured they are those of the nearest one that was: first of as many consumers, then of as
    many columns, then of as many keys, with the step scaled by its pairs and columns.
    """
    rows = [row for row in TABLE if row.kind == kind]
    near = min(
        rows,
        key=lambda row: (abs(row.consumers - consumers), abs(row.columns - columns), abs(row.tile_n - tile_n)),
    )
    scale = consumers * tile_n * columns / (near.consumers * near.tile_n * near.columns)
    return LAUNCH, near.tile, round(near.step * scale, 1)


def visible_keys(spec: KernelSpec) -> tuple[tuple[Any, Any], ...]:
    """Return the intervals of keys that a tile of queries may see, as manifests hold them; none if all."""
    found = tuple((written(interval.lo), written(interval.hi)) for interval in bands_of(spec).visible)
    return () if (None, None) in found else found
