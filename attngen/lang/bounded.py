"""Scores that are bounded whatever queries and keys are: then a softmax needs no running max.

Soft-capping is one, ``cap * tanh(s / cap)`` where ``cap`` has a largest value; so are clamped scores, and sums and
products of such terms. Bounds are those of the interval analysis, with the product ``s`` as a number of any size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from attngen.lang.intervals import bounds
from attngen.lang.ir import Expr
from attngen.lang.ranges import Range
from attngen.lang.variant import Variant

#: Search range for the largest value of a scalar.
_MOST, _LEAST = 2.0**20, 2.0**-20


def score_bounds(score: Expr | None, ranges: Mapping[str, Range]) -> Range | None:
    """Return inclusive bounds of a score for every product that is not NaN, in natural units; None if it has none.

    ``ranges`` are those that a variant declares, which calls are held to: an element of a tensor, or a scalar, is
    bounded only if it has a range.
    """
    if score is None:
        return None
    low, high = bounds(score, {**ranges, "s": (-math.inf, math.inf)})
    return (low, high) if math.isfinite(low) and math.isfinite(high) else None


def bounding_maximum(variant: Variant, name: str, most: float) -> float | None:
    """Return the largest ``max`` of a scalar, to two digits, with which a score stays within ``most`` on both sides.

    None if none does, or if the scalar needs none. For messages, which say what a declaration lacks.
    """
    if variant.score is None or score_bounds(variant.score, variant.ranges) is not None:
        return None
    least = variant.ranges[name][0]

    def holds(largest: float) -> bool:
        limits = score_bounds(variant.score, {**variant.ranges, name: (min(least, largest), largest)})
        return limits is not None and max(-limits[0], limits[1]) <= most

    low, high = max(least, _LEAST), _MOST
    if not low < high or not holds(low):
        return None
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if holds(middle) else (low, middle)
    digits = 10.0 ** (math.floor(math.log10(low)) - 1)
    return float(f"{math.floor(low / digits) * digits:.2g}")
