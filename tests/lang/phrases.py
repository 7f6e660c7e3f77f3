"""Random expressions as syntax trees, written with as few parentheses as Python needs, so that precedence counts.

Over the declarations of ``randoms``, with ``let`` values and functions of its own.
"""

from __future__ import annotations

import ast
import random

LET = {
    "distance": "q_pos - kv",
    "near(x)": "abs(q_pos - x) < 9",
    "mix(x, y)": "x * 3 - y if near(y) else y - x",
    "place": "kv % 16",
}

_INTEGERS = (
    "q", "kv", "kv", "b", "h", "hk", "q_pos", "q_global", "kv_global", "seqlen_q", "seqlen_k", "total_q", "total_k",
    "heads", "kv_heads", "window", "shift", "big", "stride", "distance", "place", "offset", "doc[b, kv]", "ids[b, q]",
    "byte[q_global]", "tiny[h, place % 5]", "doc[b, max(q_pos, 0)]",
)  # fmt: skip
_FLOATS = (
    "s", "s", "gain", "cap", "bias", "half[h]", "wide[h, kv]", "table[place]", "wide[h, kv // 2]",
    "table[byte[q] % 16]",
)  # fmt: skip
_CONDITIONS = ("flag", "True", "False", "pad[b, kv]", "kv <= q_pos", "near(kv)", "h == 2", "pad[b, q]")
_DIVISORS = (
    "3",
    "-4",
    "16",
    "window",
    "stride",
    "seqlen_k",
    "heads",
    "max(kv, 1)",
    "-max(doc[b, kv], 2)",
    "(q & 7) + 1",
)
_ROUGH = (
    "exp", "exp2", "log", "log2", "tanh", "sigmoid", "silu", "rsqrt", "sin", "cos", "tan",
    "expm1", "log1p", "erf", "atan",
)  # fmt: skip


