"""Expressions as Triton: blocks and scalars alike, compiled or interpreted.

A scalar condition that is combined with one that varies over a tile is written ``True & condition``: the interpreter
(3.6 to 3.9) gives a scalar comparison the type of what was compared, and would splat it as an integer or a float.

The interpreter keeps the fp32 scalars of a call as Python floats. A comparison of those alone would be a Python bool,
which has no ``.to`` and whose ``~`` is a number: it is written with ``tl.cast``.

``/`` may be off by two units in the last place (``div.full.f32``) and ``tl.sqrt`` by one; where a quotient or a root is
compared or rounded, and everywhere without ``fast_math``, ``tl.div_rn`` and ``tl.sqrt_rn`` round to nearest.

Some releases of Triton compute ``-x`` as ``0 - x``, and take a literal -0.0 for 0.0. Where the sign of a zero matters,
a product with -1.0 is written instead.

Sources: Triton language reference (integer division and remainder truncate, as in C; comparisons with NaN are
false; ``tl.minimum`` drops NaN unless told otherwise).
"""

from __future__ import annotations

import math

from attngen.lang.intervals import has_no_sign
from attngen.lang.ir import Const, Expr, Op, Type, Var
from attngen.lang.ranges import INT32
from attngen.lang.statements import Code, Statement, joined, statement, written
from attngen.lang.targets import Dialect, EmissionScope, power_factors, power_of_two

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
    "sigmoid": "tl.sigmoid", "erf": "tl.erf",
}  # fmt: skip
#: Conversions after a load, so that int and float are always int32 (or int64) and float32.
_CONVERT = {
    "bool": " != 0", "int8": ".to(tl.int32)", "uint8": ".to(tl.int32)", "int16": ".to(tl.int32)",
    "fp16": ".to(tl.float32)", "bf16": ".to(tl.float32)",
}  # fmt: skip
_SMALLEST_NORMAL = 2.0**-126
#: (tanh(x) - x) / x^3 as a polynomial of x^2, the highest power first: fitted for the least relative error of tanh(x)
#: where |x| <= 0.5.
_TANH = (0.017241487, -0.053045493, 0.13325879, -0.33333144)
#: (atan(x) - x) / x^3 as a polynomial of x^2, the highest power first: fitted for the least relative error of atan(x)
#: where 0 <= x <= 1.
_ATAN = (
    0.00292063223, -0.0163677064, 0.0432115308, -0.0755218895, 0.10665994, -0.142110529, 0.199937726, -0.333331527,
)  # fmt: skip
#: From here on, a float32 has no fraction; a number below it that is added to it is rounded to a whole one, half to
#: even.
_NO_FRACTION = 2.0**23
_LONG_LINE = 100


