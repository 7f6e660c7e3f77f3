"""Warnings about legal expressions that are probably mistakes: constant conditions, and surprising precedence.

What is reported holds for every call: it follows from the syntax, or from the declared ranges. A condition that a
constant decides is a switch of its author's and is not reported.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from attngen.errors import Location
from attngen.lang.facts import Facts
from attngen.lang.intervals import Numbers, evaluate
from attngen.lang.ir import MAX_SEQLEN, Const, Expr, Load, Op, Type, Var, walk
from attngen.lang.parser import Written
from attngen.lang.printing import canonical
from attngen.lang.ranges import INT32, MAX_HEADS
from attngen.lang.simplify import integer, linear, make
from attngen.lang.source import Snippet
from attngen.lang.variant import Tensor
from attngen.lang.words import extent_meant

#: Most conditions joined by ``and`` or ``or`` that are compared pair by pair.
_MOST_JOINED = 16

_BITS = {ast.BitAnd: ("&", "and"), ast.BitOr: ("|", "or"), ast.BitXor: ("^", "!=")}
_ORDERS = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!="}

#: Ends of ranges that say nothing about a variant.
_USUAL = {*INT32, MAX_SEQLEN, MAX_SEQLEN - 1, 1 - MAX_SEQLEN, MAX_HEADS, MAX_HEADS - 1}


_LENGTHS = ("seqlen_q", "seqlen_k")


@dataclass(frozen=True, slots=True)
class Doubt:
    """A warning: the field of the variant, a message that shows the place, and the location in the file."""

    field: str
    message: str
    location: Location | None = None


def doubts(written: Sequence[Written], facts: Facts, constants: Collection[str]) -> list[Doubt]:
    """Doubts about the expressions of one variant; ``constants`` are the names that a declaration fixes."""
    all_doubts: list[Doubt] = []
    for one in written:
        all_doubts += _Reader(one, facts, constants).read()
    for one in written:
        value = one.values.get(one.tree)
        if all_doubts or one.snippet.field != "mask" or value is None or isinstance(value, Const):
            continue
        if evaluate(value, Numbers(facts)) == (False, False):
            all_doubts.append(_doubt(one.snippet, one.tree, "the mask is never true, so no query sees a key"))
    return all_doubts


def extent_doubts(tensors: Iterable[Tensor], known: Collection[str]) -> list[Doubt]:
    """Doubts about new extents whose name is close to a known one; ``known`` are all that have a meaning."""
    misspelled: dict[str, Doubt] = {}
    for tensor in tensors:
        for extent in tensor.shape:
            if not isinstance(extent, str) or extent in known or extent in misspelled:
                continue
            meant = extent_meant(extent, known)
            if meant is not None:
                message = f"the extent '{extent}' is new, of any length that a call brings; did you mean '{meant}'?"
                misspelled[extent] = Doubt(f"tensors.{tensor.name}.shape", message)
    return list(misspelled.values())


def _doubt(snippet: Snippet, node: ast.expr, message: str) -> Doubt:
    marked = snippet.marked(message, node.col_offset, node.end_col_offset or node.col_offset + 1)
    return Doubt(snippet.field, marked, snippet.location)


class _Reader:
    """Reads one expression."""

    def __init__(self, written: Written, facts: Facts, constants: Collection[str]) -> None:
        self.snippet = written.snippet
        self.tree = written.tree
        self.values = written.values
        self.facts = facts
        self.numbers = Numbers(facts)
        self.constants = constants
        self.doubts: list[Doubt] = []

    def read(self) -> list[Doubt]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Compare):
                self.precedence(node)
        if not self.doubts:
            self.visit(self.tree, None)
        return self.doubts

    # --- operators that bind otherwise ----------------------------------------------------------------------------

    def precedence(self, node: ast.Compare) -> None:
        """Find ``a >= b & c < d``, in which ``&`` binds tighter than ``>=``."""
        for operand in (node.left, *node.comparators):
            if self.in_parentheses(operand):
                continue
            symbol = _ORDERS.get(type(node.ops[0]), "==")
            if isinstance(operand, ast.UnaryOp) and isinstance(operand.op, ast.Invert) and operand is node.left:
                text = f"'~' binds tighter than '{symbol}'; write 'not', or put the comparison in parentheses"
                self.report(operand, text)
                return
            if isinstance(operand, ast.BinOp) and type(operand.op) in _BITS:
                conditions = [self.is_condition(side) for side in (operand.left, operand.right)]
                if (len(node.ops) > 1 or any(conditions)) and not all(conditions):
                    bits, word = _BITS[type(operand.op)]
                    text = f"'{bits}' binds tighter than '{symbol}', so this is one integer that is compared"
                    self.report(operand, f"{text}; join conditions with '{word}'")
                    return

    def is_condition(self, node: ast.expr) -> bool:
        value = self.values.get(node)
        return value is not None and value.type is Type.BOOL

    def in_parentheses(self, node: ast.expr) -> bool:
        before = self.snippet.text[: node.col_offset].rstrip()
        after = self.snippet.text[node.end_col_offset or 0 :].lstrip()
        return before.endswith("(") and after.startswith(")")

    # --- conditions that never change -----------------------------------------------------------------------------

    def visit(self, node: ast.expr, joined: str | None) -> None:
        """Report what is known about a node and what is below it; ``joined`` is the operator that it is part of."""
        value = self.values.get(node)
        if value is None or isinstance(node, ast.Name | ast.Constant):
            return
        if value.type is Type.BOOL:
            known = self.known(value)
            if known is not None:
                below = [child for child in _parts(node) if self.is_known(child)]
                for child in below:
                    self.visit(child, None)
                if not below and not self.is_switch(node):
                    self.report(node, f"'{self.text(node)}' {self.why(value, known)}")
                return
            joins = value.op if isinstance(value, Op) and value.op in ("and", "or") else None
            if joins is not None and joins != joined and self.exclusive(node, value, joins):
                return
            joined = joins
        else:
            self.quotient(node, value)
            joined = None
        for child in _parts(node):
            self.visit(child, joined)

    def known(self, value: Expr) -> bool | None:
        must, may = evaluate(value, self.numbers)
        return None if may and not must else bool(must)

    def is_known(self, node: ast.expr) -> bool:
        value = self.values.get(node)
        return value is not None and value.type is Type.BOOL and self.known(value) is not None

    def is_switch(self, node: ast.expr) -> bool:
        """Whether a constant of the declarations decides a node."""
        return any(isinstance(part, ast.Name) and part.id in self.constants for part in ast.walk(node))

    def why(self, value: Expr, known: bool) -> str:
        ranges = ", ".join(self.ranges_of(value))
        return f"is {'always' if known else 'never'} true{f': {ranges}' if ranges else ''}"

    def ranges_of(self, value: Expr) -> Iterator[str]:
        """The declared ranges of what an expression reads, in words."""
        leaves = [node for term in _terms(value) for node in walk(term) if isinstance(node, Var | Load)]
        inside = {node for leaf in leaves if isinstance(leaf, Load) for index in leaf.indices for node in walk(index)}
        if any(isinstance(leaf, Var) and leaf.name in _LENGTHS for leaf in leaves):
            return
        for leaf in dict.fromkeys(leaves):
            if leaf.type is Type.BOOL or leaf in inside:
                continue
            low, high = evaluate(leaf, self.numbers)
            name = leaf.name if isinstance(leaf, Var) else leaf.tensor
            ends = ("at least", low), ("at most", high)
            shown = [f"{words} {end}" for words, end in ends if abs(end) != float("inf") and end not in _USUAL]
            if shown:
                yield f"{name} is {' and '.join(shown)}"

    def exclusive(self, node: ast.expr, value: Expr, joins: str) -> bool:
        """Report two parts of an ``and`` that exclude each other, or of an ``or`` of which one always holds."""
        parts = list(_joined(value, joins))[:_MOST_JOINED]
        signs = [_not_negative(part, joins == "and") for part in parts]
        for (one, ones), (other, others) in combinations(zip(parts, signs, strict=True), 2):
            sums = (evaluate(make("add", x, y), self.numbers)[1] for x in ones for y in others)
            hides_all = node is self.tree and self.snippet.field == "mask" and joins == "and"
            if any(most < 0 for most in sums) and (hides_all or not self.is_switch(node)):
                pair = f"'{canonical(one)}' and '{canonical(other)}'"
                text = f"{pair} exclude each other, so this is never true"
                self.report(node, text if joins == "and" else f"one of {pair} always holds, so this is always true")
                return True
        return False

    def quotient(self, node: ast.expr, value: Expr) -> None:
        """Report a quotient of integers that is always 0, or a remainder that is the dividend."""
        match value:
            case Op(op="floordiv" | "mod" as op, args=(a, b)) if isinstance(node, ast.BinOp):
                guard = op == "mod" and isinstance(b, Const)  # as in x % 64, whatever x is
                if guard or evaluate(a, self.numbers)[0] < 0 or self.is_switch(node):
                    return
                if evaluate(make("sub", a, b), self.numbers)[1] < 0 and a != integer(0):
                    what = "0" if op == "floordiv" else f"'{canonical(a)}'"
                    hint = "; '/' divides as floats" if op == "floordiv" else ""
                    smaller = f"'{canonical(a)}' is less than '{canonical(b)}'"
                    self.report(node, f"'{self.text(node)}' is always {what}, since {smaller}{hint}")

    def text(self, node: ast.expr) -> str:
        return self.snippet.text[node.col_offset : node.end_col_offset]

    def report(self, node: ast.expr, message: str) -> None:
        self.doubts.append(_doubt(self.snippet, node, message))


def _terms(value: Expr) -> list[Expr]:
    """Terms that decide a condition: for a comparison of integers, those that only one side has."""
    match value:
        case Op(op="lt" | "le" | "gt" | "ge" | "eq" | "ne", args=(a, b)) if a.type is b.type is Type.INT:
            return list(linear(make("sub", a, b)).terms)
    return [value]


def _parts(node: ast.expr) -> list[ast.expr]:
    return [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]


def _joined(value: Expr, op: str) -> Iterator[Expr]:
    if isinstance(value, Op) and value.op == op:
        for arg in value.args:
            yield from _joined(arg, op)
    else:
        yield value


def _not_negative(part: Expr, holds: bool) -> list[Expr]:
    """Integers that are not negative where a comparison holds, or does not; none for any other condition."""
    if not isinstance(part, Op) or len(part.args) != 2 or {arg.type for arg in part.args} != {Type.INT}:
        return []
    a, b = part.args
    one = integer(1)
    less, at_most = make("sub", make("sub", b, a), one), make("sub", b, a)
    more, at_least = make("sub", make("sub", a, b), one), make("sub", a, b)
    true = {"lt": [less], "le": [at_most], "gt": [more], "ge": [at_least], "eq": [at_most, at_least]}
    false = {"lt": [at_least], "le": [more], "gt": [at_most], "ge": [less], "ne": [at_most, at_least]}
    return (true if holds else false).get(part.op, [])
