"""aten operations on numbers → an expression of attngen's language, and the tensors that it reads."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from keyword import iskeyword
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from attngen.errors import CallError
from attngen.integrations.flex_trace import captured_names, line_of, refusal
from attngen.lang.declarations import RESERVED

_INDICES = ("b", "h", "q", "kv")

#: Names of dtypes in the language; tensors of others are converted at each call.
DTYPES = {
    torch.bool: "bool", torch.int32: "int32", torch.int64: "int64", torch.float32: "float32",
    torch.bfloat16: "bf16", torch.float16: "fp16",
}  # fmt: skip
CONVERTED = {
    torch.uint8: torch.int32, torch.int8: torch.int32, torch.int16: torch.int32, torch.float64: torch.float32,
}  # fmt: skip

#: Elements of the largest tensor that is searched for facts.
_MOST = 2**24


@dataclass
class Captured:
    """A tensor that functions read: its name in the expressions, and the declared facts about its values.

    ``find`` returns it, or None once it is gone: captured tensors belong to the function, and are not kept alive here.
    """

    name: str
    find: Callable[[], Tensor | None]
    monotone: bool = False  # along its last axis
    least: int | None = None
    as_it_is: bool | None = None  # whether calls pass the tensor itself; None while nobody asked

    @property
    def tensor(self) -> Tensor:
        """The tensor, which must still exist."""
        found = self.find()
        assert found is not None, "its function has it"
        return found

    def fields(self) -> dict[str, Any]:
        """Return its declaration, as ``attngen.variant`` takes it."""
        dtype = CONVERTED.get(self.tensor.dtype, self.tensor.dtype)
        shape: list[str | int] = [f"{self.name}_{axis}" for axis in range(self.tensor.dim())] or [1]
        found: dict[str, Any] = {"dtype": DTYPES[dtype], "shape": shape}
        if self.monotone:
            found["monotone"] = {"axis": self.tensor.dim() - 1}
        if self.least is not None:
            found["range"] = {"min": self.least}
        if self.tensor.requires_grad:
            found["grad"] = True
        return found

    def given(self) -> Tensor:
        """Return what a call passes."""
        tensor = self.find()
        assert tensor is not None, "its function has it"
        if self.as_it_is is None:
            self.as_it_is = tensor.dim() > 0 and tensor.dtype not in CONVERTED
        if self.as_it_is:
            return tensor
        made = tensor if tensor.dim() else tensor.view(1)
        return made.to(CONVERTED.get(made.dtype, made.dtype))


@dataclass
class Translation:
    """The tensors of a mask and of a score together; a tensor that both read has one name."""

    tensors: dict[int, Captured] = field(default_factory=dict)

    def captured(self, tensor: Tensor, wanted: str | None) -> Captured:
        """Return the entry of a tensor; one that no function captures under a name is kept."""
        entry = self.tensors.get(id(tensor))
        if entry is None:
            taken = {one.name for one in self.tensors.values()}
            name = plain = _legal(wanted or "constant")
            number = 2
            while name in taken:
                name, number = f"{plain}_{number}", number + 1
            find = (lambda: tensor) if wanted is None else ref(tensor)
            entry = self.tensors[id(tensor)] = Captured(name, find)
        return entry


def _legal(name: str) -> str:
    """Return a name that a spec may give a tensor."""
    plain = re.sub(r"\W|__+", "_", name).strip("_").lower()
    return f"t_{plain}" if not plain or not plain[0].isalpha() or plain in RESERVED or iskeyword(plain) else plain


class Translator:
    """Walks a graph, and keeps the text of each node."""

    def __init__(
        self, function: Callable[..., Any], kind: str, graph: GraphModule, into: Translation, *, looks: bool = True
    ) -> None:
        """``looks``: whether what captured tensors hold may decide what it means; if not, nothing is promised of it."""
        self._function, self._kind, self._graph, self._into, self._looks = function, kind, graph, into, looks
        self._closed: set[Node] = set()  # tensors that must not be looked at
        self._names = captured_names(function)
        self._text: dict[Node, str] = {}
        self._constants: dict[Node, Tensor] = {}
        self._sources: dict[Node, frozenset[int]] = {}  # captured tensors that a node is an element of
        self._rows: dict[
            Node, tuple[Node, list[Any]]
        ] = {}  # tensors of which some indices are given: row[h] of row[h][q]

    def expression(self) -> str:
        """Return the function's result as an expression. Raises CallError for what cannot be expressed."""
        inputs = ["s", *_INDICES] if self._kind == "score_mod" else [*_INDICES]
        for node in self._graph.graph.nodes:
            if node.op == "placeholder":
                self._text[node] = inputs.pop(0)
            elif node.op == "get_attr":
                tensor = self._constants[node] = node.meta["val"] = getattr(self._graph, str(node.target))
                if not self._looks and id(tensor) in self._names:
                    self._closed.add(node)
            elif node.op == "call_function":
                self._call(node)
            elif node.op == "output":
                return self._returned(node.args[0])
        raise AssertionError("a graph has an output")

    def _returned(self, node: Any) -> str:
        value = _value(node)
        if value.dim():
            raise self._refuse(node, f"it returns a tensor of shape {tuple(value.shape)}; one number is expected")
        if self._kind == "mask_mod" and value.dtype != torch.bool:
            raise self._refuse(node, f"a mask is a condition, but it returns {_short(value.dtype)}")
        if self._kind == "score_mod" and value.dtype == torch.bool:
            raise self._refuse(node, "a score is a number, but it returns a condition")
        return self._of(node)

    def _refuse(self, node: Node, reason: str) -> CallError:
        return refusal(self._function, self._kind, reason, line_of(node))

    # --- operands -------------------------------------------------------------------------------------------

    def _of(self, operand: Any) -> str:
        """Return the text of an operand: a node, or a Python number."""
        if isinstance(operand, bool):
            return str(operand)
        if isinstance(operand, int):
            return str(operand) if operand >= 0 else f"(-{-operand})"
        if isinstance(operand, float):
            if math.isnan(operand):
                raise refusal(self._function, self._kind, "the language has no NaN")
            if math.isinf(operand):
                return "inf" if operand > 0 else "(-inf)"
            return repr(operand) if operand >= 0 else f"(-{-operand!r})"
        if operand in self._constants:
            return self._number(operand)
        if operand in self._rows:
            raise self._refuse(operand, "a row of a captured tensor is used where a number is expected")
        return self._text[operand]

    def _number(self, node: Node) -> str:
        """Return a captured tensor of one number: as an element, or as the number if it is only on the CPU."""
        constant = self._constants[node]
        if constant.numel() != 1:
            raise self._refuse(node, f"a tensor of shape {tuple(constant.shape)} stands where a number belongs")
        if constant.device.type == "cpu" and not constant.requires_grad and node not in self._closed:
            return self._of(constant.item())
        return f"{self._captured(node).name}[{', '.join(['0'] * max(constant.dim(), 1))}]"

    def _captured(self, node: Node) -> Captured:
        constant = self._constants[node]
        if constant.dtype not in DTYPES and constant.dtype not in CONVERTED:
            raise self._refuse(node, f"a captured tensor is {_short(constant.dtype)}")
        return self._into.captured(constant, self._names.get(id(constant)))

    # --- operations -----------------------------------------------------------------------------------------

    def _call(self, node: Node) -> None:
        overload = str(node.target)
        name = overload.split(".")[1] if overload.startswith("aten.") else overload
        inputs = node.all_input_nodes
        if inputs and name != "index" and all(one in self._constants for one in inputs):
            if self._closed.intersection(inputs):
                raise self._refuse(node, "it computes with a captured tensor before it indexes it")
            args, kwargs = map_arg((node.args, node.kwargs), lambda one: self._constants[one])
            assert callable(node.target)
            with torch.no_grad():
                self._constants[node] = node.target(*args, **kwargs)
            return
        own, rule = getattr(self, f"_aten_{name}", None), _RULES.get(name)
        if own is None and rule is None:
            raise self._refuse(node, f"{overload} has no equivalent in attngen's language")
        self._text[node] = own(node) if own is not None else _RULES[name](self, node)

    def _aten_index(self, node: Node) -> str:
        tensor, indices = node.args[0], node.args[1]
        assert isinstance(indices, Sequence)
        tensor, before = self._rows.get(tensor, (tensor, []))
        if tensor not in self._constants:
            raise self._refuse(node, "only captured tensors have indices")
        constant, indices = self._constants[tensor], [*before, *indices]
        if len(indices) > constant.dim() or any(i is None for i in indices):
            raise self._refuse(node, f"a tensor of {constant.dim()} dimensions has {len(indices)} indices")
        if len(indices) < constant.dim():
            self._rows[node] = tensor, indices
            return ""
        entry = self._captured(tensor)
        self._sources[node] = frozenset({id(constant)})
        return f"{entry.name}[{', '.join(self._index(i, n) for i, n in zip(indices, constant.shape, strict=True))}]"

    def _index(self, operand: Any, size: int) -> str:
        """Return an index; one that may be negative counts from the end, as torch's do."""
        text = self._of(operand)
        if isinstance(operand, Node) and operand in self._constants and operand not in self._closed:
            number = int(self._constants[operand].item())
            return text if number >= 0 else str(number + size)
        return text if self._never_negative(operand) else f"(({text}) + {size} if ({text}) < 0 else ({text}))"

    def _never_negative(self, operand: Any) -> bool:
        if not isinstance(operand, Node):
            return bool(operand >= 0)
        if operand in self._constants:
            return operand not in self._closed and bool((self._constants[operand] >= 0).all())
        if operand.op == "placeholder":
            return True
        name = str(operand.target).split(".")[1]
        if name == "index":
            source, _ = self._rows.get(operand.args[0], (operand.args[0], []))
            constant, entry = self._constants[source], self._captured(source)
            if source in self._closed:
                return entry.least is not None and entry.least >= 0
            if constant.dtype.is_floating_point or constant.numel() > _MOST or not bool((constant >= 0).all()):
                return False
            entry.least = entry.least or 0
            return True
        arguments = operand.args
        if name in ("add", "mul", "maximum", "minimum", "bitwise_and"):
            sides = [self._never_negative(side) for side in arguments[:2]]
            return any(sides) if name in ("maximum", "bitwise_and") else all(sides)
        if name in ("floor_divide", "remainder", "div"):
            return self._never_negative(arguments[0]) and self._never_negative(arguments[1])
        if name in ("clamp", "clamp_min"):
            least = arguments[1] if len(arguments) > 1 else None
            return least is not None and self._never_negative(least)
        if name == "where":
            return all(self._never_negative(arm) for arm in arguments[1:])
        return name in ("abs", "_to_copy", "clone", "alias") and (name == "abs" or self._never_negative(arguments[0]))

    def _divisor(self, node: Node, operand: Any) -> str:
        """Return a divisor, which must be known not to be 0."""
        if isinstance(operand, Node) and operand in self._sources:
            (identity,) = self._sources[operand]
            entry = self._into.tensors[identity]
            if self._looks and not entry.tensor.dtype.is_floating_point and bool((entry.tensor >= 1).all()):
                entry.least = 1
        if isinstance(operand, int | float) and operand == 0:
            raise self._refuse(node, "it divides by 0")
        return self._of(operand)

    def _aten_div(self, node: Node) -> str:
        x, y = self._of(node.args[0]), self._divisor(node, node.args[1])
        mode = node.kwargs.get("rounding_mode")
        if mode is None:
            return f"({x} / {y})"
        if _is_float(node):
            if mode == "floor":
                return f"floor({x} / {y})"
            return f"(floor({x} / {y}) if ({x} / {y}) >= 0.0 else ceil({x} / {y}))"
        return f"({x} // {y})" if mode == "floor" else self._truncated(node, x, y)

    def _truncated(self, node: Node, x: str, y: str) -> str:
        if self._never_negative(node.args[0]) and self._never_negative(node.args[1]):
            return f"({x} // {y})"
        return f"({x} // {y} if ({x} >= 0) == ({y} > 0) else -((-{x}) // {y}))"

    def _aten_floor_divide(self, node: Node) -> str:
        x, y = self._of(node.args[0]), self._divisor(node, node.args[1])
        return f"floor({x} / {y})" if _is_float(node) else f"({x} // {y})"

    def _aten_remainder(self, node: Node) -> str:
        x, y = self._of(node.args[0]), self._divisor(node, node.args[1])
        return f"({x} - floor({x} / {y}) * {y})" if _is_float(node) else f"({x} % {y})"

    def _aten_fmod(self, node: Node) -> str:
        if _is_float(node):
            raise self._refuse(node, "aten.fmod of floats has no equivalent in attngen's language")
        x, y = self._of(node.args[0]), self._divisor(node, node.args[1])
        return f"({x} - {self._truncated(node, x, y)} * {y})"

    def _aten_where(self, node: Node) -> str:
        condition, chosen, other = (self._of(operand) for operand in node.args)
        return f"({chosen} if {condition} else {other})"

    def _aten__to_copy(self, node: Node) -> str:
        source, wanted = _value(node.args[0]).dtype, _value(node).dtype
        text = self._of(node.args[0])
        if wanted.is_floating_point:
            if wanted in (torch.bfloat16, torch.float16):
                raise self._refuse(node, f"a rounding to {_short(wanted)} has no equivalent in attngen's language")
            return text if source.is_floating_point else f"float({text})"
        if wanted == torch.bool:
            return text if source == torch.bool else f"({text} != 0)"
        if source.is_floating_point:
            raise self._refuse(node, "a conversion of a float to an integer has no equivalent in attngen's language")
        return f"int({text})" if source == torch.bool else text

    def _aten_pow(self, node: Node) -> str:
        base, exponent = node.args[0], node.args[1]
        if isinstance(exponent, Node):
            if isinstance(base, int | float) and base > 0:
                return f"exp2({self._of(exponent)} * {self._of(float(math.log2(base)))})"
            raise self._refuse(node, "an exponent that is not constant has no equivalent in attngen's language")
        return f"({self._of(base)} ** {self._of(exponent)})"

    def _aten_clamp(self, node: Node) -> str:
        text, limits = self._of(node.args[0]), [*node.args[1:], None, None]
        low = limits[0] if len(node.args) > 1 else node.kwargs.get("min")
        high = limits[1] if len(node.args) > 2 else node.kwargs.get("max")
        text = text if low is None else f"max({text}, {self._of(low)})"
        return text if high is None else f"min({text}, {self._of(high)})"

    def _compared(self, node: Node, sign: str) -> str:
        sides = node.args[:2]
        tensors = [self._sources.get(side, frozenset()) for side in sides if isinstance(side, Node)]
        if self._looks and len(tensors) == 2 and tensors[0] and tensors[0] == tensors[1]:
            (identity,) = tensors[0]
            self._look_for_order(self._into.tensors[identity])
        return f"({self._of(sides[0])} {sign} {self._of(sides[1])})"

    @staticmethod
    def _look_for_order(entry: Captured) -> None:
        """Find out whether a tensor never decreases along its last axis, as document numbers do."""
        tensor = entry.tensor
        if (
            tensor.dim()
            and not tensor.dtype.is_floating_point
            and tensor.dtype != torch.bool
            and tensor.numel() <= _MOST
        ):
            entry.monotone = bool((tensor.diff(dim=-1) >= 0).all())


