"""Separation of conditions on pairs into comparisons of a value of the row with a value of the key.

A remainder of ``q - kv`` becomes one of ``q`` and one of ``kv``, and in a compared sum all terms of the row move to one
side. Each pair then takes only a comparison, and each value can be computed once for its row or key.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from attngen.dtypes import DTYPES
from attngen.lang.bands import Axis
from attngen.lang.divisors import divisors, is_int64, prepared, with_symbols
from attngen.lang.facts import Facts
from attngen.lang.intervals import Numbers, bounds, evaluate
from attngen.lang.ir import POSITION, Const, Expr, Load, Op, Type, children, holds_int64, names, rewrite, walk
from attngen.lang.literals import fold_literals
from attngen.lang.overflow import widen
from attngen.lang.printing import canonical
from attngen.lang.ranges import INT32
from attngen.lang.rows import own_intervals
from attngen.lang.runs import by_position
from attngen.lang.simplify import Linear, and_, integer, linear, make, neg, not_, or_
from attngen.lang.spans import Interval
from attngen.lang.targets import power_of_two
from attngen.lang.variant import Variant

ROWS, KEYS = frozenset({"q", "q_pos", "q_global", POSITION.name}), frozenset({"kv", "kv_global"})
MIRRORED = {"le": "ge", "lt": "gt", "ge": "le", "gt": "lt", "eq": "eq", "ne": "ne"}
_UPPER = ("le", "lt")
_WORD = 4  # bytes
#: Most operators that an end of an interval may take beyond the values that are computed once for each query.
_OPERATORS_OF_END = 3


def asked(variant: Variant, facts: Facts, along: Axis = "kv") -> tuple[tuple[Interval, ...], Expr]:
    """The intervals of keys that a row sees, and the condition on the keys in them (``own_intervals``), as kernels
    evaluate them (``by_position``).

    If a dividend or divisor there depends on the key, symbols replace divisors, and the condition is separated. A
    block that goes along queries has few keys: it takes no interval whose ends cost more than the comparison.
    """
    intervals, rest = _asked(variant, facts, along)

    def placed(end: Expr | None) -> Expr | None:
        return None if end is None else by_position(end, variant)

    return tuple(Interval(placed(each.lo), placed(each.hi)) for each in intervals), by_position(rest, variant)


def _asked(variant: Variant, facts: Facts, along: Axis) -> tuple[tuple[Interval, ...], Expr]:

    def is_cheap(end: Expr) -> bool:
        end = prepared(end, variant, facts)
        values = costly_values([end], ROWS, KEYS, narrow_tensors(variant))
        others = {node for node in _outside(end, frozenset(values)) if isinstance(node, Op)}
        return not values or (len(others) <= _OPERATORS_OF_END and not any(node.wide for node in others))

    intervals, rest = own_intervals(variant.mask, facts, is_cheap if along == "q" else lambda end: True)
    if not any(is_costly(node) and names(node) & KEYS for node in walk(rest)):
        return intervals, rest
    separation = _Separation(variant, with_symbols(facts, variant))
    rest = prepared(rest, variant, facts)
    rest = rewrite(rewrite(rest, separation.multiples), separation.others)
    nodes = list(walk(rest))
    if any(isinstance(n, Load) for n in nodes) or not any(isinstance(n, Op) and n.op == "or" for n in nodes):
        return intervals, rest
    return intervals, rewrite(rest, _without_branches)


def _without_branches(node: Expr) -> Expr | None:
    """Write ``and`` and ``or`` as operators on bits, which compute both sides: each pair would branch otherwise."""
    match node:
        case Op(op="and" | "or" as op, args=args):
            return Op(f"bit{op}", args, Type.BOOL)
    return None


def narrow_tensors(variant: Variant) -> frozenset[str]:
    """Names of the tensors of a variant whose elements have at most 4 bytes."""
    return frozenset(tensor.name for tensor in variant.tensors if DTYPES[tensor.dtype].bytes <= _WORD)


def _outside(node: Expr, values: frozenset[Expr]) -> Iterator[Expr]:
    """Yield a node and its descendants, except ``values`` and theirs."""
    if node not in values:
        yield node
        for child in children(node):
            yield from _outside(child, values)


def is_costly(node: Expr) -> bool:
    """Whether a node is an integer division or remainder that is no shift or mask of bits."""
    divides = isinstance(node, Op) and node.op in ("floordiv", "mod") and node.type is Type.INT
    return divides and power_of_two(children(node)[1]) is None


def costly_values(
    exprs: Iterable[Expr], of: frozenset[str], others: frozenset[str], narrow: frozenset[str]
) -> tuple[Expr, ...]:
    """Values of 4 bytes that take a division and depend on the names ``of`` but none of the ``others``, the most costly
    first: each is a division, with all operators whose only such operand it is.

    ``narrow``: tensors of at most 4 bytes.
    """
    exprs = [rewrite(each, fold_literals) for each in exprs]
    parents: dict[Expr, set[Expr | None]] = {}

    def belongs(node: Expr) -> bool:
        read = names(node)
        if not read & of or read & others:
            return False
        loads = all(each.tensor in narrow for each in walk(node) if isinstance(each, Load))
        return loads and not (node.type is Type.INT and is_int64(node, others))

    def divisions(node: Expr, parent: Expr | None) -> Iterator[Expr]:
        visited = node in parents
        parents.setdefault(node, set()).add(parent)
        if not visited:
            if is_costly(node) and names(node) & of and belongs(node):
                yield node
            for child in children(node):
                yield from divisions(child, node)

    costly = {each for expr in exprs for each in [*divisions(expr, None)]}
    values = set()
    for division in costly:
        value = division
        while len(parents[value]) == 1:
            (parent,) = parents[value]
            if parent is None or not belongs(parent):
                break
            value = parent
        values.add(value)
    inside = {each for value in values for child in children(value) for each in walk(child)}
    return tuple(
        sorted((v for v in values if v not in inside), key=lambda v: (-sum(map(is_costly, walk(v))), canonical(v)))
    )


#: Operators that take an instruction or few: what has no others is no value to keep.
_CHEAP = frozenset({
    "add", "sub", "mul", "neg", "abs", "min", "max", "select", "to_float", "lt", "le", "gt", "ge", "eq", "ne", "and",
    "or", "xor", "not", "bitand", "bitor", "bitxor", "invert", "lshift", "rshift",
})  # fmt: skip


def is_work(node: Expr) -> bool:
    """Whether a node loads, divides, or takes another operator that is not cheap."""
    if isinstance(node, Op) and node.op in ("floordiv", "mod") and node.type is Type.INT:
        return is_costly(node)  # the others are shifts and masks
    return isinstance(node, Load) or (isinstance(node, Op) and node.op not in _CHEAP)


def largest_values(value: Expr, of: frozenset[str], others: frozenset[str], narrow: frozenset[str]) -> tuple[Expr, ...]:
    """Largest parts of a value, of 4 bytes each, that load or take more than cheap operators, and depend on the names
    ``of`` but none of the ``others``; in order.

    ``narrow``: tensors of at most 4 bytes.
    """
    values: dict[Expr, None] = {}

    def collect(node: Expr) -> None:
        read = names(node)
        if not read & of:
            return
        if not read & others and not (node.type is Type.INT and is_int64(node, others)):
            nodes = [each for each in walk(node) if names(each) & of and is_work(each)]
            if not nodes:
                return
            if all(each.tensor in narrow for each in walk(node) if isinstance(each, Load)):
                values[node] = None
                return
        for child in children(node):
            collect(child)

    collect(value)
    return tuple(values)


class _Separation:
    """Rules for ``ir.rewrite``; each returns an expression with the same value, or None."""

    def __init__(self, variant: Variant, facts: Facts) -> None:
        self._facts = facts
        self._numbers = Numbers(facts)
        self._originals: dict[Expr, Expr] = {each.symbol: each.expr for each in divisors(variant)}

    def multiples(self, node: Expr) -> Expr | None:
        """The rule for conditions on multiples."""
        match node:
            case Op(op="eq" | "ne" as op, args=(Op(op="mod", args=(x, d), type=Type.INT), Const(value=0))):
                return self._multiple(op, x, d)
        return None

    def others(self, node: Expr) -> Expr | None:
        """The rule for all other remainders and comparisons."""
        match node:
            case Op(op=op, args=(a, b)) if op in MIRRORED and a.type is b.type is Type.INT:
                return self._comparison(op, a, b)
            case Op(op="mod", args=(x, d), type=Type.INT):
                return self._remainder(x, d)
            case Op(op="select", args=(c, a, b), type=Type.BOOL):  # without a branch for each pair
                return or_(and_(c, a), and_(not_(c), b))
        return None

    def _halves(self, total: Linear) -> tuple[Linear, Linear] | None:
        """Split a sum into terms of rows, with the constant, and terms of keys; None if it lacks one of these, or has a
        term of both."""
        row, key = Linear({}, total.constant), Linear()
        for term, coefficient in total.terms.items():
            read = names(term)
            if read & KEYS and read & ROWS:
                return None
            (key if read & KEYS else row).terms[term] = coefficient
        depends = any(names(term) & ROWS for term in row.terms)
        return (row, key) if key.terms and depends else None

    def _narrow(self, total: Linear) -> Expr | None:
        """A sum no part of which is an int64, else None."""
        widened = widen(total.expr(), self._facts)
        return None if widened is None or any(isinstance(n, Op) and n.wide for n in walk(widened)) else widened

    def _divides(self, d: Expr) -> bool:
        return not names(d) & (ROWS | KEYS) and evaluate(d, self._numbers)[0] >= 1

    def _multiple(self, op: str, x: Expr, d: Expr) -> Expr | None:
        """``(a - b) % d == 0`` as ``a % d == b % d``."""
        while isinstance(x, Op) and x.op in ("abs", "neg"):
            (x,) = x.args
        halves = self._halves(linear(x)) if self._divides(d) else None
        if halves is None:
            return None
        row, key = halves
        if evaluate(key.expr(), self._numbers)[0] < 0:
            key = key.scaled(-1)
        else:
            row = row.scaled(-1)
        a, b = self._narrow(row), self._narrow(key)
        return None if a is None or b is None else make(op, make("mod", a, d), make("mod", b, d))

    def _remainder(self, x: Expr, d: Expr) -> Expr | None:
        """``(a - b) % d`` from ``a % d`` and ``b % d``."""
        halves = self._halves(linear(x)) if self._divides(d) and power_of_two(d) is None else None
        if halves is None:
            return None
        row, key = halves
        if evaluate(key.expr(), self._numbers)[1] > 0:
            return None  # a sum of remainders might be an int64
        a, b = self._narrow(row), self._narrow(key.scaled(-1))
        divisor = self._originals.get(d, d)  # a symbol only divides
        if a is None or b is None or holds_int64(divisor) or bounds(divisor, self._facts)[1] > INT32[1]:
            return None
        apart = make("sub", make("mod", a, d), make("mod", b, d))
        return make("select", make("lt", apart, integer(0)), make("add", apart, divisor), apart)

    def _comparison(self, op: str, a: Expr, b: Expr) -> Expr | None:
        """Split absolute values and extrema into comparisons, and move the terms of rows to one side."""
        for x, y, each in ((a, b, op), (b, a, MIRRORED[op])):
            match x:
                case Op(op="abs", args=(u,)) if each not in ("eq", "ne") and self._halves(linear(u)) is not None:
                    if (opposite := self._narrow(linear(neg(y)))) is None:
                        continue
                    ends = self._compared(each, u, y), self._compared(MIRRORED[each], u, opposite)
                    return and_(*ends) if each in _UPPER else or_(*ends)
                case Op(op="min" | "max" as extremum, args=(u, v)) if each not in ("eq", "ne") and self._is_pair(x):
                    parts = self._compared(each, u, y), self._compared(each, v, y)
                    return and_(*parts) if (extremum == "max") == (each in _UPPER) else or_(*parts)
        return self._moved(op, a, b)

    def _is_pair(self, node: Expr) -> bool:
        read = names(node)
        return bool(read & ROWS and read & KEYS)

    def _compared(self, op: str, a: Expr, b: Expr) -> Expr:
        separated = self._comparison(op, a, b)
        return make(op, a, b) if separated is None else separated

    def _moved(self, op: str, a: Expr, b: Expr) -> Expr | None:
        if not (self._is_pair(a) or self._is_pair(b)):
            return None
        halves = self._halves(linear(a).plus(linear(b), -1))
        if halves is None:
            return None
        row, key = halves
        if all(coefficient < 0 for coefficient in key.terms.values()):
            row, key, op = row.scaled(-1), key.scaled(-1), MIRRORED[op]
        left, right = self._narrow(key), self._narrow(row.scaled(-1))
        return None if left is None or right is None else make(op, left, right)
