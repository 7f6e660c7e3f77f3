"""Expressions as CUDA C++: one element per thread. The helpers are in templates/cuda/include/expression.cuh."""

from __future__ import annotations

import math

from attngen.dtypes import DTYPES
from attngen.lang.intervals import has_no_sign
from attngen.lang.ir import Const, Op, Type, walk
from attngen.lang.ranges import INT32, INT64
from attngen.lang.statements import Code, Statement, joined, statement, written
from attngen.lang.targets import Dialect, EmissionScope, power_factors, power_of_two

# Binding strength in C++'s grammar, loosest first.
_SELECT, _OR, _AND, _BITOR, _BITXOR, _BITAND, _EQUAL, _COMPARE, _SHIFT, _SUM, _PRODUCT, _SIGN, _ATOM = range(13)

_INFIX: dict[str, tuple[str, int]] = {
    "or": ("||", _OR), "and": ("&&", _AND), "xor": ("!=", _EQUAL),
    "bitor": ("|", _BITOR), "bitxor": ("^", _BITXOR), "bitand": ("&", _BITAND),
    "eq": ("==", _EQUAL), "ne": ("!=", _EQUAL),
    "lt": ("<", _COMPARE), "le": ("<=", _COMPARE), "gt": (">", _COMPARE), "ge": (">=", _COMPARE),
    "lshift": ("<<", _SHIFT), "rshift": (">>", _SHIFT), "add": ("+", _SUM), "sub": ("-", _SUM),
    "mul": ("*", _PRODUCT), "truediv": ("/", _PRODUCT),
}  # fmt: skip
#: Operators whose operands get parentheses although precedence is right: easy to misread, and compilers warn.
_BRACKETED = frozenset(("bitor", "bitxor", "bitand", "lshift", "rshift", "or", "xor", "eq", "ne"))
_CALLS = {
    "floor": "floorf", "ceil": "ceilf", "exp": "expf", "exp2": "exp2f", "log": "logf", "log2": "log2f",
    "tanh": "tanhf", "sqrt": "sqrtf", "rsqrt": "rsqrtf", "sin": "sinf", "cos": "cosf", "tan": "tanf",
    "sigmoid": "sigmoid", "silu": "silu", "trunc": "truncf", "round": "rintf", "expm1": "expm1f", "log1p": "log1pf",
    "erf": "erff",
}  # fmt: skip
#: Forms of one or two MUFU instructions.
_FAST = {
    "tanh": "tanh_approx", "exp": "__expf", "exp2": "exp2_fast", "log": "__logf", "log2": "__log2f", "sin": "__sinf",
    "cos": "__cosf", "tan": "__tanf", "sigmoid": "sigmoid_approx", "silu": "silu_approx",
}  # fmt: skip
#: Functions that kernels approximate under ``fast_math``.
_APPROXIMATED = frozenset((*_FAST, "expm1", "log1p", "erf"))
#: Those whose approximation of -0.0 is 0.0.
_LOSES_SIGN = frozenset({"expm1", "log1p", "silu"})
_LEAST_NORMAL = 2.0**-126
_PACKED = ("bf16", "fp16")
_ONE = Const(1.0, Type.FLOAT)


