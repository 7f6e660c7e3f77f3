"""Smart constructors: build expressions that are simplified from the start, so that emitted code reads well.

Integers are exact here: an ``Op`` whose int32 result could overflow is marked ``wide``, so sums may be
reordered and comparisons moved. Floats are not: only identities that hold for NaN, infinities, rounding and the sign of
zero are applied to them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from attngen.lang.ir import OPERATORS, Const, Expr, Op, Type, rewrite
from attngen.lang.ranges import truncated

TRUE = Const(True, Type.BOOL)
FALSE = Const(False, Type.BOOL)

_RANK = {Type.BOOL: 0, Type.INT: 1, Type.FLOAT: 2}
_INT64 = 2**63

Number = bool | int | float


def integer(value: int) -> Const:
    """Return an integer literal."""
    return Const(int(value), Type.INT)


def boolean(value: bool) -> Const:
    """Return ``TRUE`` or ``FALSE``."""
    return TRUE if value else FALSE


def result_type(op: str, args: tuple[Expr, ...]) -> Type:
    """Return the type of an operator applied to checked arguments."""
    fixed = OPERATORS[op].result
    if fixed is not None:
        return fixed
    values = args[1:] if op == "select" else args
    promoted = max((a.type for a in values), key=_RANK.__getitem__)
    return Type.INT if promoted is Type.BOOL and op != "select" else promoted


# --- constant folding -------------------------------------------------------------------------------------


def _least(a: Number, b: Number) -> Number:
    return math.nan if a != a or b != b else min(a, b)


def _most(a: Number, b: Number) -> Number:
    return math.nan if a != a or b != b else max(a, b)


def _round_to(rounding: Callable[[float], int]) -> Callable[[Number], Number]:
    return lambda a: math.copysign(float(rounding(float(a))), a) if math.isfinite(a) else a


#: Operators on literals; those that are missing here (transcendental functions) are not folded.
FOLD: dict[str, Callable[..., Number]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "neg": lambda a: -a,
    "truediv": lambda a, b: a / b,
    "floordiv": lambda a, b: a // b,
    "mod": lambda a, b: a % b,
    "pow": lambda a, b: a**b,
    "bitand": lambda a, b: a & b,
    "bitor": lambda a, b: a | b,
    "bitxor": lambda a, b: a ^ b,
    "invert": lambda a: ~a,
    "lshift": lambda a, b: a << b,
    "rshift": lambda a, b: a >> b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "and": lambda a, b: a and b,
    "or": lambda a, b: a or b,
    "xor": lambda a, b: a != b,
    "not": lambda a: not a,
    "select": lambda c, a, b: a if c else b,
    "min": _least,
    "max": _most,
    "abs": abs,
    "floor": _round_to(math.floor),
    "ceil": _round_to(math.ceil),
    "trunc": _round_to(math.trunc),
    "round": _round_to(round),
    "to_float": float,
    "to_int": truncated,
}

_SHIFTS = ("lshift", "rshift")


def _fold(op: str, args: tuple[Expr, ...], type: Type) -> Const | None:
    values = [a.value for a in args if isinstance(a, Const)]
    if len(values) < len(args) or op not in FOLD:
        return None
    if (op in _SHIFTS and not 0 <= values[1] < 64) or (op == "pow" and abs(values[1]) > 64):
        return None
    try:
        value = FOLD[op](*values)
    except (ArithmeticError, ValueError):  # division by zero, overflow: left for the check to refuse
        return None
    if isinstance(value, complex) or (type is Type.INT and not -_INT64 <= value < _INT64):
        return None
    return Const({Type.BOOL: bool, Type.INT: int, Type.FLOAT: float}[type](value), type)


# --- sums -------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Linear:
    """An integer sum: the coefficient of each term (an expression that is not itself a sum), and a constant."""

    terms: dict[Expr, int] = field(default_factory=dict)
    constant: int = 0
    wide: bool = False

    def plus(self, other: Linear, factor: int = 1) -> Linear:
        """Return ``self + factor * other``; terms that cancel vanish."""
        terms = dict(self.terms)
        for term, coefficient in other.terms.items():
            terms[term] = terms.get(term, 0) + factor * coefficient
        return Linear(
            {term: c for term, c in terms.items() if c},
            self.constant + factor * other.constant,
            self.wide or other.wide,
        )

    def scaled(self, factor: int) -> Linear:
        """Return ``factor * self``."""
        return Linear().plus(self, factor)

    def expr(self) -> Expr:
        """Return the sum as an expression: its terms in order, but an added one first; then the constant."""
        first = next((t for t, c in self.terms.items() if c > 0), None)
        terms = sorted(self.terms.items(), key=lambda item: item[0] is not first)  # stable
        if not terms:
            return integer(self.constant)
        constant = self.constant
        result: Expr | None = None
        if terms[0][1] < 0 and constant > 0:  # 1 - x reads better than -x + 1
            constant, result = 0, integer(self.constant)
        for term, coefficient in terms:
            product = term if abs(coefficient) == 1 else self._op("mul", term, integer(abs(coefficient)))
            if result is None:
                result = product if coefficient > 0 else self._op("neg", product)
            else:
                result = self._op("add" if coefficient > 0 else "sub", result, product)
        assert result is not None
        if constant:
            result = self._op("add" if constant > 0 else "sub", result, integer(abs(constant)))
        return result

    def _op(self, op: str, *args: Expr) -> Op:
        return Op(op, args, Type.INT, self.wide)


def linear(expr: Expr, *, expand: bool = False) -> Linear:
    """Return an INT expression as a sum; ``expand`` also multiplies out products of sums."""
    match expr:
        case Const(value=value):
            return Linear({}, int(value))
        case Op(op="add" | "sub", args=(a, b), wide=wide):
            total = linear(a, expand=expand).plus(linear(b, expand=expand), 1 if expr.op == "add" else -1)
            return Linear(total.terms, total.constant, total.wide or wide)
        case Op(op="neg", args=(a,), wide=wide):
            total = linear(a, expand=expand).scaled(-1)
            return Linear(total.terms, total.constant, total.wide or wide)
        case Op(op="mul", args=(a, b), wide=wide):
            left, right = linear(a, expand=expand), linear(b, expand=expand)
            if not right.terms:
                total = left.scaled(right.constant)
            elif not left.terms:
                total = right.scaled(left.constant)
            elif expand:
                total = _product(left, right)
            else:
                return Linear({expr: 1}, 0, wide)
            return Linear(total.terms, total.constant, total.wide or left.wide or right.wide or wide)
    return Linear({expr: 1})


def _product(left: Linear, right: Linear) -> Linear:
    total = Linear({}, left.constant * right.constant)
    total = total.plus(Linear(left.terms), right.constant).plus(Linear(right.terms), left.constant)
    for a, i in left.terms.items():
        for b, j in right.terms.items():
            factors = tuple(sorted((a, b), key=repr))  # so that a * b and b * a cancel
            total = total.plus(Linear({Op("mul", factors, Type.INT): i * j}))
    return total


def difference(a: Expr, b: Expr) -> int | None:
    """Return ``a - b`` where it is a known constant, else None."""
    total = linear(a, expand=True).plus(linear(b, expand=True), -1)
    return None if total.terms else total.constant


def split(total: Linear, divisor: Expr) -> tuple[Linear, Linear]:
    """Return (multiple, rest) with ``total = divisor * multiple + rest``; the multiple takes what obviously divides.

    For a literal divisor ``0 <= rest.constant < |divisor|``.
    """
    multiple, rest = Linear({}, 0, total.wide), Linear({}, total.constant, total.wide)
    if isinstance(divisor, Const):
        size = int(divisor.value)
        rest.constant = total.constant % abs(size)
        multiple.constant = (total.constant - rest.constant) // size
    for term, coefficient in total.terms.items():
        match term:
            case _ if isinstance(divisor, Const) and coefficient % divisor.value == 0:
                multiple.terms[term] = coefficient // int(divisor.value)
            case _ if term == divisor:
                multiple.constant += coefficient
            case Op(op="mul", args=(x, y)) if divisor in (x, y):
                multiple = multiple.plus(linear(x if y == divisor else y), coefficient)
            case _:
                rest.terms[term] = coefficient
    if rest.constant < 0 < multiple.constant:  # (x + n - 1) // n rather than (x - 1) // n + 1: x may be 0
        multiple.constant -= 1
        rest.terms[divisor] = 1
    return multiple, rest


# --- one rule per operator: the simplified expression, or None to build the node as it stands -------------


def _is(node: Expr, value: Number) -> bool:
    return isinstance(node, Const) and node.value == value


def _total(node: Op) -> Expr | None:
    total = linear(node)
    fits = all(-_INT64 <= value < _INT64 for value in (total.constant, *total.terms.values()))
    return total.expr() if fits else None


def _sum(op: str) -> Callable[..., Expr | None]:
    def rule(node: Op, a: Expr, b: Expr) -> Expr | None:
        if node.type is Type.INT:
            return _total(node)
        neutral = Const(-0.0 if op == "add" else 0.0, Type.FLOAT)  # -0.0 + 0.0 is 0.0
        if op == "add" and a == neutral:
            return b
        return a if b == neutral else None

    return rule


def _mul(node: Op, a: Expr, b: Expr) -> Expr | None:
    if node.type is Type.INT:
        return _total(node) if isinstance(a, Const) or isinstance(b, Const) else None
    return a if _is(b, 1) else b if _is(a, 1) else None


def _neg(node: Op, a: Expr) -> Expr | None:
    if node.type is Type.INT:
        return _total(node)
    return a.args[0] if isinstance(a, Op) and a.op == "neg" else None


def _truediv(node: Op, a: Expr, b: Expr) -> Expr | None:
    return a if _is(b, 1) else None


def _floordiv(node: Op, a: Expr, b: Expr) -> Expr | None:
    if node.type is not Type.INT or _is(b, 0):
        return None
    multiple, rest = split(linear(a), b)
    quotient: Expr | None = None
    if not rest.terms:
        if isinstance(b, Const):
            quotient = integer(rest.constant // int(b.value))
        elif rest.constant == 0:
            quotient = integer(0)
    elif isinstance(b, Const) and b.value > 0:
        match a:
            case Op(op="floordiv", args=(x, Const(value=inner))) if inner > 0:  # (x // 2) // 3
                return floordiv(x, integer(int(inner) * int(b.value)))
    if quotient is None and (multiple.terms or multiple.constant):
        quotient = Op("floordiv", (rest.expr(), b), Type.INT, node.wide)
    return None if quotient is None else add(quotient, multiple.expr())


def _mod(node: Op, a: Expr, b: Expr) -> Expr | None:
    if node.type is not Type.INT or _is(b, 0):
        return None
    multiple, rest = split(linear(a), b)
    if not rest.terms and rest.constant == 0:
        return integer(0)
    if multiple.terms or multiple.constant:
        return make("mod", rest.expr(), b, wide=node.wide)
    return None


def _extremum(op: str) -> Callable[..., Expr | None]:
    def rule(node: Op, a: Expr, b: Expr) -> Expr | None:
        if a == b:
            return a
        for outer, inner in ((a, b), (b, a)):  # min(min(x, y), y)
            if isinstance(inner, Op) and inner.op == op and outer in inner.args:
                return inner
        if node.type is not Type.INT:
            return None
        apart = difference(a, b)
        if apart is not None:
            return a if (apart <= 0) == (op == "min") else b
        if isinstance(a, Const):
            return make(op, b, a)
        match a, b:
            case Op(op=inner_op, args=(x, Const() as c)), Const() if inner_op == op:
                return make(op, x, make(op, c, b))
        return None

    return rule


def _abs(node: Op, a: Expr) -> Expr | None:
    return a if isinstance(a, Op) and a.op == "abs" else None


def _compare(op: str) -> Callable[..., Expr | None]:
    def rule(node: Op, a: Expr, b: Expr) -> Expr | None:
        if a.type is Type.INT and b.type is Type.INT:
            apart = difference(a, b)
            return None if apart is None else boolean(bool(FOLD[op](apart, 0)))
        if a.type is Type.BOOL and b.type is Type.BOOL and op in ("eq", "ne"):
            return not_(xor(a, b)) if op == "eq" else xor(a, b)
        return None

    return rule


def _and(node: Op, a: Expr, b: Expr) -> Expr | None:
    if a in (FALSE, b) or b == TRUE:
        return a
    return b if a == TRUE else FALSE if b == FALSE else None


def _or(node: Op, a: Expr, b: Expr) -> Expr | None:
    if a in (TRUE, b) or b == FALSE:
        return a
    return b if a == FALSE else TRUE if b == TRUE else None


def _xor(node: Op, a: Expr, b: Expr) -> Expr | None:
    for x, y in ((a, b), (b, a)):
        if isinstance(x, Const):
            return not_(y) if x.value else y
    return FALSE if a == b else None


#: The comparison that holds exactly where another does not. For floats NaN makes all but eq/ne differ.
COMPLEMENT = {"lt": "ge", "ge": "lt", "gt": "le", "le": "gt", "eq": "ne", "ne": "eq"}


def _not(node: Op, a: Expr) -> Expr | None:
    match a:
        case Op(op="not", args=(x,)):
            return x
        case Op(op="eq" | "ne", args=(x, y)):
            return make(COMPLEMENT[a.op], x, y)
        case Op(op=op, args=(x, y)) if op in COMPLEMENT and Type.FLOAT not in (x.type, y.type):
            return make(COMPLEMENT[op], x, y)
    return None


def _select(node: Op, c: Expr, a: Expr, b: Expr) -> Expr | None:
    if isinstance(c, Const):
        return a if c.value else b
    if a == b:
        return a
    if isinstance(c, Op) and c.op == "not":
        return select(c.args[0], b, a)
    if node.type is Type.BOOL:
        if a == TRUE or b == FALSE:
            return or_(c, b) if a == TRUE else and_(c, a)
        if a == FALSE or b == TRUE:
            return and_(not_(c), b) if a == FALSE else or_(not_(c), a)
    return None


_RULES: dict[str, Callable[..., Expr | None]] = {
    "add": _sum("add"),
    "sub": _sum("sub"),
    "neg": _neg,
    "mul": _mul,
    "truediv": _truediv,
    "floordiv": _floordiv,
    "mod": _mod,
    "min": _extremum("min"),
    "max": _extremum("max"),
    "abs": _abs,
    "and": _and,
    "or": _or,
    "xor": _xor,
    "not": _not,
    "select": _select,
    **{op: _compare(op) for op in COMPLEMENT},
}


def make(op: str, *args: Expr, wide: bool = False) -> Expr:
    """Return ``op`` of simplified arguments, which have the types that the operator takes, simplified."""
    type = result_type(op, args)
    folded = _fold(op, args, type)
    if folded is not None:
        return folded
    node = Op(op, args, type, wide)
    rule = _RULES.get(op)
    simpler = rule(node, *args) if rule else None
    return node if simpler is None else simpler


def simplify(expr: Expr) -> Expr:
    """Rebuild an expression through ``make``; the value stays the same wherever it is defined."""
    return rewrite(expr, lambda n: make(n.op, *n.args, wide=n.wide) if isinstance(n, Op) else None)


def _named(op: str) -> Callable[..., Expr]:
    def construct(*args: Expr) -> Expr:
        return make(op, *args)

    construct.__doc__ = f"Return ``{op}`` of the arguments, simplified."
    return construct


add, sub, mul, neg = _named("add"), _named("sub"), _named("mul"), _named("neg")
truediv, floordiv, mod = _named("truediv"), _named("floordiv"), _named("mod")
minimum, maximum, absolute = _named("min"), _named("max"), _named("abs")
lt, le, gt, ge, eq, ne = (_named(op) for op in ("lt", "le", "gt", "ge", "eq", "ne"))
and_, or_, xor, not_ = _named("and"), _named("or"), _named("xor"), _named("not")
select = _named("select")


def ceildiv(a: Expr, b: Expr) -> Expr:
    """Return ``ceil(a / b)`` for a positive integer ``b``."""
    multiple, rest = split(linear(a), b)
    if not rest.terms and rest.constant == 0:
        return multiple.expr()
    return floordiv(add(a, sub(b, integer(1))), b)
