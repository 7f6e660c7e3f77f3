"""Uses of each node in a set of expressions: how often, under which conditions, and for what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from attngen.lang.ir import Const, Expr, Load, Op, Type, children

#: Functions whose result is a whole number.
_WHOLE = frozenset({"floor", "ceil", "trunc", "round"})

#: Float operators that are 0 where an argument is, or where arguments cancel, and whose sign is then that of arguments.
_PASSES_SIGN = frozenset({
    "add", "sub", "mul", "neg", "min", "max", "floor", "ceil", "trunc", "round", "expm1", "log1p", "erf", "tanh",
    "silu", "sqrt", "sin", "tan",
})  # fmt: skip

#: A condition and whether it holds.
Guard = tuple[Expr, bool]


class Usage:
    """Counts uses by distinct parents and finds the conditions under which every use of a load happens.

    The right side of ``and`` and ``or`` and the arms of ``select`` are guarded. A condition serves as the guard of
    a load only if it varies along no axis that the load does not: a guard must not make a load larger.
    """

    def __init__(self, roots: Sequence[Expr], axes: Callable[[Expr], frozenset[str]], inner: str = "kv") -> None:
        self._axes = axes
        self._order = _parents_first(roots)
        self.count: Counter[Expr] = Counter(roots)
        self._inside_loop: set[Expr] = set()
        self._guards: dict[Expr, dict[Guard, None]] = {root: {} for root in roots}
        for node in self._order:
            for child, extra in _edges(node):
                self.count[child] += 1
                if inner in axes(node) and inner not in axes(child):
                    self._inside_loop.add(child)
                self._inherit(child, {**self._guards[node], **dict.fromkeys(extra)})
        for node in self._order:
            if isinstance(node, Load):
                for condition, _ in self.guards(node):
                    self.count[condition] += 1

    def invariant(self, node: Expr) -> bool:
        """Whether a node that does not vary along the inner axis is used inside one that does."""
        return node in self._inside_loop

    def guards(self, node: Load) -> list[Guard]:
        """Return the conditions under which a load is wanted, as far as they vary no more than the load."""
        return [guard for guard in self._guards[node] if self._axes(guard[0]) <= self._axes(node)]

    def _inherit(self, child: Expr, guards: dict[Guard, None]) -> None:
        known = self._guards.get(child)
        if known is None:
            self._guards[child] = guards
        else:  # what holds at every use
            self._guards[child] = {guard: None for guard in known if guard in guards}


def deciding(roots: Sequence[Expr]) -> frozenset[Expr]:
    """Nodes that are rounded or compared, with all nodes below them: there the last bit of a float matters."""
    exact: set[Expr] = set()

    def add(node: Expr) -> None:
        if node not in exact:
            exact.add(node)
            for child in children(node):
                add(child)

    for node in _parents_first(roots):
        if decides(node):
            for child in children(node):
                add(child)
    return frozenset(exact)


def decides(node: Expr) -> bool:
    """Whether a node turns its arguments into a condition or a whole number."""
    if not isinstance(node, Op):
        return False
    whole = node.op in _WHOLE or (node.op == "to_int" and node.args[0].type is Type.FLOAT)
    return whole or node.type is Type.BOOL


def signed(roots: Sequence[Expr]) -> frozenset[Expr]:
    """Floats whose sign matters where they are 0: both arguments of ``atan2``, divisors, and what decides their sign.

    The sign of a root does not matter: a condition has none, and softmax takes -0.0 for 0.0.
    """
    signed: set[Expr] = set()
    for node in _parents_first(roots):
        if isinstance(node, Op):
            signed.update(reads_sign(node, node in signed))
    return frozenset(signed)


def reads_sign(node: Op, signed: bool = False) -> tuple[Expr, ...]:
    """Arguments of an operator whose sign matters where they are 0; ``signed`` says whether that of the result does."""
    match node.op, node.args:
        case "atan2" | "rsqrt", args:
            return args
        case "truediv", (dividend, divisor):
            return (dividend, divisor) if signed else (divisor,)
        case "pow", (base, exponent) if node.type is Type.FLOAT:
            inverts = not isinstance(exponent, Const) or exponent.value < 0
            return (base,) if signed or inverts else ()
        case "select", (_, a, b) if signed:
            return a, b
        case op, args if signed and op in _PASSES_SIGN:
            return args
    return ()


def _edges(node: Expr) -> Iterator[tuple[Expr, list[Guard]]]:
    """Yield the children of a node with the conditions that it adds for each."""
    match node:
        case Op(op="and" | "or" as op, args=(a, b)):
            yield a, []
            yield b, _conjuncts(a, op == "and")
        case Op(op="select", args=(condition, a, b)):
            yield condition, []
            yield a, _conjuncts(condition, True)
            yield b, _conjuncts(condition, False)
        case _:
            for child in children(node):
                yield child, []


def _conjuncts(condition: Expr, holds: bool) -> list[Guard]:
    """Split a condition that holds (or does not) into conditions that each do."""
    match condition:
        case Op(op="not", args=(inner,)):
            return _conjuncts(inner, not holds)
        case Op(op="and" | "or" as op, args=(a, b)) if holds == (op == "and"):
            return _conjuncts(a, holds) + _conjuncts(b, holds)
    return [(condition, holds)]


def _parents_first(roots: Sequence[Expr]) -> list[Expr]:
    """Return all distinct nodes such that each stands before its children."""
    seen: set[Expr] = set()
    order: list[Expr] = []

    def visit(node: Expr) -> None:
        if node in seen:
            return
        seen.add(node)
        for child in children(node):
            visit(child)
        order.append(node)

    for root in roots:
        visit(root)
    return order[::-1]
