"""Whether a number added to all logits of a row changes what a softmax makes of them."""

from __future__ import annotations

from attngen.lang.ir import Expr, Op, Var, names
from attngen.lang.variant import Variant

#: Features beside which a softmax of logits that are all larger by a number is the same.
SERVES = ("mask", "score", "dropout", "keys")


def shifts_with_logits(variant: Variant) -> bool:
    """Whether a number added to all logits of a row leaves the output as it is: the score is ``s``, or ``s`` and what
    does not depend on it, and the weights are those of a softmax in which no sink takes part."""
    return not variant.beyond(SERVES) and (variant.score is None or _adds_to_s(variant.score))


def _adds_to_s(score: Expr) -> bool:
    if isinstance(score, Var):
        return score.name == "s"
    if not isinstance(score, Op) or score.op not in ("add", "sub"):
        return False
    first, second = score.args
    if "s" not in names(second):
        return _adds_to_s(first)
    return score.op == "add" and "s" not in names(first) and _adds_to_s(second)
