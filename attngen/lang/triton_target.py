"""Expressions as Triton: blocks and scalars alike, compiled or interpreted.

A scalar condition that meets one that varies over a tile is written ``True & condition``: the interpreter (3.6 to
3.9) keeps a scalar comparison in the type of what was compared, and would splat it as an integer or a float.

A call passes fp32 scalars, which the interpreter keeps as Python's floats: a comparison of such alone is written with
``tl.cast``, as it would be Python's bool, which has no ``.to`` and whose ``~`` is a number.

``/`` may be off by two units in the last place (``div.full.f32``) and ``tl.sqrt`` by one; where a quotient or a root
decides, and everywhere without ``fast_math``, ``tl.div_rn`` and ``tl.sqrt_rn`` round to nearest.

Sources: Triton language reference (integer division and remainder truncate, as in C; comparisons with NaN are
false; ``tl.minimum`` drops NaN unless told otherwise).
"""

from __future__ import annotations

import math

from attngen.lang.ir import Const, Expr, Op, Type, Var
from attngen.lang.ranges import INT32
from attngen.lang.targets import Dialect, Piece, Scope, power_factors, power_of_two

# Binding strength in Python's grammar, loosest first.
_COMPARE, _BITOR, _BITXOR, _BITAND, _SHIFT, _SUM, _PRODUCT, _SIGN, _ATOM = range(1, 10)

_INFIX: dict[str, tuple[str, int]] = {
    "or": ("|", _BITOR), "bitor": ("|", _BITOR), "xor": ("^", _BITXOR), "bitxor": ("^", _BITXOR),
    "and": ("&", _BITAND), "bitand": ("&", _BITAND), "lshift": ("<<", _SHIFT), "rshift": (">>", _SHIFT),
    "add": ("+", _SUM), "sub": ("-", _SUM), "mul": ("*", _PRODUCT),
}  # fmt: skip
_COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
_CALLS = {
    "abs": "tl.abs", "floor": "tl.floor", "ceil": "tl.ceil", "exp": "tl.exp", "exp2": "tl.exp2", "log": "tl.log",
    "log2": "tl.log2", "rsqrt": "tl.rsqrt", "sin": "tl.sin", "cos": "tl.cos",
    "sigmoid": "tl.sigmoid",
}  # fmt: skip
#: What follows a load, so that int and float are always int32 (or int64) and float32.
_CONVERT = {
    "bool": " != 0", "int8": ".to(tl.int32)", "uint8": ".to(tl.int32)", "int16": ".to(tl.int32)",
    "fp16": ".to(tl.float32)", "bf16": ".to(tl.float32)",
}  # fmt: skip
_SMALLEST_NORMAL = 2.0**-126
#: (tanh(x) - x) / x^3 as a polynomial of x^2, the highest power first: fitted for the least relative error of tanh(x)
#: where |x| <= 0.5.
_TANH = (0.017241487, -0.053045493, 0.13325879, -0.33333144)
_LONG_LINE = 100


