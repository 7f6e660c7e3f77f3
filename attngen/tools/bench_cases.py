"""The cases of a race: the shapes that kernels are measured on, and the floating-point operations of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from attngen.plan.naming import head_dim_label

#: Tokens of a call in all, and the lengths of the sequences that they make up.
TOKENS, SEQLENS = 16384, (1024, 4096, 16384)

#: heads × head_dim: of the grid, where each query head has its KV head, and of variants, where four share one.
GRID_WIDTH, VARIANT_WIDTH, GROUP = 2048, 4096, 4

#: Variants that are raced over the grid: all that every peer knows.
ON_GRID = ("full", "causal")


@dataclass(frozen=True, slots=True)
class BenchCase:
    """Sizes of one call; queries and keys are equally many. ``suite`` is grid or variants."""

    suite: str
    variant: str
    dtype: str
    head_dim_qk: int
    head_dim_v: int
    batch: int
    seqlen: int
    heads: int
    kv_heads: int

    @property
    def group(self) -> str:
        """What the cases share that differ in their lengths only, such as ``causal d128 bf16``."""
        heads = "" if self.heads == self.kv_heads else f" h{self.heads}/{self.kv_heads}"
        return f"{self.variant} d{head_dim_label(self.head_dim_qk, self.head_dim_v)} {self.dtype}{heads}"

    @property
    def name(self) -> str:
        """The case in a word or four, such as ``causal d128 bf16 4k``."""
        length = f"{self.seqlen // 1024}k" if self.seqlen % 1024 == 0 else str(self.seqlen)
        return f"{self.group} {length}"

    def flops(self, pairs: float) -> float:
        """Return the operations of a forward: a multiplication and an addition for each pair and each column.

        ``pairs`` counts the visible pairs of a query and a key over all heads and sequences.
        """
        return 2 * pairs * (self.head_dim_qk + self.head_dim_v)


def bench_cases(
    variant: str, dtype: str, head_dim_qk: int, head_dim_v: int, *, tokens: int = TOKENS, seqlens: Sequence[int] = ()
) -> tuple[BenchCase, ...]:
    """Return the cases of the kernels of one variant, dtype and head_dim.

    Without ``seqlens`` the grid has those of SEQLENS that ``tokens`` allows, and a variant one sequence of all tokens.
    """
    found = []
    if variant in ON_GRID:
        heads = max(GRID_WIDTH // head_dim_qk, 1)
        lengths = seqlens or [length for length in SEQLENS if length <= tokens] or [tokens]
        found += [("grid", length, heads, heads) for length in lengths]
    if variant != "full":  # causal is there too: what the others cost is read against it
        kv_heads = max(VARIANT_WIDTH // head_dim_qk // GROUP, 1)
        found += [("variants", length, GROUP * kv_heads, kv_heads) for length in seqlens or [tokens]]
    return tuple(
        BenchCase(
            suite, variant, dtype, head_dim_qk, head_dim_v, max(tokens // length, 1), length, heads, kv_heads
        )
        for suite, length, heads, kv_heads in found
    )  # fmt: skip
