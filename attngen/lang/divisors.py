"""Divisors that depend on scalars of a call alone: the host computes their reciprocals, by which kernels multiply."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from attngen.lang.facts import Facts
from attngen.lang.intervals import Numbers, bounds, evaluate
from attngen.lang.ir import DIVISOR, Const, Expr, Op, Type, Var, holds_int64, names, own, rewrite, tensors, walk
from attngen.lang.literals import fold_literals
from attngen.lang.naming import label
from attngen.lang.overflow import narrow_divisors, unmarked
from attngen.lang.printing import canonical
from attngen.lang.ranges import INT32, Range
from attngen.lang.simplify import FOLD
from attngen.lang.variant import Variant

_DIVISIONS = ("floordiv", "mod")


@dataclass(frozen=True, slots=True)
class Divisor:
    """A divisor of a variant: an expression over scalars, at least 1.

    ``symbol`` replaces it in divisions that become multiplications; its value is that of the expression, capped at the
    largest int32. ``name`` is made from the words of the expression.
    """

    name: str
    expr: Expr
    symbol: Var
    range: Range

    @property
    def text(self) -> str:
        """The expression as manifests spell it."""
        return canonical(self.expr)

    def value(self, scalars: Mapping[str, float]) -> int:
        """The value of the symbol in a call."""

        def rule(node: Expr) -> Expr | None:
            match node:
                case Var(name=name):
                    return Const(int(scalars[name]), Type.INT)
                case Op(op=op, args=args):
                    numbers = [arg.value for arg in args if isinstance(arg, Const)]
                    return Const(int(FOLD[op](*numbers)), Type.INT)
            return None

        number = rewrite(self.expr, rule)
        assert isinstance(number, Const)
        return min(int(number.value), int(INT32[1]))


@lru_cache(4096)
def reciprocal(divisor: int) -> int:
    """The reciprocal in a kernel's ``Divisor``, as a signed number of 32 bits; 0 for a divisor below 1 (unused).

    It is ceil(2^(31 + s) / divisor) for the least s with 2^s >= divisor (Granlund and Montgomery, 1994).
    """
    if divisor <= 0:
        return 0
    multiplier = -(-(1 << (31 + (divisor - 1).bit_length())) // divisor)
    return multiplier - (1 << 32)  # at least 2^31: its sign bit is set


def division(divisor: int) -> tuple[int, int, int]:
    """The fields of a kernel's ``Divisor``: the divisor, its reciprocal, and the shift after the product."""
    return divisor, reciprocal(divisor), (divisor - 1).bit_length()


@lru_cache(maxsize=256)  # the kernels of a spec share a few variants
def divisors(variant: Variant) -> tuple[Divisor, ...]:
    """The positive divisors of integers in mask and score that depend on scalars of the call alone."""
    known = {scalar.name for scalar in variant.arguments if scalar.dtype in ("int32", "int64")}
    facts = Facts.of(variant)
    by_expr: dict[Expr, Divisor] = {}
    taken: set[str] = set()
    for root in (variant.mask, variant.score):
        for node in walk(rewrite(root, fold_literals)) if root is not None else ():
            if not isinstance(node, Op) or node.op not in _DIVISIONS or node.type is not Type.INT:
                continue
            expr = _plain(node.args[1])
            if expr in by_expr or isinstance(expr, Const) or not _is_of_scalars(expr, known):
                continue
            low, high = bounds(expr, facts)
            if low < 1:
                continue
            wanted = label(expr) or "divisor"
            name = next(each for each in (wanted, *(f"{wanted}_{n}" for n in range(2, 99))) if each not in taken)
            taken.add(name)
            by_expr[expr] = Divisor(name, expr, own(f"{DIVISOR}{name}"), (low, min(high, INT32[1])))
    return tuple(by_expr.values())


