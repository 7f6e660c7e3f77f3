"""Text to IR: Python's own syntax tree, walked by a white list; nothing is ever evaluated.

The parser knows syntax and scope. Types and ranges belong to the ``build`` function that it is given
(``check.Rules.build``); whatever that raises is shown with a caret under the offending part.
"""

from __future__ import annotations

import ast
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from attngen.errors import suggest
from attngen.lang.ir import INDEX_NAMES, Const, Expr, Load, Type, Var, children, names
from attngen.lang.source import MAX_LENGTH, ExpressionError, Snippet
from attngen.lang.variant import Scalar, Tensor
from attngen.lang.words import attribute_hint, foreign_token, function_hint, name_hint

#: Deepest nesting of an expression, also after the inlining of ``let:``.
MAX_DEPTH = 100
#: Most nodes of an expression after inlining.
MAX_NODES = 4096
#: Most syntax nodes that one variant may make the parser visit: functions may call functions.
MAX_STEPS = 50_000

CONSTANTS: Mapping[str, Const] = {"inf": Const(math.inf, Type.FLOAT)}

#: Functions of the language: operator and number of arguments (least, most; None: any number).
FUNCTIONS: Mapping[str, tuple[str, int, int | None]] = {
    "min": ("min", 2, None), "max": ("max", 2, None), "clamp": ("clamp", 3, 3),
    **{name: (name, 1, 1) for name in (
        "abs", "floor", "ceil", "trunc", "round", "exp", "exp2", "expm1", "log", "log2", "log1p", "tanh", "sigmoid",
        "silu", "sqrt", "rsqrt", "sin", "cos", "tan", "erf")},
    "atan2": ("atan2", 2, 2), "atan": ("atan", 1, 1), "sign": ("sign", 1, 1), "isnan": ("isnan", 1, 1),
    "float": ("to_float", 1, 1), "int": ("to_int", 1, 1),
}  # fmt: skip

Build = Callable[[str, Sequence[Expr]], Expr]


def _clamp(build: Build, value: Expr, low: Expr, high: Expr) -> Expr:
    return build("min", [build("max", [value, low]), high])


def _sign(build: Build, value: Expr) -> Expr:
    """1, -1 or 0; 0 for NaN, as in torch."""
    kind = Type.FLOAT if value.type is Type.FLOAT else Type.INT
    zero, one = Const(0, kind), Const(1, kind)
    negative = build("select", [build("lt", [value, zero]), build("neg", [one]), zero])
    return build("select", [build("gt", [value, zero]), one, negative])


#: Functions that are written with other operators.
_COMPOSED: Mapping[str, Callable[..., Expr]] = {
    "clamp": _clamp,
    "sign": _sign,
    "atan": lambda build, value: build("atan2", [value, Const(1, Type.INT)]),
    "isnan": lambda build, value: build("ne", [value, value]),
}

_BINARY: Mapping[type[ast.operator], str] = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "truediv", ast.FloorDiv: "floordiv",
    ast.Mod: "mod", ast.Pow: "pow", ast.BitAnd: "bitand", ast.BitOr: "bitor", ast.BitXor: "bitxor",
    ast.LShift: "lshift", ast.RShift: "rshift",
}  # fmt: skip
_COMPARE: Mapping[type[ast.cmpop], str] = {
    ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge", ast.Eq: "eq", ast.NotEq: "ne",
}  # fmt: skip
_UNARY: Mapping[type[ast.unaryop], str] = {ast.USub: "neg", ast.Not: "not", ast.Invert: "invert"}

_REFUSED: Mapping[type[ast.AST], str] = {
    ast.Attribute: "attribute access", ast.Lambda: "lambda", ast.NamedExpr: "':='", ast.Starred: "'*' unpacking",
    ast.ListComp: "a comprehension", ast.SetComp: "a comprehension", ast.DictComp: "a comprehension",
    ast.GeneratorExp: "a generator", ast.JoinedStr: "an f-string", ast.List: "a list", ast.Set: "a set",
    ast.Dict: "a dictionary", ast.Tuple: "a tuple", ast.Await: "await", ast.Yield: "yield",
    ast.YieldFrom: "yield", ast.Slice: "a slice",
}  # fmt: skip

#: Values from here on round to inf in float32.
FLOAT32_MAX = 3.4028235677973366e38