def _value(node: Any) -> Tensor:
    found: Tensor = node.meta["val"] if "val" in node.meta else node.meta["tensor_meta"]
    return found


def _is_float(node: Node) -> bool:
    return _value(node).dtype.is_floating_point


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _infix(sign: str) -> Callable[[Translator, Node], str]:
    def rule(self: Translator, node: Node) -> str:
        x, y = (self._of(operand) for operand in node.args[:2])
        factor = node.kwargs.get("alpha", 1)
        return f"({x} {sign} {y if factor == 1 else f'{self._of(factor)} * {y}'})"

    return rule


def _function(name: str) -> Callable[[Translator, Node], str]:
    return lambda self, node: f"{name}({', '.join(self._of(operand) for operand in node.args)})"


def _logic(word: str, sign: str) -> Callable[[Translator, Node], str]:
    """Conditions by ``word``, integers by ``sign``."""

    def rule(self: Translator, node: Node) -> str:
        sides = [self._of(operand) for operand in node.args[:2]]
        return f"({f' {word if _value(node).dtype == torch.bool else sign} '.join(sides)})"

    return rule


def _comparison(sign: str) -> Callable[[Translator, Node], str]:
    return lambda self, node: self._compared(node, sign)


def _conditions(word: str) -> Callable[[Translator, Node], str]:
    """Logic of anything that counts as a condition."""

    def rule(self: Translator, node: Node) -> str:
        sides = []
        for operand in node.args[:2]:
            text = self._of(operand)
            sides.append(text if _value(operand).dtype == torch.bool else f"({text} != 0)")
        return f"({f' {word} '.join(sides)})"

    return rule


