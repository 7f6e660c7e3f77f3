"""Conditions of a variant that its declared ranges decide before any kernel: always true, or never."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

from attngen.lang.bands import bands
from attngen.lang.facts import Facts
from attngen.lang.intervals import bounds
from attngen.lang.ir import Const, Expr, Op, Type, names, rewrite, walk
from attngen.lang.simplify import FALSE, boolean, make
from attngen.lang.variant import Variant

_CONNECTIVES = frozenset({"and", "or", "xor", "not", "select"})


@lru_cache(maxsize=256)  # the kernels of a spec share a few variants
def fold_conditions(variant: Variant) -> Variant:
    """Replace each condition that the declared ranges decide by its value; calls give the same results.

    A variant without such conditions is returned as it is. If no query sees any key in any call, the mask is false
    and there is no score: the kernel computes no products, and returns 0 and a log-sum-exp of -inf.
    """
    facts = Facts.of(variant)
    mask = _folded(variant.mask, facts)
    score = None if variant.score is None else _folded(variant.score, facts)
    if score == Const(-math.inf, Type.FLOAT) or not bands(mask, facts).visible:
        mask, score = FALSE, None
    if (mask, score) == (variant.mask, variant.score):
        return variant
    present = {node for root in (mask, score) if root is not None for node in walk(root)}
    let = tuple((name, value) for name, value in variant.let if value in present)
    return fold_conditions(replace(variant, mask=mask, score=score, let=let))


def reads_products(variant: Variant) -> bool:
    """Whether the logit depends on q and k at all; a score such as ``-slope * abs(q - kv)`` does not."""
    return variant.score is None or "s" in names(variant.score)


def _folded(expr: Expr, facts: Facts) -> Expr:
    """Replace comparisons of integers that are always true or always false; floats may be NaN, which compares false."""

    def rule(node: Expr) -> Expr | None:
        if not isinstance(node, Op):
            return None
        if node.op in _CONNECTIVES:
            return make(node.op, *node.args) if any(isinstance(arg, Const) for arg in node.args) else None
        if node.type is Type.BOOL and all(arg.type is not Type.FLOAT for arg in node.args):
            must, may = bounds(node, facts)
            return boolean(bool(may)) if must == may else None
        return None

    return rewrite(expr, rule)