def parse_syntax(snippet: Snippet, limit: int = MAX_LENGTH) -> ast.expr:
    """Return the syntax tree of a text after the checks that need no tree; raises SpecError."""
    text = snippet.text
    if not text:
        raise snippet.error("is empty", 0, 1)
    if len(text) > limit:
        raise snippet.error(f"has {len(text)} characters, at most {limit} are allowed", limit, limit + 1)
    for column, character in enumerate(text):
        if not " " <= character <= "~":
            raise snippet.error(
                f"character {character!a} is not allowed; expressions are plain ASCII",
                column,
                column + 1,
            )
        if character in "#\\;":
            raise snippet.error(f"character '{character}' is not allowed", column, column + 1)
    if foreign := foreign_token(text, broken=False):
        raise snippet.error(*foreign)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(text, mode="eval").body
    except SyntaxError as error:
        if foreign := foreign_token(text, broken=True):
            raise snippet.error(*foreign) from None
        start = (error.offset or 1) - 1
        end = error.end_offset - 1 if error.end_offset and error.end_lineno == error.lineno else start + 1
        raise snippet.error(f"not an expression: {error.msg}", start, end) from None
    except (RecursionError, MemoryError):
        raise snippet.error("is nested too deeply", 0, len(text)) from None
    except ValueError as error:
        raise snippet.error(f"not an expression: {error}", 0, len(text)) from None


@dataclass(frozen=True, slots=True)
class Function:
    """A ``let:`` function: inlined at each call, typed by the arguments of that call."""

    name: str
    parameters: tuple[str, ...]
    body: ast.expr
    snippet: Snippet
    values: Mapping[str, Expr]  # those declared before it, all that its body sees
    functions: Mapping[str, Function]


@dataclass(frozen=True, slots=True)
class Written:
    """An expression as it was written: its text, its syntax tree, and the value of each of its nodes.

    The body of a ``let:`` function has no values: they depend on the call.
    """

    snippet: Snippet
    tree: ast.expr
    values: dict[ast.expr, Expr] = field(default_factory=dict)


@dataclass(slots=True)
class Scope:
    """Everything that a name in an expression can mean."""

    build: Build
    scalars: Mapping[str, Scalar]
    tensors: Mapping[str, Tensor]
    values: dict[str, Expr] = field(default_factory=dict)
    functions: dict[str, Function] = field(default_factory=dict)
    logit: bool = False  # whether 's' may be used
    steps: int = 0  # syntax nodes visited so far, those of inlined functions each time
    sizes: dict[Expr, tuple[int, int]] = field(default_factory=dict)  # nodes and depth of what was built
    record: dict[ast.expr, Expr] | None = None  # takes the value of each node of what is lowered

    def known(self) -> list[str]:
        """Return every name that could have been meant, for suggestions."""
        extra = ["s", *CONSTANTS, "True", "False"] if self.logit else [*CONSTANTS, "True", "False"]
        return [*INDEX_NAMES, *extra, *self.declared()]

    def declared(self) -> list[str]:
        """The names that the variant declares, functions aside."""
        return [*self.scalars, *self.tensors, *self.values]


def lower(snippet: Snippet, tree: ast.expr, scope: Scope) -> Expr:
    """Return the typed IR of a syntax tree; raises SpecError with a caret."""
    return _Lowering(snippet, scope, scope.values, scope.functions, {}).visit(tree, 0)


