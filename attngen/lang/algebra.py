"""Shapes of a score that a kernel can do without evaluating it per element."""

from __future__ import annotations

from attngen.lang.ir import Const, Expr, Op, Type, Var, names
from attngen.lang.promotion import typed

_S = Var("s", Type.FLOAT)
_ZERO = Const(0.0, Type.FLOAT)


def split_logit(score: Expr | None) -> tuple[Expr, Expr | None] | None:
    """Return ``(s, r)`` if the score is ``s + r`` with r free of s (None: zero), else None.

    Sees through sums, differences and a choice between such sums. A factor of s (``2 * s``) gives None, and so
    does an arm that drops s: ``s if c else -inf`` is a choice, not a sum.
    """
    if score is None:
        return _S, None
    found, rest = _split(score)
    return (_S, rest) if found else None


def _split(node: Expr) -> tuple[bool, Expr | None]:
    """Return whether a node is ``s`` plus something free of s, and that something (None is zero)."""
    if node == _S:
        return True, None
    match node:
        case Op(op="add", args=(a, b)):
            for part, other in ((a, b), (b, a)):
                found, rest = _split(part)
                if found and "s" not in names(other):
                    return True, _add(rest, other) if part is a else _add(other, rest)
        case Op(op="sub", args=(a, b)) if "s" not in names(b):
            found, rest = _split(a)
            if found:
                negative = typed("neg", [b])
                return True, negative if rest is None else Op("sub", (rest, b), Type.FLOAT)
        case Op(op="select", args=(condition, a, b)) if "s" not in names(condition):
            (yes, left), (no, right) = _split(a), _split(b)
            if yes and no and (left is not None or right is not None):
                return True, Op("select", (condition, left or _ZERO, right or _ZERO), Type.FLOAT)
            return yes and no, None
    return False, None


def _add(a: Expr | None, b: Expr | None) -> Expr | None:
    if a is None or b is None:
        return b if a is None else a
    return Op("add", (a, b), Type.FLOAT)
