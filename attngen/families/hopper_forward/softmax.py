"""Softmax choices that a score permits: a constant instead of the row max, a polynomial for tanh, fewer sums."""

from __future__ import annotations

import math

from attngen.dtypes import QUANTIZED_DTYPES
from attngen.lang.bands import Heads
from attngen.lang.bounded import bounding_maximum, score_bounds
from attngen.lang.folding import ONE, Logit, cap_scale, fold_variant, split_keys, subtract
from attngen.lang.powers import powers_of, special_functions
from attngen.plan.choices import refuse
from attngen.schema.kernel_spec import KernelSpec

_LOG2E = math.log2(math.e)

#: Values of the MUFU, and operations of products in 16 bits, in a clock of a multiprocessor: as the hardware has them
#: (docs/notebook/softmax_and_masks.md, "Polynomials where a score is bounded").
_SPECIAL_RATE, _PRODUCT_RATE = 16, 4096


def softmax_of(spec: KernelSpec, exponents: tuple[int, int] | None) -> tuple[str, float | None]:
    """The softmax, and for ``bounded`` the constant that replaces the row max, in units of log2 (else None).

    A spec that leaves it open gets ``bounded`` where the declarations of its variant bound the logits, and P stays
    within ``exponents`` with one constant for all rows; else ``first_max``. PlanError if it asks for ``bounded``
    and no constant suffices. Weights that are no softmax have one kind, and no choice.
    """
    if not spec.variant.has_lse:
        return spec.variant.weights, None
    if spec.variant.max_logits:
        return _with_max_logits(spec), None
    if spec.softmax not in (None, "bounded"):
        return spec.softmax, None
    constant = constant_row_max(spec, exponents)
    if constant is not None:
        return "bounded", constant
    if spec.softmax == "bounded":
        raise refuse(spec, "softmax", f"{_against(spec, exponents)}; allowed: first_max, lazy, exact_max")
    return "first_max", None


def _with_max_logits(spec: KernelSpec) -> str:
    """The softmax of kernels whose results have the largest logits: the others keep no maximum of all keys."""
    kinds = ("exact_max",) if spec.split_tiles else ("first_max", "exact_max")
    if spec.softmax not in (None, *kinds):
        reason = f"'{spec.softmax}' does not find the largest logit of all keys, which 'max_logits' asks for"
        raise refuse(spec, "softmax", f"{reason}; allowed: {', '.join(kinds)}")
    return spec.softmax or kinds[0]


def is_soft_capped(spec: KernelSpec) -> bool:
    """Whether logits are a multiple of tanh of a multiple of the products, and tanh may be approximated."""
    folded = _folded(spec)
    return folded is not None and cap_scale(folded, _heads(spec)) is not None


def takes_row_max(spec: KernelSpec) -> bool:
    """Whether the row max can be subtracted from a term of the score that is the same for all keys."""
    folded = _folded(spec)
    return folded is not None and folded.multiplier == ONE and subtract(split_keys(folded.value), ONE) is not None


def constant_row_max(spec: KernelSpec, exponents: tuple[int, int] | None) -> float | None:
    """The constant that replaces the row max of all rows, in units of log2: 0 if possible, else a whole number; None if
    there is none."""
    bounds = score_bounds(spec.variant.score, spec.variant.ranges)
    if bounds is None or exponents is None:
        return None
    (low, high), (least, most) = (end * _LOG2E for end in bounds), exponents
    constant = 0.0 if least <= low and high <= most else float(math.ceil(high - most))
    return constant if low - constant >= least else None


def terms_of(spec: KernelSpec, constant: float | None, columns: int) -> tuple[float, ...]:
    """Terms of the polynomial that takes the place of exp2 in tiles without a mask; none where exp2 stays.

    exp2 and the functions of the score share the MUFU. A polynomial pays where these take longer than the products, of
    K and V with ``columns`` in all.
    """
    folded = _folded(spec)
    if folded is None or constant is None or spec.scale_block or spec.dtype in QUANTIZED_DTYPES:
        return ()
    functions = special_functions(folded)
    if not functions or (1 + functions) / _SPECIAL_RATE <= 2 * columns / _PRODUCT_RATE:
        return ()
    powers = powers_of(folded, spec.variant.score, spec.variant.ranges, constant)
    return powers.terms if powers else ()


def _heads(spec: KernelSpec) -> Heads:
    return "packed" if spec.pack_gqa else "single"


def _folded(spec: KernelSpec) -> Logit | None:
    """The kernel's form of the logit; None without a score, or if it may not be rearranged."""
    if spec.variant.score is None or not spec.fast_math:
        return None
    return fold_variant(spec.variant, fast_math=True, heads=_heads(spec))


def _against(spec: KernelSpec, exponents: tuple[int, int] | None) -> str:
    """Reason why no constant can replace the row max of all rows."""
    if exponents is None:
        return f"'bounded' does not exist in {spec.dtype}"
    least, most = (end / _LOG2E for end in exponents)
    bounds = score_bounds(spec.variant.score, spec.variant.ranges)
    if bounds is not None:
        return (
            f"'bounded' takes logits of a range of {most - least:.3g} at most in {spec.dtype}, and the score may be "
            f"{bounds[0]:.4g} to {bounds[1]:.4g}"
        )
    limits = {scalar.name: bounding_maximum(spec.variant, scalar.name, most) for scalar in spec.variant.arguments}
    hint = [f"{name}: {{max: {limit:g}}}" for name, limit in limits.items() if limit is not None]
    return "'bounded' needs a score that is bounded whatever q and k are" + (
        f", as it is with {hint[0]} in scalars" if hint else ", such as a soft-capped one"
    )
