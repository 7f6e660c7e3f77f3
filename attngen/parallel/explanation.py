"""Explanation of a plan, in numbers and in words: work and bytes of each rank, and the least that either can be."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class VariantSummary:
    """One variant in a plan, by rank: tiles that its rows visit, and rows of K and V that it receives.

    ``least`` counts the rows that each rank sees and does not hold: no method that leaves keys where they are sends
    fewer.
    """

    variant: str
    layers: float
    method: str
    tiles: tuple[int, ...]
    received: tuple[int, ...]
    least: tuple[int, ...]

    @property
    def balance(self) -> float:
        """Tiles of the rank that has most, over the mean, which no plan can be below."""
        total = sum(self.tiles)
        return max(self.tiles) * len(self.tiles) / total if total else 1.0


@dataclass(frozen=True)
class Explanation:
    """The outcome of ``Plan.explain``; prints as text. ``row_bytes`` are those of K and V of one token."""

    seqlen: int
    tile: int
    chunks: int
    tokens: tuple[int, ...]
    row_bytes: int
    seconds: float  # predicted, of attention in all layers
    variants: tuple[VariantSummary, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the explanation as plain JSON."""
        return {**asdict(self), "balance": {shares.variant: shares.balance for shares in self.variants}}

    def __str__(self) -> str:
        ranks = len(self.tokens)
        tokens = f"{min(self.tokens)} to {max(self.tokens)}" if len(set(self.tokens)) > 1 else str(self.tokens[0])
        chunk = "1 chunk" if self.chunks == 1 else f"{self.chunks} chunks"
        lines = [
            f"{self.seqlen} tokens on {ranks} ranks: {tokens} each, in {chunk} of tiles of {self.tile}; predicted "
            f"{self.seconds * 1e3:.2f} ms of attention"
        ]
        for shares in self.variants:
            mean = sum(shares.tiles) / ranks
            sent, least = (sum(rows) * self.row_bytes / 2**20 for rows in (shares.received, shares.least))
            lines.append(
                f"  {shares.variant}: {shares.method}; tiles {max(shares.tiles)} at most, {mean:.1f} in the mean "
                f"({shares.balance:.3f} x); sends {sent:.1f} MiB of K and V, {least:.1f} are seen and not held"
            )
            lines += [
                f"    rank {rank}: {tiles} tiles, receives {rows} rows"
                for rank, (tiles, rows) in enumerate(zip(shares.tiles, shares.received, strict=True))
            ]
        return "\n".join(lines)
