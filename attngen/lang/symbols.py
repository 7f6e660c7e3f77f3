"""The algebra of interval rules whose endpoints are expressions over the corners of a box."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from attngen.lang.facts import Facts
from attngen.lang.interval_rules import Interval
from attngen.lang.intervals import EXACT, bounds, evaluate, exact
from attngen.lang.ir import Const, Expr, Load, Op, Search, Type, Var, names, walk
from attngen.lang.proof import Proof, larger
from attngen.lang.ranges import INT32
from attngen.lang.simplify import COMPLEMENT, FALSE, FOLD, TRUE, Linear, boolean, integer, make

#: Endpoints of an unbounded interval of expressions.
_LOWEST, _HIGHEST = Const(-math.inf, Type.FLOAT), Const(math.inf, Type.FLOAT)

#: Most nodes in an endpoint of an interval, checked at every step: remainders and cases double it at each level.
NODES = 200

#: Minimum and maximum of two conditions, since False <= True.
_OF_BOOLS = {"min": "and", "max": "or"}

_ORDERS = ("lt", "le", "gt", "ge")


class Symbols:
    """Endpoints are expressions over the corners of a box; ``_LOWEST`` and ``_HIGHEST`` mean unbounded.

    ``corners`` maps the names that vary over the box to their least and greatest value; floats among them are not NaN.
    An endpoint of more than ``nodes`` is given up.
    """

    unbounded: Interval = (_LOWEST, _HIGHEST)
    false, true = FALSE, TRUE

    def __init__(self, facts: Facts, corners: Mapping[str, tuple[Expr, Expr]], nodes: int = NODES) -> None:
        self._facts, self._nodes = facts, nodes
        self._corners = corners
        #: By the ends of integer statistics, their residues.
        self._residues = {
            ends: Var(f"{name}.residues", Type.INT)
            for name, ends in corners.items()
            if ends[0] == Var(f"{name}.least", Type.INT)
        }
        self._proof = Proof(facts)
        self.memo: dict[Expr, Interval] = {}
        #: Whether an endpoint was given up since it would take too much code to compute.
        self.dropped = False

    @staticmethod
    def literal(value: int) -> Expr:
        """Return the endpoint that stands for an integer."""
        return integer(value)

    def related(self, a: Expr, b: Expr) -> bool:
        """Whether two expressions vary together."""
        return bool(self.varies(a) & self.varies(b))

    def exact(self, expr: Expr) -> bool:
        """Whether a float is never NaN, by its form and that of the corners."""
        return exact(expr, self._corners.keys())

    def varies(self, node: Expr) -> frozenset[str]:
        """Return the names in an expression that vary over the box."""
        return names(node) & self._corners.keys()

    def leaf(self, node: Expr) -> Interval | None:
        """Return the interval of what does not vary, or is a corner; None for an operator to take apart."""
        if isinstance(node, Var) and node.name in self._corners:
            return self._corners[node.name]
        if node in self.unbounded:  # the number inf, which must not be taken for "no bound"
            return self.unbounded
        if self.varies(node) or any(_rounds(n) for n in walk(node)):
            return None
        return (node, node)

    def load(self, node: Load, indices: tuple[Interval, ...]) -> Interval:
        """Return the elements at the ends of the box for a monotone tensor, the declared range for any other."""
        if node.type is not Type.INT:
            return (FALSE, TRUE) if node.type is Type.BOOL else self.unbounded
        lo, hi = self._facts.ranges.get(node.tensor, INT32)
        declared = (integer(int(lo)), integer(int(hi)))
        axis = self._facts.monotone_axis(node.tensor)
        if axis is None or any(not self.is_point(i) for n, i in enumerate(indices) if n != axis):
            return declared
        first, last, inside = self._inside(node.tensor, axis, indices[axis])

        def at(position: Expr) -> Expr:
            return replace(node, indices=(*node.indices[:axis], position, *node.indices[axis + 1 :]))

        return at(first), self.call("select", inside, at(last), declared[1])

    def _inside(self, tensor: str, axis: int, box: Interval) -> tuple[Expr, Expr, Expr]:
        """Move the ends of a box into the extent; the condition says whether the last end bounds the whole box.

        Rows whose own index lies outside an extent are guarded, but a sequence may be shorter than the tensor.
        """
        extent, exact = self._facts.extent(tensor, axis)
        last = make("sub", extent, integer(1))
        low, high = (self.call("max", self.call("min", end, last), integer(0)) for end in box)
        if exact:
            return low, high, TRUE
        return self.call("max", box[0], integer(0)), high, self.call("le", box[1], last)

    def search(self, node: Search, value: Interval, length: Interval) -> Interval:
        """Search for both ends of the value: a greater value has no smaller position."""
        if not self.is_point(length) or any(self.varies(i) for i in node.indices):
            return (integer(0), length[1])
        lo, hi = (
            replace(node, value=end) if end not in self.unbounded else other
            for end, other in zip(value, (integer(0), node.length), strict=True)
        )
        return lo, hi

    def truncation(self, value: Expr) -> Interval:
        """Return the int32 of both ends of a float that is not rounded, else numbers."""
        if self.exact(value):
            ends = evaluate(value, self)
            if not any(end in self.unbounded for end in ends):
                return make("to_int", ends[0]), make("to_int", ends[1])
        low, high = bounds(Op("to_int", (value,), Type.INT), self._facts)
        return integer(int(low)), integer(int(high))

    def paired(self, total: Linear) -> tuple[Linear, Interval]:
        """Return the sum as it is: symbols of one sequence cancel by themselves."""
        return total, (integer(0), integer(0))

    def refined(self, node: Expr, interval: Interval) -> Interval:
        """Drop endpoints that would take too much code to compute."""
        if not any(larger(end, self._nodes) for end in interval):
            return interval
        self.dropped = True
        return (FALSE, TRUE) if node.type is Type.BOOL else self.unbounded

    def value(self, end: Expr) -> float | None:
        """Return an endpoint as a number, if it is one."""
        return end.value if isinstance(end, Const) else None

    def holds(self, op: str, x: Expr, y: Expr) -> bool:
        """Whether a comparison (lt, le, gt, ge) of two endpoints is certain."""
        known = make(op, x, y) if x not in self.unbounded and y not in self.unbounded else self.call(op, x, y)
        if isinstance(known, Const):
            return bool(known.value)
        less, more = (y, x) if op in ("gt", "ge") else (x, y)
        return self._proof.at_most(make("add", less, integer(1)) if op in ("lt", "gt") else less, more)

    def is_point(self, interval: Interval) -> bool:
        """Whether an interval certainly holds a single value."""
        return bool(interval[0] == interval[1])

    def single(self, *intervals: Interval) -> Expr:
        """The condition under which statistics of a tile are one value each; false where another interval varies."""
        single: Expr = FALSE
        for interval in intervals:
            if interval in self._residues:
                same = make("eq", *interval)
                single = same if single == FALSE else make("and", single, same)
            elif not self.is_point(interval):
                return FALSE
        return single

    def may_equal(self, a: Interval, b: Interval) -> Expr:
        """The condition under which two statistics may have a common value, whatever their ranges are."""
        if a not in self._residues or b not in self._residues:
            return TRUE
        return make("ne", make("bitand", self._residues[a], self._residues[b]), integer(0))

    def rounded(self, op: str, interval: Interval) -> Interval:
        """Return no bounds where a float is rounded: two compilations of one expression may differ in the last bit."""
        return interval if op in EXACT else self.unbounded

    def envelope(self, *ends: Expr) -> Interval:
        """Return no bounds: the numbers' size is not known."""
        return self.unbounded

    def call(self, op: str, *args: Expr) -> Expr:
        """Apply an operator to endpoints, and simplify by what is known of their order."""
        if op in _OF_BOOLS and args[0].type is Type.BOOL:
            return make(_OF_BOOLS[op], *args)
        infinite = [a for a in args if a in self.unbounded]
        if infinite:
            return self._with_infinity(op, args, infinite[0])
        if op in ("min", "max") and args[0].type is Type.INT:
            return self._extremum(op, *args)
        if op in _ORDERS and args[0].type is args[1].type is Type.INT:
            for known in (op, COMPLEMENT[op]):
                if self.holds(known, *args):
                    return boolean(known == op)
        return make(op, *args)

    def _extremum(self, op: str, x: Expr, y: Expr) -> Expr:
        """Return the minimum or maximum of two endpoints, without the parts that are known not to matter."""
        for a, b in ((x, y), (y, x)):
            less, more = (a, b) if op == "min" else (b, a)
            if self._proof.at_most(less, more):
                return a
            if op == "min" and isinstance(b, Search) and self._proof.at_most(limit := make("min", a, b.length), b):
                return limit
            if isinstance(b, Op) and b.op == op:  # min(a, min(u, v)) where a <= u
                for u, v in (b.args, b.args[::-1]):
                    less, more = (a, u) if op == "min" else (u, a)
                    if self._proof.at_most(less, more):
                        return self._extremum(op, a, v)
        return make(op, x, y)

    def _with_infinity(self, op: str, args: tuple[Expr, ...], infinity: Expr) -> Expr:
        """Apply an operator where an argument is unbounded. Rules do so only where the result is plain."""
        negative = _HIGHEST if infinity == _LOWEST else _LOWEST
        match op:
            case "add" | "to_float" | "floor" | "ceil" | "trunc" | "round":
                return infinity
            case "neg":
                return negative
            case "sub":
                return infinity if args[0] == infinity else negative
            case "min" | "max":
                absorbs = infinity == (_LOWEST if op == "min" else _HIGHEST)
                return infinity if absorbs else args[1] if args[0] == infinity else args[0]
            case "mul":
                other = args[1] if args[0] == infinity else args[0]
                return infinity if self.holds("ge", other, integer(0)) else negative
            case "floordiv" if args[0] == infinity:
                return infinity
            case "floordiv":
                return make("select", make("ge", args[0], integer(0)), integer(0), integer(-1))
            case "select":
                if isinstance(args[0], Const):
                    return args[1] if args[0].value else args[2]
                return infinity
        sides = (float(self.value(a) or 0) if a in self.unbounded else 0 for a in args)
        return TRUE if FOLD[op](*sides) else FALSE


def _rounds(node: Expr) -> bool:
    return isinstance(node, Op) and node.type is Type.FLOAT and node.op not in EXACT