class TritonDialect(Dialect):
    """Triton's table."""

    atom = _ATOM

    def constant(self, node: Const) -> Piece:
        if node.type is Type.BOOL:
            return Piece(str(bool(node.value)), _ATOM)
        if node.type is Type.INT:
            if not INT32[0] <= node.value <= INT32[1]:  # beside an int32, Triton takes every literal for one
                return Piece(f"tl.cast({int(node.value)}, tl.int64)", _ATOM)
            return Piece(str(int(node.value)), _ATOM if node.value >= 0 else _SIGN)
        value = float(node.value)
        if math.isnan(value):
            return Piece('float("nan")', _ATOM)
        if math.isinf(value):
            return Piece('float("inf")' if value > 0 else 'float("-inf")', _ATOM)
        if 0 < abs(value) < _SMALLEST_NORMAL:  # Triton would take the literal for a float64
            return Piece(f"tl.cast({value!r}, tl.float32)", _ATOM)
        return Piece(repr(value), _ATOM if math.copysign(1.0, value) > 0 else _SIGN)

    def operator(self, node: Op, args: tuple[Piece, ...], scope: Scope) -> Piece:
        op = node.op
        if all(isinstance(arg, Const) for arg in node.args):  # no value at build time: Triton needs a tensor
            kind = {Type.FLOAT: "float32", Type.INT: "int32", Type.BOOL: "int1"}[node.args[0].type]
            args = (Piece(f"tl.cast({args[0].text}, tl.{kind})", _ATOM), *args[1:])
        elif op in _COMPARISONS and all(_plain(arg, scope) for arg in node.args):
            args = (Piece(f"tl.cast({args[0].text}, tl.float32)", _ATOM), *args[1:])
        if node.type is Type.BOOL and op not in ("not", "to_int") and scope.axes(node):
            args = tuple(
                self.lifted(piece) if arg.type is Type.BOOL and not scope.axes(arg) else piece
                for piece, arg in zip(args, node.args, strict=True)
            )
        if node.wide and op != "select" and op not in _COMPARISONS:
            args = self._widened(node, args)
        if op == "truediv":
            return self._quotient(node, args[0], args[1], scope)
        if op in _INFIX:
            sign, strength = _INFIX[op]
            return Piece(f"{args[0].within(strength)} {sign} {args[1].within(strength + 1)}", strength)
        if op in _COMPARISONS:  # neither side may be a comparison: Python would chain them
            return Piece(f"{args[0].within(_BITOR)} {_COMPARISONS[op]} {args[1].within(_BITOR)}", _COMPARE)
        if op == "sqrt":
            return self._root(node, args[0], scope)
        if op in _CALLS:
            return Piece(f"{_CALLS[op]}({args[0].text})", _ATOM)
        match op:
            case "neg":
                return Piece(f"-{args[0].within(_SIGN)}", _SIGN)
            case "not" | "invert":
                return Piece(f"~{args[0].within(_SIGN)}", _SIGN)
            case "to_float":
                return Piece(f"{args[0].within(_ATOM)}.to(tl.float32)", _ATOM)
            case "to_int":
                return Piece(f"{args[0].within(_ATOM)}.to(tl.int32)", _ATOM)
            case "select":
                return Piece(f"tl.where({', '.join(arg.text for arg in args)})", _ATOM)
            case "min" | "max":
                nan = ", propagate_nan=tl.PropagateNan.ALL" if node.type is Type.FLOAT else ""
                return Piece(f"tl.{op}imum({args[0].text}, {args[1].text}{nan})", _ATOM)
            case "floordiv":
                return self._floordiv(node, args, scope)
            case "mod":
                return self._mod(node, args, scope)
            case "pow":
                return self._power(node, scope)
            case "tanh":
                return self._tanh(node, args[0], scope)
            case "silu":
                x = scope.named(node.args[0])
                return self._quotient(node, x, Piece(f"1.0 + tl.exp(-{x.text})", _SUM), scope)
            case "tan":
                x = scope.named(node.args[0])
                sine, cosine = (Piece(f"tl.{name}({x.text})", _ATOM) for name in ("sin", "cos"))
                return self._quotient(node, sine, cosine, scope)
        raise ValueError(f"operator {op!r} has no Triton form")

    def _quotient(self, node: Op, a: Piece, b: Piece, scope: Scope) -> Piece:
        if scope.exact(node):
            return Piece(f"tl.div_rn({a.text}, {b.text})", _ATOM)
        return Piece(f"{a.within(_PRODUCT)} / {b.within(_SIGN)}", _PRODUCT)

    def _root(self, node: Op, x: Piece, scope: Scope) -> Piece:
        return Piece(f"tl.sqrt{'_rn' if scope.exact(node) else ''}({x.text})", _ATOM)

    def _widened(self, node: Op, args: tuple[Piece, ...]) -> tuple[Piece, ...]:
        """Cast one argument to int64, which then promotes the others; a literal adapts by itself."""
        if any(isinstance(arg, Op) and arg.wide for arg in node.args):
            return args
        for i, arg in enumerate(node.args):
            if not isinstance(arg, Const):
                return (*args[:i], Piece(f"{args[i].within(_ATOM)}.to(tl.int64)", _ATOM), *args[i + 1 :])
        return args

    def _floordiv(self, node: Op, args: tuple[Piece, ...], scope: Scope) -> Piece:
        dividend, divisor = node.args
        shift = power_of_two(divisor)
        if _not_negative(dividend, scope) and _positive(divisor, scope):
            return Piece(f"{args[0].within(_PRODUCT)} // {args[1].within(_SIGN)}", _PRODUCT)
        if shift is not None:  # an arithmetic shift rounds down
            return Piece(f"{args[0].within(_SHIFT)} >> {shift}", _SHIFT)
        a, b = self._pair(node, args, scope)
        if _positive(divisor, scope):
            rounded = f"({a} % {b} < 0)"
        else:
            rounded = f"(({a} % {b} != 0) & (({a} < 0) != ({b} < 0)))"
        return Piece(f"{a} // {b} - {rounded}.to(tl.int32)", _SUM)

    def _mod(self, node: Op, args: tuple[Piece, ...], scope: Scope) -> Piece:
        dividend, divisor = node.args
        if _not_negative(dividend, scope) and _positive(divisor, scope):
            return Piece(f"{args[0].within(_PRODUCT)} % {args[1].within(_SIGN)}", _PRODUCT)
        if power_of_two(divisor) is not None:
            assert isinstance(divisor, Const)
            return Piece(f"{args[0].within(_BITAND)} & {int(divisor.value) - 1}", _BITAND)
        a, b = self._pair(node, args, scope)
        rest = scope.temporary(node, "remainder", f"{a} % {b}").text
        if _positive(divisor, scope):
            wrong = f"{rest} < 0"
        else:
            wrong = f"({rest} != 0) & (({rest} < 0) != ({b} < 0))"
        return Piece(f"tl.where({wrong}, {rest} + {b}, {rest})", _ATOM)

    def _pair(self, node: Op, args: tuple[Piece, ...], scope: Scope) -> tuple[str, str]:
        """Return both arguments as leaves that may be repeated, the first in int64 where the node asks."""
        if node.wide:
            a = scope.temporary(node, "dividend", args[0].text)
            b = scope.temporary(node, "divisor", args[1].text) if args[1].strength < _ATOM else args[1]
            return a.text, b.text
        return scope.named(node.args[0]).text, scope.named(node.args[1]).within(_SIGN)

    def _power(self, node: Op, scope: Scope) -> Piece:
        exponent = node.args[1]
        assert isinstance(exponent, Const)
        power = exponent.value
        one = "1.0" if node.type is Type.FLOAT else "1"
        if power == 0:  # also of NaN
            return Piece(one, _ATOM)
        base = scope.named(node.args[0])
        if node.wide:
            base = scope.temporary(node, "base", self._widened(node, (base,))[0].text)
        if power == int(power):
            factors = power_factors(
                base.within(_SIGN),
                abs(int(power)),
                lambda x: scope.temporary(node, "square", f"{x} * {x}").text,
            )
            result = Piece(" * ".join(factors), _PRODUCT if len(factors) > 1 else _SIGN)
            return result if power > 0 else self._quotient(node, Piece("1.0", _ATOM), result, scope)
        if power == 0.5:
            return self._root(node, base, scope)
        if power == -0.5:
            return Piece(f"tl.rsqrt({base.text})", _ATOM)
        return Piece(f"tl.exp2({power!r} * tl.log2({base.text}))", _ATOM)

    def _tanh(self, node: Op, x: Piece, scope: Scope) -> Piece:
        if scope.approximate:  # one instruction, relative error 2^-11 (PTX ISA, tanh.approx.f32)
            asm = '"tanh.approx.f32 $0, $1;", "=f,f"'
            return Piece(f"tl.inline_asm_elementwise({asm}, [{x.text}], dtype=tl.float32, is_pure=True, pack=1)", _ATOM)
        if _plain(node.args[0], scope):
            x = scope.temporary(node, "angle", f"tl.cast({x.text}, tl.float32)")
        elif not x.text.isidentifier():
            x = scope.temporary(node, "angle", x.text)
        # Near 0, where the difference would cancel, a polynomial: relative error 2^-23 for |x| < 0.5.
        square = scope.temporary(node, "square", f"{x.text} * {x.text}").text
        sums = f"(({_TANH[0]!r} * {square} - {-_TANH[1]!r}) * {square} + {_TANH[2]!r}) * {square} - {-_TANH[3]!r}"
        # 2 * log2(e); exp2 saturates to 0 and inf, which give -1 and 1
        divisor = Piece(f"tl.exp2(2.8853900817779268 * {x.text}) + 1.0", _SUM)
        far = f"1.0 - {self._quotient(node, Piece('2.0', _ATOM), divisor, scope).text}"
        near = f"{x.text} + {x.text} * {square} * ({sums})"
        return Piece(f"tl.where(tl.abs({x.text}) < 0.5, {near}, {far})", _ATOM)

    def declare(self, name: str, type: Type, wide: bool, text: str) -> str:
        return f"{name} = {text}"

    def offset(self, index: Piece, stride: str) -> str:
        literal = index.text.lstrip("-").isdecimal()
        wide = index.text if literal else f"{index.within(_ATOM)}.to(tl.int64)"
        return wide if stride == "1" else f"{wide} * {stride}"

    def within(self, index: Piece, extent: str, *, low: bool, high: bool) -> Piece:
        parts = []
        if low:
            parts.append(Piece(f"{index.within(_BITOR)} >= 0", _COMPARE))
        if high:
            parts.append(Piece(f"{index.within(_BITOR)} < {extent}", _COMPARE))
        return parts[0] if len(parts) == 1 else Piece(self.conjunction(parts), _BITAND)

    def conjunction(self, parts: list[Piece]) -> str:
        if len(parts) == 1:
            return parts[0].text
        return " & ".join(part.within(_BITAND + (i > 0)) for i, part in enumerate(parts))

    def lifted(self, condition: Piece) -> Piece:
        return Piece(f"True & {condition.within(_BITAND + 1)}", _BITAND)

    def pointer(self, name: str, base: str, offsets: list[str]) -> str:
        return f"{name} = {' + '.join([base, *offsets])}"

    def load(self, name: str, dtype: str, base: str, offsets: list[str], guard: str | None) -> list[str]:
        call = [" + ".join([base, *offsets])]
        if guard is not None:
            call += [f"mask={guard}", "other=0"]
        line = f"{name} = tl.load({', '.join(call)}){_CONVERT.get(dtype, '')}"
        if len(line) <= _LONG_LINE:
            return [line]
        return [f"{name} = tl.load(", *(f"    {part}," for part in call), f"){_CONVERT.get(dtype, '')}"]

    def search(self, pointer: str, stride: str, length: str, value: str, strict: bool) -> str:
        return f"first_at_least({pointer}, {stride}, {length}, {value}, {strict})"


def _plain(node: Expr, scope: Scope) -> bool:
    """Whether a float is made of literals and fp32 scalars of the call alone, by operators of Python's own."""
    match node:
        case Const(type=Type.FLOAT):
            return True
        case Var(type=Type.FLOAT):
            return not scope.axes(node)
        case Op(op="add" | "sub" | "mul" | "truediv" | "neg", type=Type.FLOAT, args=args):
            return all(_plain(arg, scope) for arg in args)
    return False


def _not_negative(node: Expr, scope: Scope) -> bool:
    return scope.bounds(node)[0] >= 0


def _positive(node: Expr, scope: Scope) -> bool:
    return scope.bounds(node)[0] > 0