class Phrases:
    """Writes expressions; ``exact`` leaves out what two libraries may round differently, ``logit`` allows ``s``."""

    def __init__(self, seed: int, *, exact: bool, logit: bool) -> None:
        self.chance = random.Random(seed)
        self.exact = exact
        self.logit = logit

    def write(self, kind: str, depth: int) -> str:
        """Return a text of a kind: ``bool``, ``int`` or ``float``."""
        return ast.unparse(self.node(kind, depth))

    def node(self, kind: str, depth: int) -> ast.expr:
        return {"bool": self.condition, "int": self.integer, "float": self.real}[kind](depth)

    def leaf(self, texts: tuple[str, ...]) -> ast.expr:
        return _tree(self.chance.choice([text for text in texts if self.logit or text not in ("s", "1.0 + abs(s)")]))

    def condition(self, depth: int) -> ast.expr:
        if depth <= 0:
            return self.leaf(_CONDITIONS)
        kind = self.chance.random()
        d = depth - 1
        if kind < 0.4:
            sort = self.chance.choice(("int", "int", "float"))
            count = self.chance.choice((1, 1, 2))
            ops: list[ast.cmpop] = [
                self.chance.choice((ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq))() for _ in range(count)
            ]
            return ast.Compare(
                self.node(sort, d), ops, [self.node(self.chance.choice((sort, "int")), d) for _ in range(count)]
            )
        if kind < 0.6:
            op: ast.boolop = self.chance.choice((ast.And, ast.Or))()
            return ast.BoolOp(op, [self.condition(d) for _ in range(self.chance.choice((2, 2, 3)))])
        if kind < 0.75:
            bits: ast.operator = self.chance.choice((ast.BitAnd, ast.BitOr, ast.BitXor))()
            return ast.BinOp(self.condition(d), bits, self.condition(d))
        if kind < 0.85:
            return ast.UnaryOp(self.chance.choice((ast.Not, ast.Invert))(), self.condition(d))
        if kind < 0.92:
            return ast.IfExp(self.condition(d), self.condition(d), self.condition(d))
        if kind < 0.94:
            return _call("isnan", self.real(d))
        return ast.Compare(self.condition(d), [self.chance.choice((ast.Eq, ast.NotEq))()], [self.condition(d)])

    def integer(self, depth: int) -> ast.expr:
        if depth <= 0:
            return ast.Constant(self.chance.randrange(10)) if self.chance.random() < 0.2 else self.leaf(_INTEGERS)
        kind = self.chance.random()
        x, y = self.integer(depth - 1), self.integer(depth - 1)
        if kind < 0.3:
            return ast.BinOp(x, self.chance.choice((ast.Add, ast.Sub))(), y)
        if kind < 0.36:
            return ast.BinOp(_small(x), ast.Mult(), _small(y))
        if kind < 0.5:
            return ast.BinOp(x, self.chance.choice((ast.FloorDiv, ast.Mod))(), self.leaf(_DIVISORS))
        if kind < 0.62:
            return ast.BinOp(x, self.chance.choice((ast.BitAnd, ast.BitOr, ast.BitXor))(), y)
        if kind < 0.68:
            return ast.UnaryOp(self.chance.choice((ast.USub, ast.Invert))(), x)
        if kind < 0.72:
            return ast.BinOp(x, ast.RShift(), ast.BinOp(y, ast.BitAnd(), ast.Constant(31)))
        if kind < 0.76:
            near = ast.BinOp(x, ast.BitAnd(), ast.Constant(255))
            return ast.BinOp(near, ast.LShift(), ast.BinOp(y, ast.BitAnd(), ast.Constant(7)))
        if kind < 0.8:
            return ast.BinOp(_small(x), ast.Pow(), ast.Constant(self.chance.randrange(5)))
        if kind < 0.86:
            return ast.IfExp(self.condition(depth - 1), x, y)
        if kind < 0.9:
            return _call("int", self.node(self.chance.choice(("bool", "float")), depth - 1))
        if kind < 0.94:
            return _call("mix", x, y)
        if kind < 0.96:
            return _call("clamp", x, ast.Constant(-20), y)
        return _call(self.chance.choice(("min", "max")), x, y, self.integer(0))

    def real(self, depth: int) -> ast.expr:
        if depth <= 0:
            if self.chance.random() < 0.2:
                return ast.Constant(self.chance.choice((0.5, 1.25, 3.0, 0.0)))
            return self.leaf(_FLOATS)
        kind = self.chance.random()
        d = depth - 1
        x = self.real(d)
        y = self.node(self.chance.choice(("float", "float", "int")), d)
        if kind < 0.35:
            return ast.BinOp(x, self.chance.choice((ast.Add, ast.Sub, ast.Mult))(), y)
        if kind < 0.45:
            divisor = self.leaf(("cap", "4.0", "-0.5", "window", "1.0 + abs(s)", "float(stride)"))
            return ast.BinOp(self.chance.choice((x, y)), ast.Div(), divisor)
        if kind < 0.6:
            return ast.IfExp(self.condition(d), *self.chance.sample((x, y), 2))
        if kind < 0.68:
            return _call(self.chance.choice(("min", "max")), x, y)
        if kind < 0.72:
            return _call("clamp", x, ast.Constant(-3.0), y)
        if kind < 0.8:
            return _call(self.chance.choice(("floor", "ceil", "abs", "float", "round", "trunc", "sign")), x)
        if kind < 0.84:
            return ast.UnaryOp(ast.USub(), x)
        if self.exact:
            return ast.BinOp(x, ast.Add(), y)
        if kind < 0.88:  # torch rounds it otherwise than numpy on some processors
            return _call("sqrt", _call("abs", x))
        if kind < 0.94:
            return _call(self.chance.choice(_ROUGH), _call("clamp", x, ast.Constant(0.125), ast.Constant(3.0)))
        if kind < 0.97:
            exponent = self.chance.choice((self.exponent(), _call("clamp", y, ast.Constant(-2), ast.Constant(2.5))))
            return ast.BinOp(_call("clamp", x, ast.Constant(0.25), ast.Constant(3.0)), ast.Pow(), exponent)
        if kind < 0.98:
            return _call("atan2", x, y)
        return _call(self.chance.choice(("tanh", "sigmoid", "silu", "sin", "cos")), x)

    def exponent(self) -> ast.expr:
        return _tree(self.chance.choice(("2", "3", "-1", "0.5", "-0.5", "1.5", "0")))


def _tree(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _small(node: ast.expr) -> ast.expr:
    """Keep products within int64, whatever a call passes."""
    return ast.BinOp(node, ast.Mod(), ast.Constant(1000))


def _call(name: str, *args: ast.expr) -> ast.expr:
    return ast.Call(ast.Name(name), list(args), [])
