"""Calls of little work, and the larger ones that the choice of a kernel is compared on beside them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

DTYPE, ELEMENT_BYTES = "bf16", 2

#: Variants of the calls, and those of them whose visible keys follow from the shape.
VARIANTS, FOLLOWED = ("full", "causal", "sliding_window"), ("full", "causal")

#: Keys that a window shows.
WINDOW = 1024


@dataclass(frozen=True)
class Shape:
    """One call. Queries stand at the ends of their sequences."""

    variant: str
    head_dim: int
    batch: int
    heads: int
    kv_heads: int
    seqlen_q: int
    seqlen_k: int

    @cached_property
    def name(self) -> str:
        """The call in a few words, such as ``causal d128 b1 32/8 128 at 8k``."""
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        length = _short(self.seqlen_k)
        if self.seqlen_q != self.seqlen_k:
            length = f"{_short(self.seqlen_q)} at {length}"
        return f"{self.variant} d{self.head_dim} b{self.batch} {heads} {length}"

    @cached_property
    def pairs(self) -> int:
        """Pairs of a query and a key that the mask shows, over all heads and sequences."""
        first = self.seqlen_k - self.seqlen_q + 1  # keys of the first query, with a causal mask
        if self.variant == "full":
            each = self.seqlen_q * self.seqlen_k
        elif self.variant == "causal":
            each = self.seqlen_q * (first + self.seqlen_k) // 2
        else:
            each = sum(min(first + row, WINDOW) for row in range(self.seqlen_q))
        return self.batch * self.heads * each

    @property
    def flops(self) -> int:
        """Floating-point operations of its two products."""
        return 4 * self.head_dim * self.pairs

    @property
    def input_bytes(self) -> int:
        """Bytes of q, k and v."""
        rows = self.seqlen_q * self.heads + 2 * self.seqlen_k * self.kv_heads
        return self.batch * rows * self.head_dim * ELEMENT_BYTES

    @property
    def arguments(self) -> dict[str, Any]:
        """The variant's own arguments."""
        return {"window": WINDOW} if self.variant == "sliding_window" else {}

    def to_dict(self) -> dict[str, Any]:
        """The call in reports."""
        return {"name": self.name, **asdict(self), "visible_pairs": self.pairs, "flops": self.flops}


def _short(length: int) -> str:
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)


def small_shapes() -> tuple[Shape, ...]:
    """The calls of the suite ``small``."""
    shapes = []
    for variant in ("full", "causal"):
        for head_dim in (64, 128):
            shapes += [Shape(variant, head_dim, 1, 16, 16, n, n) for n in (256, 512, 1024, 2048)]
            shapes += [
                Shape(variant, head_dim, 1, heads, kv_heads, n, n)
                for heads, kv_heads, n in ((32, 8, 1024), (8, 1, 1024), (16, 16, 777))
            ]
            shapes += [Shape(variant, head_dim, 1, 32, kv_heads, 128, 8192) for kv_heads in (8, 32)]
    return tuple(shapes)


def oracle_shapes() -> tuple[Shape, ...]:
    """The calls on which the kernel taken is compared with the fastest one: sixty, of one tile to many waves."""
    return tuple(dict.fromkeys(_oracle_shapes()))


def _oracle_shapes() -> Iterator[Shape]:
    for n in (256, 384, 512, 777, 1024, 1536, 2048, 3000, 4096, 8192):
        yield Shape("full", 128, 1, 16, 16, n, n)
    for n in (256, 512, 1024, 2048, 4096, 8192):
        yield Shape("causal", 128, 1, 16, 16, n, n)
    for variant in ("full", "causal"):
        for n in (1000, 2048, 4096):
            yield Shape(variant, 128, 1, 32, 8, n, n)
        for n in (512, 4096):
            yield Shape(variant, 128, 1, 8, 1, n, n)
        for batch, heads, n in ((4, 16, 512), (4, 16, 2000), (8, 32, 1024)):
            yield Shape(variant, 128, batch, heads, heads, n, n)
        for heads, kv_heads, m, n in ((16, 16, 128, 8192), (32, 8, 128, 8192), (8, 1, 256, 4096), (32, 8, 512, 8192)):
            yield Shape(variant, 128, 1, heads, kv_heads, m, n)
        for n in (256, 512, 1024, 2048, 4096):
            yield Shape(variant, 64, 1, 32, 32, n, n)
        yield Shape(variant, 64, 4, 16, 16, 777, 777)
        yield Shape(variant, 64, 1, 32, 8, 1024, 1024)
        yield Shape(variant, 64, 1, 32, 8, 128, 8192)
    for n in (2048, 4096, 16384):
        yield Shape("sliding_window", 128, 1, 32, 8, n, n)
    yield Shape("sliding_window", 64, 1, 32, 8, 4096, 4096)