def _first(self: Translator, node: Node) -> str:
    return self._of(node.args[0])


def _not(self: Translator, node: Node) -> str:
    text, dtype = self._of(node.args[0]), _value(node.args[0]).dtype
    if dtype == torch.bool:
        return f"(not {text})"
    return f"({text} == 0)" if _value(node).dtype == torch.bool else f"(~{text})"


def _constant(self: Translator, node: Node) -> str:
    return self._of(node.args[0])


def _filled(value: float) -> Callable[[Translator, Node], str]:
    def rule(self: Translator, node: Node) -> str:
        dtype = _value(node).dtype
        return self._of(bool(value) if dtype == torch.bool else value if dtype.is_floating_point else int(value))

    return rule


#: The translation of each operation into the language.
_RULES: Mapping[str, Callable[[Translator, Node], str]] = {
    "add": _infix("+"), "sub": _infix("-"), "mul": _infix("*"),
    "rsub": lambda self, node: f"({self._of(node.args[1])} - {self._of(node.args[0])})",  # of numbers: alpha is 1
    "neg": lambda self, node: f"(-{self._of(node.args[0])})",
    "reciprocal": lambda self, node: f"(1.0 / {self._divisor(node, node.args[0])})",
    "square": lambda self, node: f"({self._of(node.args[0])} ** 2)",
    "lt": _comparison("<"), "le": _comparison("<="), "gt": _comparison(">"), "ge": _comparison(">="),
    "eq": _comparison("=="), "ne": _comparison("!="),
    "bitwise_and": _logic("and", "&"), "bitwise_or": _logic("or", "|"), "bitwise_xor": _logic("^", "^"),
    "__and__": _logic("and", "&"), "__or__": _logic("or", "|"), "__xor__": _logic("^", "^"),
    "logical_and": _conditions("and"), "logical_or": _conditions("or"), "logical_xor": _conditions("^"),
    "bitwise_not": _not, "logical_not": _not,
    "bitwise_left_shift": _infix("<<"), "bitwise_right_shift": _infix(">>"),
    "__lshift__": _infix("<<"), "__rshift__": _infix(">>"),
    "maximum": _function("max"), "minimum": _function("min"), "clamp_min": _function("max"),
    "clamp_max": _function("min"), "scalar_tensor": _constant,
    **{name: _function(name) for name in (
        "abs", "exp", "exp2", "log", "log2", "tanh", "sigmoid", "silu", "sqrt", "rsqrt", "sin", "cos", "tan", "floor",
        "ceil",
    )},
    **dict.fromkeys(("clone", "alias", "detach", "lift_fresh_copy", "view", "expand", "contiguous"), _first),
    "full": lambda self, node: self._of(node.args[1]), "full_like": lambda self, node: self._of(node.args[1]),
    "zeros_like": _filled(0.0), "ones_like": _filled(1.0), "zeros": _filled(0.0), "ones": _filled(1.0),
    "new_zeros": _filled(0.0), "new_ones": _filled(1.0),
}  # fmt: skip