class TritonDialect(Dialect):
    """Triton's table."""

    atom = _ATOM

    def constant(self, node: Const) -> Code:
        if node.type is Type.BOOL:
            return Code(str(bool(node.value)), _ATOM)
        if node.type is Type.INT:
            if not INT32[0] <= node.value <= INT32[1]:  # next to an int32, Triton takes every literal for one
                return Code(f"tl.cast({int(node.value)}, tl.int64)", _ATOM)
            return Code(str(int(node.value)), _ATOM if node.value >= 0 else _SIGN)
        value = float(node.value)
        if math.isnan(value):
            return Code('float("nan")', _ATOM)
        if math.isinf(value):
            return Code('float("inf")' if value > 0 else 'float("-inf")', _ATOM)
        if value == 0 and math.copysign(1.0, value) < 0:
            return Code("tl.cast(0.0, tl.float32) * -1.0", _PRODUCT)
        if 0 < abs(value) < _SMALLEST_NORMAL:  # Triton would take the literal for a float64
            return Code(f"tl.cast({value!r}, tl.float32)", _ATOM)
        return Code(repr(value), _ATOM if math.copysign(1.0, value) > 0 else _SIGN)

    def operator(self, node: Op, args: tuple[Code, ...], scope: EmissionScope) -> Code:
        op = node.op
        if all(isinstance(arg, Const) for arg in node.args):  # no value at build time: Triton needs a tensor
            kind = {Type.FLOAT: "float32", Type.INT: "int32", Type.BOOL: "int1"}[node.args[0].type]
            args = (_cast(args[0], kind), *args[1:])
        elif op in _COMPARISONS and all(_plain(arg, scope) for arg in node.args):
            args = (_cast(args[0], "float32"), *args[1:])
        if node.type is Type.BOOL and op not in ("not", "to_int") and scope.axes(node):
            args = tuple(
                self.lifted(code) if arg.type is Type.BOOL and not scope.axes(arg) else code
                for code, arg in zip(args, node.args, strict=True)
            )
        if node.wide and op != "select" and op not in _COMPARISONS:
            args = self._widened(node, args)
        if op == "truediv":
            return self._quotient(node, args[0], args[1], scope)
        if op in _INFIX:
            sign, strength = _INFIX[op]
            return written("{} {} {}", args[0].within(strength), sign, args[1].within(strength + 1), strength=strength)
        if op in _COMPARISONS:  # neither side may be a comparison: Python would chain them
            sides = args[0].within(_BITOR), _COMPARISONS[op], args[1].within(_BITOR)
            return written("{} {} {}", *sides, strength=_COMPARE)
        if op == "sqrt":
            return self._root(node, args[0], scope)
        if op in _CALLS:
            return _call(_CALLS[op], args[0])
        match op:
            case "neg":
                return self._negative(node, args[0], scope)
            case "not" | "invert":
                return written("~{}", args[0].within(_SIGN), strength=_SIGN)
            case "to_float":
                return _to(args[0], "float32")
            case "to_int" if node.args[0].type is Type.FLOAT:
                return self._truncated(node, args[0], scope)
            case "to_int":
                return _to(args[0], "int32")
            case "trunc":
                x = self._tensor(node.args[0], "whole", scope)
                return written("tl.where({} < 0.0, tl.ceil({}), tl.floor({}))", x, x, x, strength=_ATOM)
            case "round":
                return self._round(node, scope)
            case "expm1":
                return self._expm1(node, scope)
            case "log1p":
                return self._log1p(node, scope)
            case "atan2":
                return self._angle(node, scope)
            case "select":
                return _call("tl.where", *args)
            case "min" | "max":
                nan = [Code("propagate_nan=tl.PropagateNan.ALL")] if node.type is Type.FLOAT else []
                return _call(f"tl.{op}imum", *args, *nan)
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
                return self._quotient(node, x, written("1.0 + tl.exp(-{})", x, strength=_SUM), scope)
            case "tan":
                x = scope.named(node.args[0])
                sine, cosine = _call("tl.sin", x), _call("tl.cos", x)
                return self._quotient(node, sine, cosine, scope)
        raise ValueError(f"operator {op!r} has no Triton form")

    def _negative(self, node: Op, x: Code, scope: EmissionScope) -> Code:
        """Write ``-x`` as the value of a node, or as a part of it that decides its sign."""
        if scope.signed(node):
            return written("{} * -1.0", x.within(_PRODUCT), strength=_PRODUCT)
        return written("-{}", x.within(_SIGN), strength=_SIGN)

    def _quotient(self, node: Op, a: Code, b: Code, scope: EmissionScope) -> Code:
        if scope.exact(node):
            return _call("tl.div_rn", a, b)
        return written("{} / {}", a.within(_PRODUCT), b.within(_SIGN), strength=_PRODUCT)

    def _root(self, node: Op, x: Code, scope: EmissionScope) -> Code:
        return _call(f"tl.sqrt{'_rn' if scope.exact(node) else ''}", x)

    def _widened(self, node: Op, args: tuple[Code, ...]) -> tuple[Code, ...]:
        """Cast one argument to int64, which then promotes the others; a literal adapts by itself."""
        if any(isinstance(arg, Op) and arg.wide for arg in node.args):
            return args
        for i, arg in enumerate(node.args):
            if not isinstance(arg, Const):
                return (*args[:i], _to(args[i], "int64"), *args[i + 1 :])
        return args

    def _floordiv(self, node: Op, args: tuple[Code, ...], scope: EmissionScope) -> Code:
        dividend, divisor = node.args
        shift = power_of_two(divisor)
        if _not_negative(dividend, scope) and _positive(divisor, scope):
            return written("{} // {}", args[0].within(_PRODUCT), args[1].within(_SIGN), strength=_PRODUCT)
        if shift is not None:  # an arithmetic shift rounds down
            return written("{} >> {}", args[0].within(_SHIFT), str(shift), strength=_SHIFT)
        a, b = self._pair(node, args, scope)
        if _positive(divisor, scope):
            rounded = written("({a} % {b} < 0)", a=a, b=b)
        else:
            rounded = written("(({a} % {b} != 0) & (({a} < 0) != ({b} < 0)))", a=a, b=b)
        return written("{} // {} - {}.to(tl.int32)", a, b, rounded, strength=_SUM)

    def _mod(self, node: Op, args: tuple[Code, ...], scope: EmissionScope) -> Code:
        dividend, divisor = node.args
        if _not_negative(dividend, scope) and _positive(divisor, scope):
            return written("{} % {}", args[0].within(_PRODUCT), args[1].within(_SIGN), strength=_PRODUCT)
        if power_of_two(divisor) is not None:
            assert isinstance(divisor, Const)
            return written("{} & {}", args[0].within(_BITAND), str(int(divisor.value) - 1), strength=_BITAND)
        a, b = self._pair(node, args, scope)
        rest = scope.temporary(node, "remainder", written("{} % {}", a, b))
        if _positive(divisor, scope):
            wrong = written("{} < 0", rest)
        else:
            wrong = written("({rest} != 0) & (({rest} < 0) != ({b} < 0))", rest=rest, b=b)
        return written("tl.where({}, {rest} + {b}, {rest})", wrong, rest=rest, b=b, strength=_ATOM)

    def _pair(self, node: Op, args: tuple[Code, ...], scope: EmissionScope) -> tuple[Code, Code]:
        """Return both arguments as leaves that may be repeated, the first in int64 where the node asks."""
        if node.wide:
            a = scope.temporary(node, "dividend", args[0])
            b = scope.temporary(node, "divisor", args[1]) if args[1].strength < _ATOM else args[1]
            return a, b
        return scope.named(node.args[0]), scope.named(node.args[1]).within(_SIGN)

    def _power(self, node: Op, scope: EmissionScope) -> Code:
        exponent = node.args[1]
        if not isinstance(exponent, Const):
            return self._float_power(node, scope)
        power = exponent.value
        one = "1.0" if node.type is Type.FLOAT else "1"
        if power == 0:  # even of NaN
            return Code(one, _ATOM)
        base = scope.named(node.args[0])
        if node.wide:
            base = scope.temporary(node, "base", self._widened(node, (base,))[0])
        if math.isfinite(power) and power == int(power):
            factors = power_factors(
                base.within(_SIGN),
                abs(int(power)),
                lambda x: scope.temporary(node, "square", written("{} * {}", x, x)),
            )
            result = joined(" * ", factors, _PRODUCT if len(factors) > 1 else _SIGN)
            return result if power > 0 else self._quotient(node, Code("1.0", _ATOM), result, scope)
        if power == 0.5:
            return self._root(node, base, scope)
        if power == -0.5:
            return _call("tl.rsqrt", base)
        return written("tl.exp2({} * tl.log2({}))", repr(power), base, strength=_ATOM)

    def _tensor(self, node: Expr, role: str, scope: EmissionScope) -> Code:
        """Return a float as a name that may be repeated, and as a tensor also in the interpreter."""
        x = scope.named(node)
        if _plain(node, scope):
            return scope.temporary(node, role, _cast(x, "float32"))
        return x if x.text.isidentifier() else scope.temporary(node, role, x)

    def _truncated(self, node: Op, x: Code, scope: EmissionScope) -> Code:
        """Convert a float to int32. What LLVM leaves undefined is defined: NaN and what int32 cannot hold."""
        low, high = scope.bounds(node)
        if scope.is_number(node.args[0]) and INT32[0] < low and high < INT32[1]:
            return _to(_cast(x, "float32") if _plain(node.args[0], scope) else x, "int32")
        x = self._tensor(node.args[0], "whole", scope)
        held = written("tl.maximum({}, -2147483648.0).to(tl.int32)", x)
        beyond = written("tl.where({} == {}, 2147483647, 0)", x, x)
        return written("tl.where({} < 2147483648.0, {}, {})", x, held, beyond, strength=_ATOM)

    def _round(self, node: Op, scope: EmissionScope) -> Code:
        x = self._tensor(node.args[0], "whole", scope)
        size = scope.temporary(node, "size", _call("tl.abs", x))
        near = scope.temporary(node, "near", written("{} + {n} - {n}", size, n=repr(_NO_FRACTION), strength=_SUM))
        negative = written("{}.to(tl.int32, bitcast=True) < 0" if scope.signed(node) else "{} < 0.0", x)
        near = written("tl.where({}, {}, {near})", negative, self._negative(node, near, scope), near=near)
        return written("tl.where({} < {}, {}, {})", size, repr(_NO_FRACTION), near, x, strength=_ATOM)

    def _expm1(self, node: Op, scope: EmissionScope) -> Code:
        """(u - 1) * x / log(u) with u = exp(x): the error of u cancels."""
        x = self._tensor(node.args[0], "exponent", scope)
        u = scope.temporary(node, "power", _call("tl.exp", x))
        less = written("{} - 1.0", u, strength=_SUM)
        near = written("({}) * tl.div_rn({}, tl.log({}))", less, x, u, strength=_PRODUCT)
        ends = written('({u} == 0.0) | ({u} == float("inf"))', u=u)
        return written("tl.where({u} == 1.0, {}, tl.where({}, {}, {}))", x, ends, less, near, u=u, strength=_ATOM)

    def _log1p(self, node: Op, scope: EmissionScope) -> Code:
        """log(u) * x / (u - 1) with u = 1 + x: the error of u cancels."""
        x = self._tensor(node.args[0], "logarithm", scope)
        u = scope.temporary(node, "shifted", written("1.0 + {}", x, strength=_SUM))
        same = written('({u} == 1.0) | ({u} == float("inf"))', u=u)
        value = written("tl.log({u}) * tl.div_rn({}, {u} - 1.0)", x, u=u, strength=_PRODUCT)
        return written("tl.where({}, {}, {})", same, x, value, strength=_ATOM)

    def _angle(self, node: Op, scope: EmissionScope) -> Code:
        """atan2 from the angle within an eighth of a turn, relative error 2^-22; zeros have signs, as in torch."""
        y, x = self._tensor(node.args[0], "opposite", scope), self._tensor(node.args[1], "adjacent", scope)
        rise, run = (scope.temporary(node, role, _call("tl.abs", of)) for role, of in (("rise", y), ("run", x)))
        nan = Code("propagate_nan=tl.PropagateNan.ALL")
        low, high = (
            scope.temporary(node, role, _call(f"tl.{op}imum", rise, run, nan))
            for role, op in (("shorter", "min"), ("longer", "max"))
        )
        ratio = written("tl.where({l} == {h}, tl.where({h} == 0.0, 0.0, 1.0), tl.div_rn({l}, {h}))", l=low, h=high)
        ratio = scope.temporary(node, "ratio", ratio)
        square = scope.temporary(node, "square", written("{} * {}", ratio, ratio, strength=_PRODUCT))
        sums = Code(repr(_ATAN[0]))
        for term in _ATAN[1:]:
            sums = written(f"({{}}) * {{}} {'-' if term < 0 else '+'} {abs(term)!r}", sums, square)
        near = written("{r} + {r} * {} * ({})", square, sums, r=ratio, strength=_SUM)
        angle = scope.temporary(node, "angle", near)
        flipped = written("tl.where({} > {}, 1.5707963267948966 - {a}, {a})", rise, run, a=angle)
        angle = scope.temporary(node, "angle", flipped)
        turned = written("tl.where({}.to(tl.int32, bitcast=True) < 0, 3.141592653589793 - {a}, {a})", x, a=angle)
        angle = scope.temporary(node, "angle", turned)
        below = self._negative(node, angle, scope)
        return written("tl.where({}.to(tl.int32, bitcast=True) < 0, {}, {a})", y, below, a=angle, strength=_ATOM)

    def _float_power(self, node: Op, scope: EmissionScope) -> Code:
        """A power whose exponent varies; of a negative base, if the exponent is whole, as in torch."""
        base, exponent = node.args
        x, y = self._tensor(base, "base", scope), self._tensor(exponent, "exponent", scope)
        low = scope.bounds(base)[0]
        size = x if low > 0 else _call("tl.abs", x)
        logarithm = scope.temporary(node, "logarithm", _call("tl.log2", size))

        def condition(form: str, value: Code, arg: Expr) -> Code:
            """Write a condition of one argument so that it can be combined with one of the other."""
            code = written(form, x=value, strength=_COMPARE)
            return (self.lifted(code) if scope.axes(node) and not scope.axes(arg) else code).within(_SHIFT)

        ends = condition("{x} == 0.0", y, exponent), condition("{x} == 0.0", logarithm, base)
        one = written("{} | {}", *ends)  # 0 * inf would be NaN
        power = written("tl.where({}, 1.0, tl.exp2({} * {}))", one, y, logarithm, strength=_ATOM)
        if has_no_sign(base, low):
            return power
        power = scope.temporary(node, "power", power)
        below = condition("{x}.to(tl.int32, bitcast=True) < 0", x, base)
        odd = condition("{x} - 2.0 * tl.floor(0.5 * {x}) == 1.0", y, exponent)
        negative = self._negative(node, power, scope)
        signed = written("tl.where({} & {}, {}, {p})", below, odd, negative, p=power)
        fraction = written("{} & {}", condition("{x} < 0.0", x, base), condition("tl.floor({x}) != {x}", y, exponent))
        return written('tl.where({}, float("nan"), {})', fraction, signed, strength=_ATOM)

    def _tanh(self, node: Op, x: Code, scope: EmissionScope) -> Code:
        if scope.approximate:  # one instruction, relative error 2^-11 (PTX ISA, tanh.approx.f32)
            asm = '"tanh.approx.f32 $0, $1;", "=f,f"'
            call = "tl.inline_asm_elementwise({}, [{}], dtype=tl.float32, is_pure=True, pack=1)"
            return written(call, asm, x, strength=_ATOM)
        if _plain(node.args[0], scope):
            x = scope.temporary(node, "angle", _cast(x, "float32"))
        elif not x.text.isidentifier():
            x = scope.temporary(node, "angle", x)
        # Near 0, where the difference would cancel, a polynomial: relative error 2^-23 for |x| < 0.5.
        square = scope.temporary(node, "square", written("{} * {}", x, x, strength=_PRODUCT))
        sums = written(
            f"(({_TANH[0]!r} * {{}} - {-_TANH[1]!r}) * {{}} + {_TANH[2]!r}) * {{}} - {-_TANH[3]!r}",
            square, square, square, strength=_SUM,
        )  # fmt: skip
        # 2 * log2(e); exp2 saturates to 0 and inf, which give -1 and 1
        divisor = written("tl.exp2(2.8853900817779268 * {}) + 1.0", x, strength=_SUM)
        far = written("1.0 - {}", self._quotient(node, Code("2.0", _ATOM), divisor, scope), strength=_SUM)
        near = written("{} + {} * {} * ({})", x, x, square, sums, strength=_SUM)
        if scope.signed(node):  # of -0.0 the sum is 0.0
            near = written("tl.where({} == 0.0, {}, {})", x, x, near, strength=_ATOM)
        return written("tl.where(tl.abs({}) < 0.5, {}, {})", x, near, far, strength=_ATOM)

    def declare(self, name: str, type: Type, wide: bool, value: Code) -> Statement:
        return statement(f"{name} = {{}}", value, declares=name)

    def offset(self, index: Code, stride: Code, *, natural: bool = False) -> Code:
        literal = index.text.lstrip("-").isdecimal()
        wide = index if literal else _to(index, "int64")
        return wide if stride.text == "1" else written("{} * {}", wide, stride, strength=_PRODUCT)

    def within(self, index: Code, extent: Code, *, low: bool, high: bool) -> Code:
        parts = []
        if low:
            parts.append(written("{} >= 0", index.within(_BITOR), strength=_COMPARE))
        if high:
            parts.append(written("{} < {}", index.within(_BITOR), extent, strength=_COMPARE))
        return self.conjunction(parts)

    def conjunction(self, parts: list[Code]) -> Code:
        if len(parts) == 1:
            return parts[0]
        return joined(" & ", (part.within(_BITAND + (i > 0)) for i, part in enumerate(parts)), _BITAND)

    def lifted(self, condition: Code) -> Code:
        return written("True & {}", condition.within(_BITAND + 1), strength=_BITAND)

    def pointer(self, name: str, base: Code, offsets: list[Code], *, kept: bool = False) -> Statement:
        return statement(f"{name} = {{}}", joined(" + ", [base, *offsets]), declares=name)

    def load(self, name: str, dtype: str, base: Code, offsets: list[Code], guard: Code | None) -> Statement:
        call = [joined(" + ", [base, *offsets])]
        if guard is not None:
            call += [written("mask={}", guard), Code("other=0")]
        converted = _CONVERT.get(dtype, "")
        loaded = statement(f"{name} = tl.load({{}}){converted}", joined(", ", call), declares=name)
        if len(loaded.text) <= _LONG_LINE:
            return loaded
        rows = joined("\n", (written("    {},", part) for part in call))
        return statement(f"{name} = tl.load(\n{{}}\n){converted}", rows, declares=name)

    def search(self, pointer: Code, stride: Code, length: Code, value: Code, strict: bool) -> Code:
        arguments = joined(", ", [pointer, stride, length, value, Code(str(strict))])
        return written("{first_at_least}({})", arguments, strength=_ATOM)


def _call(name: str, *args: Code) -> Code:
    return written("{}({})", name, joined(", ", args), strength=_ATOM)


def _cast(value: Code, kind: str) -> Code:
    return written("tl.cast({}, tl.{})", value, kind, strength=_ATOM)


def _to(value: Code, kind: str) -> Code:
    return written("{}.to(tl.{})", value.within(_ATOM), kind, strength=_ATOM)


def _plain(node: Expr, scope: EmissionScope) -> bool:
    """Whether a float is computed from literals and fp32 scalars of the call alone, with Python's operators."""
    match node:
        case Const(type=Type.FLOAT):
            return True
        case Var(type=Type.FLOAT):
            return not scope.axes(node)
        case Op(op="add" | "sub" | "mul" | "truediv" | "neg", type=Type.FLOAT, args=args):
            return all(_plain(arg, scope) for arg in args)
    return False


def _not_negative(node: Expr, scope: EmissionScope) -> bool:
    return scope.bounds(node)[0] >= 0


def _positive(node: Expr, scope: EmissionScope) -> bool:
    return scope.bounds(node)[0] > 0