def prepared(expr: Expr, variant: Variant, facts: Facts) -> Expr:
    """Replace the divisors of int32 dividends by their symbols.

    Symbols are capped at the largest int32. Where a dividend could reach the cap, the division stays as it is, so that
    results are the same.
    """
    known = {each.expr: each for each in divisors(variant)}
    if not known:
        return expr
    originals: dict[Expr, Expr] = {each.symbol: each.expr for each in known.values()}
    wide = wide_names(variant)
    numbers = Numbers(with_symbols(facts, variant))

    def rule(node: Expr) -> Expr | None:
        if isinstance(node, Op) and node.op in _DIVISIONS and node.type is Type.INT:
            x, divisor = node.args
            each = known.get(_plain(rewrite(divisor, lambda part: originals.get(part))))
            if each is not None and not is_int64(x, wide):
                low, high = evaluate(x, numbers)
                capped = evaluate(divisor, numbers)[1] > INT32[1]
                if not capped or (high < INT32[1] and low >= (0 if node.op == "mod" else -INT32[1])):
                    return Op(node.op, (x, each.symbol), Type.INT)
        return unmarked(node, numbers)

    return rewrite(expr, rule)


def wide_divisions(variant: Variant) -> Iterator[str]:
    """Yield a remark on each division in 64 bits: what to declare so that it may fit in 32."""
    facts = with_symbols(Facts.of(variant), variant)
    originals: dict[Expr, Expr] = {each.symbol: each.expr for each in divisors(variant)}
    int64 = wide_names(variant)
    remarks: dict[str, None] = {}

    for root in (variant.mask, variant.score):
        if root is None:
            continue
        for node in walk(narrow_divisors(prepared(rewrite(root, fold_literals), variant, facts), facts)):
            if not isinstance(node, Op) or node.op not in _DIVISIONS or node.type is not Type.INT:
                continue
            wide = next((part for part in node.args if is_int64(part, int64)), None)
            if wide is not None:
                text = canonical(rewrite(node, lambda part: originals.get(part)))
                limits = [
                    *(f"min and max of '{each.name}'" for each in variant.arguments if each.name in names(wide)),
                    *(f"the range of '{each.name}'" for each in variant.tensors if each.name in tensors(wide)),
                ]
                if limits:
                    remarks[f"'{text}' divides in 64 bits; 32 may do with {' and '.join(limits)} declared"] = None
    yield from remarks


def with_symbols(facts: Facts, variant: Variant) -> Facts:
    """Add the ranges of the symbols of a variant's divisors to facts."""
    return Facts({**facts.ranges, **{each.symbol.name: each.range for each in divisors(variant)}}, facts.tensors)


def is_int64(node: Expr, wide: frozenset[str]) -> bool:
    """Whether the value of an integer node may be an int64 in a kernel; ``wide`` are names of int64."""
    if holds_int64(node) or not wide.isdisjoint(names(node) | tensors(node)):
        return True
    literals = (part.value for part in walk(node) if isinstance(part, Const) and part.type is Type.INT)
    return any(not INT32[0] <= value <= INT32[1] for value in literals)


def wide_names(variant: Variant) -> frozenset[str]:
    """Names of the int64 scalars and tensors of a variant."""
    dtypes = {each.name: each.dtype for each in variant.scalars} | {each.name: each.dtype for each in variant.tensors}
    return frozenset(name for name, dtype in dtypes.items() if dtype == "int64")


def _is_of_scalars(expr: Expr, known: set[str]) -> bool:
    """Whether an integer expression has scalars of the call and operators over integers alone."""
    nodes = list(walk(expr))
    integers = all(node.type is Type.INT and (not isinstance(node, Op) or node.op in FOLD) for node in nodes)
    return (
        integers and bool(names(expr)) and names(expr) <= known and all(isinstance(n, Const | Op | Var) for n in nodes)
    )


def _plain(expr: Expr) -> Expr:
    """Remove the marks of int64 from an expression, which do not change its value."""
    if not holds_int64(expr):
        return expr
    return rewrite(expr, lambda node: Op(node.op, node.args, node.type) if isinstance(node, Op) and node.wide else None)