class _Lowering:
    """Walks the syntax tree of one snippet; ``parameters`` are the arguments when it is a function's body."""

    def __init__(
        self,
        snippet: Snippet,
        scope: Scope,
        values: Mapping[str, Expr],
        functions: Mapping[str, Function],
        parameters: Mapping[str, Expr],
    ) -> None:
        self.snippet = snippet
        self.scope = scope
        self.values = values
        self.functions = functions
        self.parameters = parameters

    def visit(self, node: ast.expr, depth: int) -> Expr:
        if depth > MAX_DEPTH:
            raise self.snippet.at(node, f"is nested more than {MAX_DEPTH} levels deep")
        self.scope.steps += 1
        if self.scope.steps > MAX_STEPS:
            raise self.snippet.at(node, f"takes more than {MAX_STEPS} steps to inline")
        try:
            value = self._dispatch(node, depth + 1)
            _measure(value, self.scope.sizes)
        except ExpressionError as error:
            raise self.snippet.at(node, str(error)) from None
        if self.scope.record is not None and not self.parameters:
            self.scope.record[node] = value
        return value

    def _dispatch(self, node: ast.expr, depth: int) -> Expr:
        match node:
            case ast.Constant(value=value):
                return _literal(value)
            case ast.Name(id=name):
                return self._name(name)
            case ast.UnaryOp(op=ast.UAdd(), operand=operand):
                return self.visit(operand, depth)
            case ast.UnaryOp(op=op, operand=operand):
                return self._built(_UNARY[type(op)], [operand], depth)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
                return self._built(_BINARY[type(op)], [left, right], depth)
            case ast.BinOp():
                raise ExpressionError("operator '@' is not part of the language")
            case ast.BoolOp(op=op, values=values):
                return self._fold("and" if isinstance(op, ast.And) else "or", values, depth)
            case ast.Compare():
                return self._compare(node, depth)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return self._built("select", [test, body, orelse], depth)
            case ast.Call():
                return self._call(node, depth)
            case ast.Subscript():
                return self._load(node, depth)
            case _:
                hint = ""
                if isinstance(node, ast.Attribute):
                    hint = attribute_hint(node, FUNCTIONS)
                elif isinstance(node, ast.Lambda):
                    hint = "; write its body alone, over b, h, q and kv"
                raise ExpressionError(
                    f"{_REFUSED.get(type(node), type(node).__name__)} is not part of the language{hint}"
                )

    def _built(self, op: str, operands: Sequence[ast.expr], depth: int) -> Expr:
        """Apply an operator to operands; an error about one of them marks that one."""
        values = [self.visit(operand, depth) for operand in operands]
        return self._apply(op, values, operands)

    def _apply(self, op: str, values: Sequence[Expr], operands: Sequence[ast.expr]) -> Expr:
        try:
            return self.scope.build(op, values)
        except ExpressionError as error:
            if error.operand is None:
                raise
            raise self.snippet.at(operands[error.operand], str(error)) from None

    def _fold(self, op: str, values: Sequence[ast.expr], depth: int) -> Expr:
        """Apply a binary operator from left to right."""
        result = self.visit(values[0], depth)
        for value in values[1:]:
            result = self._apply(op, [result, self.visit(value, depth)], [values[0], value])
        return result

    def _compare(self, node: ast.Compare, depth: int) -> Expr:
        operands = [self.visit(operand, depth) for operand in (node.left, *node.comparators)]
        result: Expr | None = None
        for op, left, right in zip(node.ops, operands, operands[1:], strict=False):
            if type(op) not in _COMPARE:
                word = "in" if isinstance(op, ast.In | ast.NotIn) else "is"
                raise ExpressionError(f"operator '{word}' is not part of the language")
            pair = self.scope.build(_COMPARE[type(op)], [left, right])
            result = pair if result is None else self.scope.build("and", [result, pair])
        assert result is not None
        return result

    def _name(self, name: str) -> Expr:
        scope = self.scope
        if name in self.parameters:
            return self.parameters[name]
        if name in self.values:
            value = self.values[name]
            if not scope.logit and "s" in names(value):
                raise ExpressionError(f"'{name}' depends on the logit 's', which only a score has")
            return value
        if name in INDEX_NAMES:
            return Var(name, Type.INT)
        if name == "s":
            if not scope.logit:
                raise ExpressionError("'s' is the logit, which only a score has")
            return Var("s", Type.FLOAT)
        if name in CONSTANTS:
            return CONSTANTS[name]
        if name in scope.scalars:
            return _scalar(scope.scalars[name])
        if name in scope.tensors:
            tensor = scope.tensors[name]
            if tensor.shape:
                axes = ", ".join(str(extent) for extent in tensor.shape)
                raise ExpressionError(f"'{name}' is a tensor of shape [{axes}] and needs an index for each axis")
            return Load(name, (), tensor.type)
        if name in FUNCTIONS or name in self.functions:
            raise ExpressionError(f"'{name}' is a function and needs arguments")
        hint = (
            name_hint(name, self.scope.known(), self.scope.declared()) or "; declare it under scalars, tensors or let"
        )
        raise ExpressionError(f"unknown name '{name}'{hint}")

    def _call(self, node: ast.Call, depth: int) -> Expr:
        known = [*FUNCTIONS, *self.functions]
        if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):  # torch.abs
            name = f"{node.func.value.id}.{node.func.attr}"
            raise self.snippet.at(node.func, f"'{name}' is not part of the language{function_hint(name, known)}")
        if not isinstance(node.func, ast.Name):
            what = _REFUSED.get(type(node.func), "a call of an expression")
            raise self.snippet.at(node.func, f"{what} is not part of the language")
        if node.keywords:
            raise ExpressionError("arguments are positional, without names")
        for argument in node.args:
            if isinstance(argument, ast.Starred):
                raise self.snippet.at(argument, "'*' unpacking is not part of the language")
        name = node.func.id
        if name in self.functions:
            return self._inline(self.functions[name], node, depth)
        if name not in FUNCTIONS:
            raise self.snippet.at(node.func, f"unknown function '{name}'{function_hint(name, known)}")
        op, least, most = FUNCTIONS[name]
        if len(node.args) < least or (most is not None and len(node.args) > most):
            wanted = f"at least {least}" if most is None else str(least)
            raise ExpressionError(f"'{name}' takes {wanted} argument{'s' if least > 1 else ''}, got {len(node.args)}")
        if most is None:
            return self._fold(op, node.args, depth)
        if op in _COMPOSED:
            return _COMPOSED[op](self.scope.build, *(self.visit(argument, depth) for argument in node.args))
        return self._built(op, node.args, depth)

    def _inline(self, function: Function, node: ast.Call, depth: int) -> Expr:
        if len(node.args) != len(function.parameters):
            count = len(function.parameters)
            raise ExpressionError(
                f"'{function.name}' takes {count} argument{'s' if count > 1 else ''}, got {len(node.args)}"
            )
        arguments = [self.visit(argument, depth) for argument in node.args]
        parameters = dict(zip(function.parameters, arguments, strict=True))
        body = _Lowering(function.snippet, self.scope, function.values, function.functions, parameters)
        return body.visit(function.body, depth)

    def _load(self, node: ast.Subscript, depth: int) -> Expr:
        if isinstance(node.value, ast.Subscript):
            raise ExpressionError("only declared tensors can be indexed; write all indices in one pair of brackets")
        if not isinstance(node.value, ast.Name):
            raise ExpressionError("only declared tensors can be indexed")
        name = node.value.id
        tensor = self.scope.tensors.get(name)
        if tensor is None:
            if name in self.scope.known():
                raise self.snippet.at(node.value, f"'{name}' is not a tensor and cannot be indexed")
            hint = suggest(name, self.scope.tensors) or "; declare its dtype and shape under 'tensors'"
            raise self.snippet.at(node.value, f"unknown tensor '{name}'{hint}")
        parts = list(node.slice.elts) if isinstance(node.slice, ast.Tuple) else [node.slice]
        if not tensor.shape:
            raise ExpressionError(f"'{name}' has no axes; it is used by its bare name")
        if len(parts) != len(tensor.shape):
            rank, axes = len(tensor.shape), ", ".join(str(extent) for extent in tensor.shape)
            raise ExpressionError(
                f"'{name}' has {rank} {'axis' if rank == 1 else 'axes'} [{axes}], "
                f"got {len(parts)} {'index' if len(parts) == 1 else 'indices'}"
            )
        indices = []
        for part in parts:
            index = self.visit(part, depth)
            if index.type is not Type.INT:
                kind = "a float; use // to divide integers" if index.type is Type.FLOAT else "a condition"
                raise self.snippet.at(part, f"an index of '{name}' must be an integer, got {kind}")
            indices.append(index)
        return Load(name, tuple(indices), tensor.type)


