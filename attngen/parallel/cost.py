"""Cost model of plans: the time of tiles against the time of bytes."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from attngen.errors import CallError


@dataclass(frozen=True)
class Cost:
    """Shapes of a model and speeds of its GPUs, from which a plan predicts times.

    ``heads``, ``kv_heads``, ``head_dim`` and ``itemsize`` (bytes of an element) are those of q, k and v;
    ``passes`` counts a forward as 1, and a forward with its backward as 3.5. ``tflops`` is the speed of attention on
    one GPU, ``gigabytes`` how many GB/s a GPU receives from the others. The defaults are round figures of a Hopper GPU
    with NVLink; for slower links pass their bandwidth, such as 40 for 400 Gb/s.
    """

    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    itemsize: int = 2
    passes: float = 1.0
    tflops: float = 600.0
    gigabytes: float = 250.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise CallError(f"Cost: {field.name} must be a positive number, got {value!r}")

    def token_bytes(self) -> int:
        """Bytes of one token's K and V."""
        return int(2 * self.kv_heads * self.head_dim * self.itemsize)

    def of_tiles(self, tiles: float, tile: int) -> float:
        """Seconds that tiles of ``tile`` queries and keys take, of all heads."""
        return tiles * self.passes * 4.0 * tile * tile * self.head_dim * self.heads / (self.tflops * 1e12)

    def of_tokens(self, tokens: float) -> float:
        """Seconds that K and V of so many tokens take to arrive; with a backward their gradients go back."""
        return tokens * self.token_bytes() * (1.0 if self.passes == 1 else 2.0) / (self.gigabytes * 1e9)

    def rows_of_heads(self, tokens: np.ndarray, ranks: int) -> np.ndarray:
        """Rows of K and V that ranks with so many tokens receive when they exchange rows for heads, and back."""
        return tokens * ((ranks - 1) / ranks * (self.heads + self.kv_heads) / self.kv_heads)
