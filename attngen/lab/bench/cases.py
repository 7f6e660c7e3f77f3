"""The cases of dense calls: the shapes that kernels are measured on, and the floating-point operations of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from attngen.plan.naming import head_dim_label

#: Tokens of a call in all, and the sequence lengths that they are split into.
TOKENS, SEQLENS = 16384, (1024, 4096, 16384)

#: heads × head_dim: of the grid, where each query head has its KV head, and of variants, where four share one.
GRID_WIDTH, VARIANT_WIDTH, GROUP = 2048, 4096, 4

#: Variants of the grid: all that every peer knows.
ON_GRID = ("full", "causal")

#: The suites of dense calls: the grid, and variants at longer sequences with shared KV heads.
DENSE_SUITES = ("grid", "variants")

#: The directions, as plans name them: outputs of q, k and v, or the gradients of q, k and v from that of the output.
DIRECTIONS = ("forward", "backward")


@dataclass(frozen=True, slots=True)
class BenchCase:
    """Sizes of one call; queries and keys are equally many. ``suite`` is grid or variants.

    ``direction`` is one of ``DIRECTIONS``; the inputs of a backward pass are those of its forward pass.
    """

    suite: str
    variant: str
    dtype: str
    head_dim_qk: int
    head_dim_v: int
    batch: int
    seqlen: int
    heads: int
    kv_heads: int
    direction: str = "forward"

    @property
    def shape(self) -> str:
        """Head dims, dtype, and heads where several share a KV head, such as ``d128 bf16 h32/8``."""
        heads = "" if self.heads == self.kv_heads else f" h{self.heads}/{self.kv_heads}"
        return f"d{head_dim_label(self.head_dim_qk, self.head_dim_v)} {self.dtype}{heads}"

    @property
    def group(self) -> str:
        """The name that cases share which differ only in their lengths, such as ``causal d128 bf16 backward``."""
        return f"{self.variant} {self.shape}{'' if self.direction == 'forward' else f' {self.direction}'}"

    @property
    def name(self) -> str:
        """The case in a few words, such as ``causal d128 bf16 4k``."""
        return f"{self.group} {self.length}"

    @property
    def length(self) -> str:
        """The length of its sequences, such as ``4k``."""
        return f"{self.seqlen // 1024}k" if self.seqlen % 1024 == 0 else str(self.seqlen)

    def flops(self, pairs: float) -> float:
        """Operations of its products: a multiplication and an addition for each pair and each column.

        A forward pass has two products, a backward pass five: Q Kᵀ again, dO Vᵀ, and those that give dQ, dK and dV; 2.5
        times as many operations where the head dims are equal. ``pairs`` counts the visible pairs of a query and a key
        over all heads and sequences.
        """
        by_qk, by_v = (1, 1) if self.direction == "forward" else (3, 2)
        return 2 * pairs * (by_qk * self.head_dim_qk + by_v * self.head_dim_v)


def bench_cases(
    variant: str, dtype: str, head_dim_qk: int, head_dim_v: int, *, tokens: int = TOKENS, seqlens: Sequence[int] = (),
    direction: str = "forward", plain: str | None = None,
) -> tuple[BenchCase, ...]:  # fmt: skip
    """Cases of the kernels of one variant, dtype and head_dim, in one direction.

    ``plain`` is the variant without its largest logits, whose cases they are; by default the variant itself.

    Without ``seqlens`` the grid has those of SEQLENS that ``tokens`` allows, and a variant one sequence of all tokens.
    """
    sizes = []
    plain = plain or variant
    if plain in ON_GRID:
        heads = max(GRID_WIDTH // head_dim_qk, 1)
        lengths = seqlens or [length for length in SEQLENS if length <= tokens] or [tokens]
        sizes += [("grid", length, heads, heads) for length in lengths]
    if plain != "full":  # causal is there, too: the cost of others is relative to it
        kv_heads = max(VARIANT_WIDTH // head_dim_qk // GROUP, 1)
        sizes += [("variants", length, GROUP * kv_heads, kv_heads) for length in seqlens or [tokens]]
    return tuple(
        BenchCase(
            suite, variant, dtype, head_dim_qk, head_dim_v, max(tokens // length, 1), length, heads, kv_heads, direction
        )
        for suite, length, heads, kv_heads in sizes
    )  # fmt: skip