def _literal(value: object) -> Const:
    match value:
        case bool():
            return Const(value, Type.BOOL)
        case int():
            if value >= 2**63:
                raise ExpressionError("integer does not fit int64")
            return Const(value, Type.INT)
        case float():
            if value >= FLOAT32_MAX:
                raise ExpressionError("number does not fit float32; infinity is written 'inf'")
            return Const(value, Type.FLOAT)
        case str() | bytes():
            raise ExpressionError("a string is not part of the language")
        case complex():
            raise ExpressionError("a complex number is not part of the language")
        case _:
            raise ExpressionError(f"{value!r} is not part of the language")


def _scalar(scalar: Scalar) -> Expr:
    """Return a constant scalar as a literal, any other as a variable."""
    if scalar.const is None:
        return Var(scalar.name, scalar.type)
    kind = {Type.BOOL: bool, Type.INT: int, Type.FLOAT: float}[scalar.type]
    return Const(kind(scalar.const), scalar.type)


def _measure(value: Expr, sizes: dict[Expr, tuple[int, int]]) -> None:
    """Refuse an expression that inlining has blown up, before anything walks it."""
    nodes, depth = _size(value, sizes)
    if nodes > MAX_NODES:
        raise ExpressionError(f"has more than {MAX_NODES} parts after inlining")
    if depth > MAX_DEPTH:
        raise ExpressionError(f"is nested more than {MAX_DEPTH} levels deep after inlining")


def _size(value: Expr, seen: dict[Expr, tuple[int, int]]) -> tuple[int, int]:
    """Count nodes of the tree and its depth; shared subexpressions are looked at once."""
    size = seen.get(value)
    if size is None:
        below = [_size(child, seen) for child in children(value)]
        size = (1 + sum(n for n, _ in below), 1 + max((d for _, d in below), default=0))
        seen[value] = size
    return size
