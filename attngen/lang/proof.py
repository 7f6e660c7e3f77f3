"""Order proofs between integer expressions, so that emitted bounds have no needless ``min`` or ``max``.

A true statement may go unproven; what is proven holds for every tile and every run-time value.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, product

from attngen.lang.facts import Facts, index
from attngen.lang.intervals import Numbers, evaluate
from attngen.lang.ir import Const, Expr, Load, Op, Search, Type, Var, walk
from attngen.lang.ranges import INT32
from attngen.lang.simplify import Linear, integer, linear, make

#: Limits of the search for a proof: replacements in a row, sums looked at, size of an expression.
_DEPTH, _STEPS, _NODES = 5, 100, 60
#: Sums looked at for a whole mask, so that one of many comparisons, whose pairs are all tried, takes seconds; shipped
#: masks take at most 706. Beyond that, bounds are computed in the kernel, or tiles are classified.
_STEPS_OF_ALL = 5_000

#: The largest element that a tensor of integers may hold.
_MOST = integer(int(INT32[1]))


def _plus(name: str, constant: int = 0) -> Expr:
    return make("add", index(name), integer(constant))


#: Facts about the box: each corner with a symbol that is at most (LOWER) or at least (UPPER) as large.
_LOWER: dict[str, Expr] = {
    "q_hi": _plus("q_lo"),
    "q_pos_hi": _plus("q_pos_lo"),
    "kv_hi": _plus("kv_lo"),
    "h_hi": _plus("h_lo"),
    "q_pos_lo": make("sub", index("seqlen_k"), index("seqlen_q")),
}
_UPPER: dict[str, Expr] = {
    "q_lo": _plus("q_hi"),
    "q_pos_lo": _plus("q_pos_hi"),
    "kv_lo": _plus("kv_hi"),
    "h_lo": _plus("h_hi"),
    "q_hi": _plus("seqlen_q", -1),
    "q_pos_hi": _plus("seqlen_k", -1),
    "q_pos": _plus("seqlen_k", -1),
    "q": _plus("seqlen_q", -1),
    "kv": _plus("seqlen_k", -1),
    "kv_hi": _plus("seqlen_k", -1),
    "h_hi": _plus("heads", -1),
}


def larger(expr: Expr, nodes: int) -> bool:
    """Whether an expression has more than ``nodes`` nodes."""
    return next(islice(walk(expr), nodes, None), None) is not None


class Proof:
    """Proofs under the facts of one variant."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._numbers = Numbers(facts)
        self._known: dict[tuple[Expr, Expr], bool] = {}
        self._steps = 0
        self._left = _STEPS_OF_ALL

    def at_most(self, x: Expr, y: Expr) -> bool:
        """Whether ``x <= y`` is certain; both are INT."""
        known = self._known.get((x, y))
        if known is None:
            self._steps = _STEPS
            beyond = self._left <= 0 or larger(x, _NODES) or larger(y, _NODES)
            known = self._known[x, y] = not beyond and self._less(x, y, _DEPTH)
        return known

    def _nonnegative(self, total: Linear, depth: int) -> bool:
        self._steps -= 1
        self._left -= 1
        if self._least(total) >= 0:
            return True
        if depth <= 0 or self._steps < 0:
            return False
        if any(self._nonnegative(reduced, depth - 1) for reduced in self._cancelled(total, depth)):
            return True
        for term, coefficient in total.terms.items():
            rest = Linear({t: c for t, c in total.terms.items() if t != term}, total.constant)
            for alternatives in self._replacements(term, coefficient, depth):
                sums = (rest.plus(linear(e, expand=True), c) for e, c in alternatives)
                if all(self._nonnegative(s, depth - 1) for s in sums):
                    return True
        return False

    def _least(self, total: Linear) -> float:
        least: float = total.constant
        for term, coefficient in total.terms.items():
            lo, hi = evaluate(term, self._numbers)
            least += coefficient * (lo if coefficient > 0 else hi)
        return -math.inf if least != least else least

    def _cancelled(self, total: Linear, depth: int) -> Iterator[Linear]:
        """Yield smaller sums: each without a pair ``b - a`` for which ``a <= b`` is certain."""
        for b, positive in total.terms.items():
            for a, negative in total.terms.items():
                if positive > 0 > negative and type(a) is type(b):
                    count = min(positive, -negative)
                    rest = total.plus(Linear({b: 1, a: -1}), -count)
                    if self._quotients_ordered(a, b, rest.constant // count, depth):
                        yield Linear(rest.terms, 0)
                    elif self._ordered(a, b, depth):
                        yield rest

    def _quotients_ordered(self, a: Expr, b: Expr, slack: int, depth: int) -> bool:
        """Whether ``b // n - a // n + slack >= 0``, which ``b + slack * n >= a`` implies."""
        match a, b:
            case Op(op="floordiv", args=(x, n)), Op(op="floordiv", args=(y, m)) if n == m and self._positive(n):
                return self._less(x, make("add", y, make("mul", n, integer(slack))), depth)
        return False

    def _ordered(self, a: Expr, b: Expr, depth: int) -> bool:
        match a, b:
            case Op(op="mul", args=(x, y)), Op(op="mul", args=(u, v)):
                for p, n, q, m in ((x, y, u, v), (x, y, v, u), (y, x, u, v), (y, x, v, u)):
                    if n == m and evaluate(n, self._numbers)[0] >= 0 and self._less(p, q, depth):
                        return True
            case Search(), Search() if replace(a, value=b.value, strict=b.strict) == b:
                return a.strict <= b.strict and self._less(a.value, b.value, depth)
            case Load(tensor=t, indices=i), Load(tensor=u, indices=j) if t == u:
                axis = self._facts.monotone_axis(t)
                apart = [n for n, (k, m) in enumerate(zip(i, j, strict=True)) if k != m]
                if axis is None or apart != [axis]:
                    return False
                length, _ = self._facts.extent(t, axis)
                above = self._less(integer(0), i[axis], depth) and self._less(i[axis], j[axis], depth)
                return above and self._readable(j[axis], length, depth)
        return False

    def _readable(self, position: Expr, length: Expr, depth: int) -> bool:
        """Whether a position lies in a tensor that is not empty; one outside would read 0."""
        last = make("sub", length, integer(1))
        match position:
            case Op(op="max", args=(p, Const(value=0))):
                return self._less(p, last, depth)
        return self._less(integer(0), position, depth) and self._less(position, last, depth)

    def _less(self, x: Expr, y: Expr, depth: int) -> bool:
        return self._nonnegative(linear(y, expand=True).plus(linear(x, expand=True), -1), depth)

    def _positive(self, n: Expr) -> bool:
        return evaluate(n, self._numbers)[0] > 0

    def _replacements(self, term: Expr, coefficient: int, depth: int) -> Iterator[list[tuple[Expr, int]]]:
        """Yield ways to make ``coefficient * term`` smaller: it is at least the least of the listed products."""
        up = coefficient < 0  # then a term that is larger makes the product smaller
        match term:
            case Var(name=name):
                bound = (_UPPER if up else _LOWER).get(name)
                if bound is not None:
                    yield [(bound, coefficient)]
            case Op(op="min" | "max" as op, args=(a, b)):
                if (op == "max") == up:
                    yield [(a, coefficient), (b, coefficient)]
                else:
                    yield [(a, coefficient)]
                    yield [(b, coefficient)]
            case Op(op="select", args=(_, a, b)):
                yield [(a, coefficient), (b, coefficient)]
            case Op(op="mod", args=(_, n)) if up and self._positive(n):
                yield [(make("sub", n, integer(1)), coefficient)]
            case Op(op="floordiv", args=(x, Const(value=n))) if n > 0 and coefficient % n == 0:
                yield [(self._multiple(x, Const(n, Type.INT), up), coefficient // int(n))]
            case Op(op="mul", args=(a, b)):
                for quotient, n in ((a, b), (b, a)):
                    match quotient:
                        case Op(op="floordiv", args=(x, d)) if d == n and self._positive(n):
                            yield [(self._multiple(x, n, up), coefficient)]
            case Search(value=Op(op="select", args=(_, a, b))):
                of_ends = (list(self._search_bounds(replace(term, value=end), up, depth - 1)) for end in (a, b))
                for bounds in product(*of_ends):
                    yield [(bound, coefficient) for bound in bounds]
            case Search():
                for bound in self._search_bounds(term, up, depth - 1):
                    yield [(bound, coefficient)]

    @staticmethod
    def _multiple(x: Expr, n: Expr, up: bool) -> Expr:
        """Return a bound of ``x // n * n``, which is in (x - n, x]."""
        return x if up else make("add", make("sub", x, n), integer(1))

    def _search_bounds(self, term: Search, up: bool, depth: int) -> Iterator[Expr]:
        """Yield bounds of a search for an element of the tensor itself: the index of that element."""
        value = term.value
        if up or (term.strict and value == _MOST):  # no element is larger
            yield term.length
        if not isinstance(value, Load) or value.tensor != term.tensor or term.strict == up:
            return
        pairs = zip(value.indices, term.indices, strict=True)
        if any(i != j for n, (i, j) in enumerate(pairs) if n != term.axis):
            return
        position = value.indices[term.axis]
        if not self._readable(position, term.length, depth):
            return
        match position:
            case Op(op="max", args=(p, Const(value=0))) if not up:  # an empty tensor has no element at 0
                yield make("add", p, integer(1))
            case _:
                yield position if up else make("add", position, integer(1))