class CudaDialect(Dialect):
    """Rules that write each node in CUDA C++."""

    atom = _ATOM

    def constant(self, node: Const) -> Code:
        if node.type is Type.BOOL:
            return Code("true" if node.value else "false", _ATOM)
        if node.type is Type.INT:
            value = int(node.value)
            suffix = "" if INT32[0] <= value <= INT32[1] else "ll"
            if value in (INT32[0], INT64[0]):  # the minus is not part of the literal, and 2147483648 is not an int
                return Code(f"({value + 1}{suffix} - 1)", _ATOM)
            return Code(f"{value}{suffix}", _ATOM if value >= 0 else _SIGN)
        number = float(node.value)
        if math.isnan(number):
            return Code('nanf("")', _ATOM)
        if math.isinf(number):
            return Code("kInfinity" if number > 0 else "-kInfinity", _ATOM if number > 0 else _SIGN)
        return Code(f"{number!r}f", _ATOM if math.copysign(1.0, number) > 0 else _SIGN)

    def operator(self, node: Op, args: tuple[Code, ...], scope: EmissionScope) -> Code:
        op = node.op
        if op in ("min", "max", "floordiv", "mod") and scope.wide(node):  # overloads take equal types
            args = tuple(self._int64(arg) for arg in args)
        elif node.wide and op not in ("select", "lt", "le", "gt", "ge", "eq", "ne"):
            args = (self._int64(args[0]), *args[1:])
        if op == "truediv" and not self._nearest(node, scope):
            return self._quotient(node, args, scope)
        if op == "sqrt" and not self._nearest(node, scope):
            return _call("sqrt_approx", args[0])
        if op in _INFIX:
            sign, strength = _INFIX[op]
            left, right = (_SIGN, _SIGN) if op in _BRACKETED else (strength, strength + 1)
            return written("{} {} {}", args[0].within(left), sign, args[1].within(right), strength=strength)
        approximate = scope.approximate and not (op in _LOSES_SIGN and scope.signed(node))
        if approximate and op in ("expm1", "log1p", "erf"):
            return self._approximate(node, args[0], scope)
        if op in _CALLS:
            name = _FAST.get(op, _CALLS[op]) if approximate else _CALLS[op]
            return _call(name, args[0])
        match op:
            case "neg":
                return written("-{}", self._sign(args[0]), strength=_SIGN)
            case "not":
                return written("!{}", args[0].within(_SIGN), strength=_SIGN)
            case "invert":
                return written("~{}", args[0].within(_SIGN), strength=_SIGN)
            case "to_float":
                return _call("float", args[0])
            case "to_int":  # of a float saturated, and 0 for NaN
                return _call("__float2int_rz" if node.args[0].type is Type.FLOAT else "int", args[0])
            case "atan2":
                return _call("atanf", args[0]) if node.args[1] == _ONE else _call("atan2f", *args)
            case "abs":
                return _call("fabsf" if node.type is Type.FLOAT else "abs", args[0])
            case "min" | "max":
                name = f"nan_{op}" if node.type is Type.FLOAT else op
                return _call(name, *args)
            case "select" if self._chooses(node, args, scope):
                return _call("choose", *args)
            case "select":
                condition, yes, no = (arg.within(_SELECT + 1) for arg in args)
                return written("{} ? {} : {}", condition, yes, no, strength=_SELECT)
            case "floordiv" | "mod":
                return self._divide(node, args, scope)
            case "pow":
                return self._power(node, args, scope)
        raise ValueError(f"operator {op!r} has no CUDA form")

    def _nearest(self, node: Op, scope: EmissionScope) -> bool:
        """Whether a quotient or a root must be the nearest float32: not where its operands are approximations, and not
        if it may be off by two units in the last place and is computed for each row, key or pair."""
        if not scope.approximate or not scope.axes(node):
            return True
        return scope.exact(node) and not any(isinstance(part, Op) and part.op in _APPROXIMATED for part in walk(node))

    def _quotient(self, node: Op, args: tuple[Code, ...], scope: EmissionScope) -> Code:
        """A quotient with an error of two units in the last place.

        One that decides is no part of a fused multiply-add, so that forward and backward kernels decide alike.
        """
        divisor = node.args[1]
        if not isinstance(divisor, Const) or not _LEAST_NORMAL <= abs(divisor.value) <= 1 / _LEAST_NORMAL:
            return _call("divide_approx", *args)
        factor = self.constant(Const(1.0 / divisor.value, Type.FLOAT))
        if scope.exact(node):
            return _call("__fmul_rn", args[0], factor)
        return written("{} * {}", args[0].within(_PRODUCT), factor.within(_PRODUCT + 1), strength=_PRODUCT)

    def _approximate(self, node: Op, x: Code, scope: EmissionScope) -> Code:
        """Forms of one MUFU instruction whose errors are absolute: 2^-21 of expm1 and log1p, 2^-10 of erf."""
        if node.op == "expm1":
            return written("__expf({}) - 1.0f", x, strength=_SUM)
        if node.op == "log1p":
            return _call("__logf", written("1.0f + {}", x.within(_SUM + 1), strength=_SUM))
        x = scope.named(node.args[0])
        # The factor is fitted for the least error of erf: 2.8e-4 before that of tanh.approx.
        return written("tanh_approx({} * (1.1296758f + 0.09979271f * {} * {}))", *[x.within(_SIGN)] * 3, strength=_ATOM)

    def _chooses(self, node: Op, args: tuple[Code, ...], scope: EmissionScope) -> bool:
        """Whether to compute both arms and select one. A branch for each element of a tile would come between matrix
        products, which ptxas then serializes."""
        varies = node.type is Type.FLOAT and bool(scope.axes(node))
        return varies and any(arg.strength < _ATOM or "(" in arg.text for arg in args[1:])

    def _sign(self, operand: Code) -> Code:
        operand = operand.within(_SIGN)
        return written("({})", operand) if operand.text.startswith("-") else operand  # "--x" would decrement

    def _int64(self, operand: Code) -> Code:
        if operand.text.startswith("static_cast<long long>(") and operand.strength == _ATOM:
            return operand
        return _call("static_cast<long long>", operand)

    def _divide(self, node: Op, args: tuple[Code, ...], scope: EmissionScope) -> Code:
        dividend, divisor = node.args
        sign = "/" if node.op == "floordiv" else "%"
        if scope.bounds(dividend)[0] >= 0 and scope.bounds(divisor)[0] > 0:
            return written("{} {} {}", args[0].within(_PRODUCT), sign, args[1].within(_SIGN), strength=_PRODUCT)
        shift = power_of_two(divisor)
        if shift is not None and sign == "/":  # an arithmetic shift rounds down
            return written("{} >> {}", args[0].within(_SIGN), str(shift), strength=_SHIFT)
        if shift is not None:
            return written("{} & {}", args[0].within(_SIGN), str(2**shift - 1), strength=_BITAND)
        name = "floor_div" if node.op == "floordiv" else "floor_mod"
        return _call(name, *args)

    def _power(self, node: Op, args: tuple[Code, ...], scope: EmissionScope) -> Code:
        exponent = node.args[1]
        if not isinstance(exponent, Const):
            return self._float_power(node, args, scope)
        power = exponent.value
        if power == 0:  # even of NaN
            return Code("1.0f" if node.type is Type.FLOAT else "1", _ATOM)
        base = scope.named(node.args[0])
        if node.wide:
            base = scope.temporary(node, "base", self._int64(base))
        if math.isfinite(power) and power == int(power):
            factors = power_factors(
                base.within(_SIGN),
                abs(int(power)),
                lambda x: scope.temporary(node, "square", written("{} * {}", x, x)),
            )
            result = joined(" * ", factors, _PRODUCT if len(factors) > 1 else _SIGN)
            if power < 0 and not self._nearest(node, scope):
                return _call("divide_approx", Code("1.0f"), result)
            return result if power > 0 else written("1.0f / {}", result.within(_SIGN), strength=_PRODUCT)
        if power in (0.5, -0.5):
            root = "sqrtf" if self._nearest(node, scope) else "sqrt_approx"
            return _call(root if power > 0 else "rsqrtf", base)
        return written("exp2f({} * log2f({}))", f"{power!r}f", base, strength=_ATOM)

    def _float_power(self, node: Op, args: tuple[Code, ...], scope: EmissionScope) -> Code:
        if not scope.approximate:
            return _call("powf", *args)
        low = scope.bounds(node.args[0])[0]
        if low > 0:
            product = args[1].within(_PRODUCT), _call("__log2f", args[0])
            return _call("exp2_fast", written("{} * {}", *product, strength=_PRODUCT))
        # powf branches, which serializes matrix products.
        x, y = (scope.named(arg).within(_PRODUCT) for arg in node.args)
        logarithm = scope.temporary(node, "logarithm", _call("__log2f", _call("fabsf", x)))
        one = written("{} == 0.0f || {} == 0.0f", y, logarithm)  # 0 * inf would be NaN
        power = _call("choose", one, Code("1.0f"), written("exp2_fast({} * {})", y, logarithm))
        if has_no_sign(node.args[0], low):
            return power
        power = scope.temporary(node, "power", power)
        odd = written("__float_as_int({}) < 0 && {y} - 2.0f * floorf(0.5f * {y}) == 1.0f", x, y=y)
        fraction = written("{} < 0.0f && floorf({y}) != {y}", x, y=y)
        return _call("choose", fraction, Code('nanf("")'), _call("choose", odd, written("-{}", power), power))

    def declare(self, name: str, type: Type, wide: bool, value: Code) -> Statement:
        kind = {Type.BOOL: "bool", Type.FLOAT: "float", Type.INT: "long long" if wide else "int"}[type]
        return _constant(kind, name, value)

    def offset(self, index: Code, stride: Code, *, natural: bool = False) -> Code:
        wide = _call("static_cast<unsigned>", index) if natural else self._int64(index)
        return wide if stride.text == "1" else written("{} * {}", wide, stride, strength=_PRODUCT)

    def within(self, index: Code, extent: Code, *, low: bool, high: bool) -> Code:
        parts = []
        if low:
            parts.append(written("{} >= 0", index.within(_SHIFT), strength=_COMPARE))
        if high:
            parts.append(written("{} < {}", index.within(_SHIFT), extent, strength=_COMPARE))
        return self.conjunction(parts)

    def conjunction(self, parts: list[Code]) -> Code:
        return parts[0] if len(parts) == 1 else joined(" && ", (part.within(_AND) for part in parts), _AND)

    def pointer(self, name: str, base: Code, offsets: list[Code], *, kept: bool = False) -> Statement:
        pattern, kind = f"const auto* {name} = {{}};", "const auto*"
        if kept:
            pattern += f' asm("" : "+l"({name}));'
        return statement(pattern, joined(" + ", [base, *offsets]), declares=name, type=kind)

    def load(self, name: str, dtype: str, base: Code, offsets: list[Code], guard: Code | None) -> Statement:
        row = DTYPES[dtype]
        kind = {"bool": "bool", "float": "float", "int": "long long" if row.bytes == 8 else "int"}[row.kind]
        value = written("{}[{}]", base, joined(" + ", offsets)) if offsets else written("*{}", base)
        if dtype in _PACKED:
            value = _call("to_float", value)
        elif kind == "bool":
            value = written("{} != 0", value)
        if guard is not None:
            zero = {"bool": "false", "float": "0.0f"}.get(kind, "0")
            condition = guard if guard.text.isidentifier() else written("({})", guard)
            value = written("{} ? {} : {}", condition, value, zero)
        return _constant(kind, name, value)

    def search(self, pointer: Code, stride: Code, length: Code, value: Code, strict: bool) -> Code:
        arguments = joined(", ", [pointer, stride, length, value, Code("true" if strict else "false")])
        return written("{first_at_least}({})", arguments, strength=_ATOM)


def _call(name: str, *args: Code) -> Code:
    return written("{}({})", name, joined(", ", args), strength=_ATOM)


def _constant(kind: str, name: str, value: Code) -> Statement:
    return statement(f"const {kind} {name} = {{}};", value, declares=name, type=kind)
