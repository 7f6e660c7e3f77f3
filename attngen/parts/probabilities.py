"""Rules that keep P within its dtype."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Probabilities:
    """Rules that keep P within its dtype.

    ``recompute_above``: a lane's sum of probabilities above which the row max is recomputed. ``raise_above``: growth of
    the running max at which a lazy row max follows. ``peak``: log2 of P of the largest logit when the row max is set.
    ``lane_sum_log2``: log2 of the most that a lane may sum after that, for dtypes whose largest P is not far above
    ``peak``: a partial first tile, or many equal logits, would often exceed it; 0: no limit. ``exponents``: log2 of the
    least and of the largest P of a row where a constant replaces the row max; None: there is no such kernel.
    """

    recompute_above: str
    raise_above: str = "8.0f"
    peak: int = 0
    lane_sum_log2: int = 0
    exponents: tuple[int, int] | None = None


#: Sums stay far below the largest float16, and below float32's square root for their own sake. A constant instead of
#: the row max leaves bfloat16 room for the sums of 2^20 keys and for values of 2^26, and P of float16 normal.
PROBABILITIES = {
    "bf16": Probabilities("0x1p40f", exponents=(-80, 80)),
    "fp16": Probabilities("0x1p14f", exponents=(-14, 14)),
}
