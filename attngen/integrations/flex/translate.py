"""A trace → an expression of attngen's language, and the tensors that it reads."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch

from attngen.errors import CallError
from attngen.integrations.flex.facts import Look
from attngen.integrations.flex.rewrites import REWRITES, instead_of
from attngen.integrations.flex.trace import CapturedTensor, Made, Operand, Trace, TraceStep, refusal
from attngen.integrations.flex.values import (
    _INDICES,
    _NARROW,
    CONVERTED,
    DTYPES,
    Captured,
    Translation,
    is_integer_of_tensor,
)
from attngen.lang.biases import MOST_HELD

#: Functions whose results are never negative, and those that are not where their argument is not.
_POSITIVE = frozenset({"abs", "exp", "exp2", "sigmoid", "sqrt", "rsqrt", "square", "hypot", "cosh", "acos"})
#: Operations whose result is at least 1 if their operands are.
_OF_POSITIVE = frozenset({"add", "mul", "maximum", "minimum", "bitwise_left_shift", "_to_copy"})
_SIGN_OF_ARGUMENT = frozenset({
    "_to_copy", "clone", "alias", "to", "real", "floor", "ceil", "trunc", "fix", "round", "log1p", "expm1", "erf",
    "atan", "tanh", "sign", "pow", "sinh", "asinh",
})  # fmt: skip
#: Operations on such integers that change none, and those whose results are among them in any case.
_UNCHANGED = frozenset({"index", "clone", "alias", "detach", "lift_fresh_copy", "view", "expand", "contiguous"})
_CLOSED = _UNCHANGED | {
    "maximum", "minimum", "clamp", "clamp_min", "clamp_max", "where", "bitwise_and", "bitwise_or", "bitwise_xor",
    "__and__", "__or__", "__xor__", "bitwise_right_shift", "__rshift__", "remainder", "fmod", "scalar_tensor", "full",
    "full_like", "zeros_like", "ones_like", "zeros", "ones", "new_zeros", "new_ones",
}  # fmt: skip


#: Operations on integers whose result may exceed that of both operands.
_GROWING = frozenset({
    "add", "sub", "rsub", "mul", "neg", "abs", "square", "pow", "div", "floor_divide", "remainder", "fmod",
    "bitwise_left_shift", "__lshift__",
})  # fmt: skip


class Translator:
    """Walks a trace, and keeps the text of each step."""

    def __init__(self, function: Callable[..., Any], kind: str, trace: Trace, into: Translation) -> None:
        """``function`` is what errors name."""
        self._function, self._kind, self._trace, self._into, self._values = function, kind, trace, into, into.values
        self._text: dict[TraceStep, str] = {}
        self._sources: dict[TraceStep, CapturedTensor | Made] = {}  # the tensor that a step is an element of
        self._rows: dict[
            TraceStep, tuple[CapturedTensor | Made, list[Any]]
        ] = {}  # some indices are given: row[h] of row[h][q]

    def expression(self) -> str:
        """Return the function's result as an expression. Raises CallError for what cannot be expressed."""
        inputs = ["s", *_INDICES] if self._kind == "score_mod" else [*_INDICES]
        for step in self._trace.steps:
            if step.name == "argument":
                self._text[step] = inputs.pop(0)
            else:
                self._call(step)
        result = self._trace.result
        assert result is not None
        if result.shape:
            raise self._refuse(
                result,
                f"it returns a tensor of shape {tuple(result.shape)}; allowed: one number, as of tensor[q_idx, h]",
            )
        if self._kind == "mask_mod" and result.dtype != torch.bool:
            raise self._refuse(
                result, f"a mask is a condition, but it returns {_short(result.dtype)}; compare it, as in result != 0"
            )
        if self._kind == "score_mod" and result.dtype == torch.bool:
            raise self._refuse(
                result, "a score is a number, but it returns a condition; that is a mask_mod of create_block_mask, or "
                "torch.where(condition, score, -math.inf)"
            )  # fmt: skip
        return self._of(result)

    def _refuse(self, operand: Operand, reason: str) -> CallError:
        return refusal(
            self._function, self._kind, reason, None if isinstance(operand, CapturedTensor) else operand.line
        )

    def detached(self, step: TraceStep) -> str:
        """Text of a detached value, which must have no gradient: expressions cannot cut one."""
        if step.dtype.is_floating_point and self._has_gradient(step):
            raise self._refuse(
                step,
                "it detaches a value that has a gradient, which attngen's language cannot cut; allowed: detach a "
                "captured tensor outside of the function, or compare the value itself, which has no gradient",
            )
        return self._of(step.args[0])

    def _has_gradient(self, operand: Any) -> bool:
        """Whether a value depends on the score or on a learned tensor through numbers."""
        if isinstance(operand, CapturedTensor):
            return operand.requires_grad
        if isinstance(operand, list | tuple):
            return any(map(self._has_gradient, operand))
        if not isinstance(operand, TraceStep) or not operand.dtype.is_floating_point:
            return False
        return operand.name == "argument" or self._has_gradient(operand.args)

    # --- operands -------------------------------------------------------------------------------------------

    def _of(self, operand: Any) -> str:
        """Return the text of an operand: a step, a tensor of one number, or a Python number."""
        if isinstance(operand, bool):
            return str(operand)
        if isinstance(operand, int):
            return str(operand) if operand >= 0 else f"(-{-operand})"
        if isinstance(operand, float):
            if math.isnan(operand):
                return "(inf - inf)"
            if math.isinf(operand):
                return "inf" if operand > 0 else "(-inf)"
            return repr(operand) if math.copysign(1.0, operand) > 0 else f"(-{-operand!r})"
        if isinstance(operand, CapturedTensor | Made):
            return self._number(operand)
        if operand in self._rows:
            raise self._refuse(
                operand, "a row of a captured tensor is used where a number is expected; index all of its dimensions, "
                f"as in tensor[q_idx, h]; of what adds up a row, {REWRITES['product'].instead}"
            )  # fmt: skip
        return self._text[operand]

    def _number(self, operand: CapturedTensor | Made) -> str:
        """Return a tensor of one number: as an element, or as the number if it is only on the CPU."""
        if isinstance(operand, Made) and operand.element is not None:
            source, places = operand.element
            return f"{self._captured(source).name}[{', '.join(map(str, places)) or '0'}]"
        if operand.shape.numel() != 1:
            raise self._refuse(
                operand, f"a tensor of shape {tuple(operand.shape)} stands where a number belongs; index it, as in "
                "tensor[q_idx], or compute with all of it outside of the function and index the result"
            )  # fmt: skip
        if isinstance(operand, Made):
            self._may_use(operand)
            assert operand.tensor is not None
            if operand.tensor.device.type == "cpu":
                return self._of(operand.tensor.item())
        elif operand.device.type == "cpu" and not operand.requires_grad and operand.slot not in self._values.closed:
            return self._of(self._values.number(operand.slot))
        return f"{self._captured(operand).name}[{', '.join(['0'] * max(len(operand.shape), 1))}]"

    def _may_use(self, operand: Made) -> None:
        """Refuse what was computed from tensors that are not looked at."""
        if operand.sources & self._values.closed:
            raise self._refuse(operand, "it computes with a captured tensor before it indexes it; index it first")

    def _captured(self, operand: CapturedTensor | Made) -> Captured:
        if operand.dtype not in DTYPES and operand.dtype not in CONVERTED:
            if operand.dtype.is_complex:
                instead = REWRITES["complex"].instead
            else:
                instead = f"allowed: its copy by .float() or .int(), or {', '.join(map(_short, DTYPES))}"
            raise self._refuse(operand, f"a captured tensor is {_short(operand.dtype)}; {instead}")
        if isinstance(operand, Made):
            self._may_use(operand)
        return self._into.captured(operand)

    # --- operations -----------------------------------------------------------------------------------------

    def _call(self, step: TraceStep) -> None:
        own, rule = getattr(self, f"_aten_{step.name}", None), _RULES.get(step.name)
        if own is None and rule is None:
            raise self._refuse(
                step, f"{step.overload} has no equivalent in attngen's language; {instead_of(step.name)}"
            )
        if step.overload == "aten.view.dtype":  # the bits of another number
            raise self._refuse(step, f"{REWRITES['bits'].reason} ({step.overload}); {REWRITES['bits'].instead}")
        self._check_numbers(step)
        text = own(step) if own is not None else _RULES[step.name](self, step)
        self._text[step] = text if step.name in _CLOSED else _wrapped(text, step.dtype)
        if step.dtype == torch.int64 and step.name in _GROWING:
            for operand in step.args[:2]:
                self._narrow(operand)

    def _check_numbers(self, step: TraceStep) -> None:
        """Refuse a Python integer that the narrow integers of an operation lack: torch computes with another one."""
        operands = [operand for operand in step.args if isinstance(operand, TraceStep | CapturedTensor | Made)]
        dtype = reduce(torch.promote_types, map(_dtype, operands)) if operands else step.dtype
        if step.name in _UNCHANGED or dtype not in _NARROW or _is_float(step):
            return
        low, high = _NARROW[dtype]
        for number in (*step.args, *step.kwargs.values()):
            if isinstance(number, int) and not low <= number <= high:
                raise self._refuse(
                    step, f"{number} does not fit {_short(dtype)}, in which it computes; allowed: {low} to {high}, or "
                    "the tensor's .int()"
                )  # fmt: skip

    def _aten_index(self, step: TraceStep) -> str:
        tensor, indices = step.args[0], step.args[1]
        tensor, before = self._rows.get(tensor, (tensor, []))
        if isinstance(tensor, TraceStep) or (isinstance(tensor, Made) and tensor.element is not None):
            raise self._refuse(
                step,
                "only captured tensors have indices; index the captured tensors first, and compute with the numbers",
            )
        indices = [*before, *indices]
        if len(indices) > len(tensor.shape) or any(i is None for i in indices):
            raise self._refuse(
                step, f"a tensor of {len(tensor.shape)} dimensions has {len(indices)} indices; allowed: a number for "
                "each dimension, as in tensor[q_idx, h]"
            )  # fmt: skip
        if any(not isinstance(i, int) and _dtype(i) == torch.bool for i in indices):
            raise self._refuse(step, "an index is a condition; allowed: an integer, such as condition.int()")
        if len(indices) < len(tensor.shape):
            self._rows[step] = tensor, indices
            return ""
        entry = self._captured(tensor)
        self._sources[step] = tensor
        if tensor.dtype.is_floating_point and tensor.shape[-1] <= MOST_HELD and is_integer_of_tensor(indices[-1]):
            entry.entries = tensor.shape[-1]
        return f"{entry.name}[{', '.join(self._index(i, n) for i, n in zip(indices, tensor.shape, strict=True))}]"

    def _index(self, operand: Any, size: int) -> str:
        """Return an index; one that may be negative counts from the end, as torch's do."""
        if isinstance(operand, Made) and operand.tensor is not None and operand.tensor.device.type == "cpu":
            number = int(operand.tensor.item())
            return str(number if number >= 0 else number + size)
        text = self._of(operand)
        if self._never_negative(operand):
            return text
        negative = text if _dtype(operand) != torch.int64 or self._narrow(operand) else f"min({text}, -1)"
        return f"(({negative}) + {size} if ({text}) < 0 else ({text}))"

    def _narrow(self, operand: Any) -> bool:
        """Whether int32 holds the elements of int64 tensors that an integer is made of, which is then declared of them.

        What is asked about tensors does not depend on the answers.
        """
        if isinstance(operand, TraceStep) and operand not in self._sources:
            answers = [
                self._narrow(each) for each in operand.args if isinstance(each, TraceStep)
            ]  # all of them are asked
            return all(answers)
        source = self._sources.get(operand) if isinstance(operand, TraceStep) else operand
        if isinstance(source, Made) and source.element is not None:
            source = source.element[0]
        if not isinstance(source, CapturedTensor | Made) or source.dtype != torch.int64:
            return True
        entry = self._into.tensors.get(source.slot if isinstance(source, CapturedTensor) else id(source))
        if entry is None:  # a number of the text
            return True
        if isinstance(source, CapturedTensor):
            entry.narrow = self._values.fact(source.slot, "narrow")
        else:
            entry.narrow = source.tensor is not None and Look(source.tensor).narrow
        return entry.narrow

    def _natural(self, tensor: CapturedTensor | Made) -> bool:
        """Whether a tensor holds no negative number, which is then declared of it."""
        entry = self._captured(tensor)
        if isinstance(tensor, CapturedTensor):
            natural = self._values.fact(tensor.slot, "natural")
        else:
            natural = tensor.tensor is not None and Look(tensor.tensor).natural
        if natural:
            entry.least = entry.least or 0
        return natural or (entry.least is not None and entry.least >= 0)

    def _never_negative(self, operand: Any) -> bool:
        """Whether a number is known not to be negative. What is asked about tensors does not depend on the answers."""
        if not isinstance(operand, TraceStep | CapturedTensor | Made):
            return bool(operand >= 0)
        if isinstance(operand, CapturedTensor):
            if operand.device.type == "cpu" and not operand.shape.numel() > 1 and not operand.requires_grad:
                return operand.slot not in self._values.closed and self._values.number(operand.slot) >= 0
            return self._natural(operand)
        if isinstance(operand, Made):
            return self._natural(operand if operand.element is None else operand.element[0])
        if operand.name == "argument":
            return True
        name, arguments = operand.name, operand.args
        if operand.dtype == torch.uint8:
            return True
        if operand.dtype in _NARROW and name not in _CLOSED:  # the largest one is followed by the smallest
            return False
        if name == "index":
            source = self._sources.get(operand)
            return source is not None and self._natural(source)
        if name in ("add", "mul", "maximum", "minimum", "bitwise_and"):
            sides = [self._never_negative(side) for side in arguments[:2]]
            return any(sides) if name in ("maximum", "bitwise_and") else all(sides)
        if name in ("floor_divide", "remainder", "div"):
            return self._none_negative(arguments[:2])
        if name in ("clamp", "clamp_min"):
            least = arguments[1] if len(arguments) > 1 else None
            return least is not None and self._never_negative(least)
        if name == "where":
            return self._none_negative(arguments[1:])
        if name in _POSITIVE:
            return True
        return name in _SIGN_OF_ARGUMENT and self._never_negative(arguments[0])

    def _none_negative(self, operands: Sequence[Any]) -> bool:
        answers = [self._never_negative(operand) for operand in operands]  # all of them are asked
        return all(answers)

    def _divisor(self, step: TraceStep, operand: Any) -> str:
        """Return a divisor, which must be known not to be 0."""
        if isinstance(operand, int | float) and operand == 0:
            raise self._refuse(step, "it divides by 0; allowed: any other number")
        text = self._of(operand)
        self._declare_positive(operand)
        return text

    def _declare_positive(self, operand: Any) -> None:
        """Declare of the tensors that a divisor is computed from which of them hold numbers of at least 1 only.

        What is asked about tensors does not depend on the answers.
        """
        if isinstance(operand, TraceStep) and operand not in self._sources:
            for each in operand.args if operand.name in _OF_POSITIVE else ():
                self._declare_positive(each)
            return
        source = self._sources.get(operand) if isinstance(operand, TraceStep) else operand
        if isinstance(source, Made) and source.element is not None:
            source = source.element[0]
        if isinstance(source, CapturedTensor):
            key: Any = source.slot
            positive = source.slot not in self._values.fixed and self._values.fact(source.slot, "positive")
        elif isinstance(source, Made) and source.tensor is not None:
            key, positive = id(source), Look(source.tensor).positive
        else:
            return
        if positive and key in self._into.tensors:
            self._into.tensors[key].least = 1

    def _aten_sub(self, step: TraceStep) -> str:
        """A difference; of elements that are never negative it stays within int32."""
        if step.dtype == torch.int32 and not step.kwargs:
            for operand in step.args[:2]:
                source = self._sources.get(operand) if isinstance(operand, TraceStep) else None
                if isinstance(source, CapturedTensor) and source.dtype == torch.int32:
                    self._natural(source)
        return _infix("-")(self, step)

    def _aten_div(self, step: TraceStep) -> str:
        x, y = self._of(step.args[0]), self._divisor(step, step.args[1])
        mode = step.kwargs.get("rounding_mode")
        if mode is None:
            return f"({x} / {y})"
        if _is_float(step):
            if mode == "floor":
                return f"floor({x} / {y})"
            return f"trunc({x} / {y})"
        return f"({x} // {y})" if mode == "floor" else self._truncated(step, x, y)

    def _truncated(self, step: TraceStep, x: str, y: str) -> str:
        if self._none_negative(step.args[:2]):
            return f"({x} // {y})"
        return f"({x} // {y} if ({x} >= 0) == ({y} > 0) else -((-{x}) // {y}))"

    def _aten_floor_divide(self, step: TraceStep) -> str:
        x, y = self._of(step.args[0]), self._divisor(step, step.args[1])
        return f"floor({x} / {y})" if _is_float(step) else f"({x} // {y})"

    def _aten_remainder(self, step: TraceStep) -> str:
        x, y = self._of(step.args[0]), self._divisor(step, step.args[1])
        return f"({x} - floor({x} / {y}) * {y})" if _is_float(step) else f"({x} % {y})"

    def _aten_fmod(self, step: TraceStep) -> str:
        x, y = self._of(step.args[0]), self._divisor(step, step.args[1])
        quotient = f"trunc({x} / {y})" if _is_float(step) else self._truncated(step, x, y)
        return f"({x} - {quotient} * {y})"

    def _aten_where(self, step: TraceStep) -> str:
        condition, chosen, other = (self._of(operand) for operand in step.args)
        return f"({chosen} if {condition} else {other})"

    def _aten__to_copy(self, step: TraceStep) -> str:
        source, wanted = _dtype(step.args[0]), _dtype(step)
        text = self._of(step.args[0])
        if wanted.is_floating_point:
            if wanted in (torch.bfloat16, torch.float16):
                raise self._refuse(
                    step, f"a rounding to {_short(wanted)} has no equivalent in attngen's language; "
                    f"{REWRITES['rounding'].instead}"
                )  # fmt: skip
            return text if source.is_floating_point else f"float({text})"
        if wanted == torch.bool:
            return text if source == torch.bool else f"({text} != 0)"
        return f"int({text})" if source == torch.bool or source.is_floating_point else text

    def _aten_pow(self, step: TraceStep) -> str:
        base, exponent = step.args[0], step.args[1]
        if isinstance(exponent, TraceStep) and isinstance(base, int | float) and base > 0:
            return f"exp2({self._of(exponent)} * {self._of(float(math.log2(base)))})"
        return f"({self._of(base)} ** {self._of(exponent)})"

    def _aten_round(self, step: TraceStep) -> str:
        text, decimals = self._of(step.args[0]), step.kwargs.get("decimals", 0)
        if decimals == 0 or not _is_float(step):
            return f"round({text})" if _is_float(step) else text
        scale = repr(10.0 ** abs(decimals))
        return f"(round({text} * {scale}) / {scale})" if decimals > 0 else f"(round({text} / {scale}) * {scale})"

    def _aten_clamp(self, step: TraceStep) -> str:
        text, limits = self._of(step.args[0]), [*step.args[1:], None, None]
        low = limits[0] if len(step.args) > 1 else step.kwargs.get("min")
        high = limits[1] if len(step.args) > 2 else step.kwargs.get("max")
        text = text if low is None else f"max({text}, {self._of(low)})"
        return text if high is None else f"min({text}, {self._of(high)})"

    def _compared(self, step: TraceStep, sign: str) -> str:
        """Return a comparison. A tensor that is compared with itself, as document numbers are, may be in order."""
        sides = step.args[:2]
        first, second = (self._sources.get(side) if isinstance(side, TraceStep) else None for side in sides)
        if first is not None and first is second and first.shape:
            entry = self._captured(first)
            if isinstance(first, CapturedTensor):
                entry.monotone = self._values.fact(first.slot, "rises")
            elif first.tensor is not None:
                entry.monotone = Look(first.tensor).rises
        return f"({self._of(sides[0])} {sign} {self._of(sides[1])})"


def _is_float(step: TraceStep) -> bool:
    return step.dtype.is_floating_point


def _dtype(operand: Any) -> torch.dtype:
    dtype: torch.dtype = operand.dtype
    return dtype


def _wrapped(text: str, dtype: torch.dtype) -> str:
    """Return an integer as a narrow dtype holds it; any other number as it is."""
    if dtype not in _NARROW:
        return text
    low, high = _NARROW[dtype]
    return f"({text} % {high - low + 1})" if low == 0 else f"(({text} + {-low}) % {high - low + 1} - {-low})"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


#: Meaning of torch's arithmetic of bools.
_OF_CONDITIONS = {"+": "or", "*": "and"}


def _infix(sign: str) -> Callable[[Translator, TraceStep], str]:
    def rule(self: Translator, step: TraceStep) -> str:
        x, y = (self._of(operand) for operand in step.args[:2])
        if step.dtype == torch.bool and sign in _OF_CONDITIONS:
            return f"({x} {_OF_CONDITIONS[sign]} {y})"
        factor = step.kwargs.get("alpha", 1)
        return f"({x} {sign} {y if factor == 1 else f'{self._of(factor)} * {y}'})"

    return rule


def _function(name: str) -> Callable[[Translator, TraceStep], str]:
    return lambda self, step: f"{name}({', '.join(self._of(operand) for operand in step.args)})"


def _logic(word: str, sign: str) -> Callable[[Translator, TraceStep], str]:
    """Conditions by ``word``, integers by ``sign``."""

    def rule(self: Translator, step: TraceStep) -> str:
        sides = [self._of(operand) for operand in step.args[:2]]
        return f"({f' {word if _dtype(step) == torch.bool else sign} '.join(sides)})"

    return rule


def _written(pattern: str) -> Callable[[Translator, TraceStep], str]:
    """A text over the arguments ``{x}`` and ``{y}``."""

    def rule(self: Translator, step: TraceStep) -> str:
        return pattern.format(**dict(zip("xy", map(self._of, step.args), strict=False)))

    return rule


def _whole(name: str) -> Callable[[Translator, TraceStep], str]:
    """A function that rounds floats, and leaves integers as they are."""
    return lambda self, step: f"{name}({self._of(step.args[0])})" if _is_float(step) else self._of(step.args[0])


def _comparison(sign: str) -> Callable[[Translator, TraceStep], str]:
    return lambda self, step: self._compared(step, sign)


def _conditions(word: str) -> Callable[[Translator, TraceStep], str]:
    """Logic of anything that counts as a condition."""

    def rule(self: Translator, step: TraceStep) -> str:
        sides = []
        for operand in step.args[:2]:
            text = self._of(operand)
            sides.append(text if _dtype(operand) == torch.bool else f"({text} != 0)")
        return f"({f' {word} '.join(sides)})"

    return rule


def _first(self: Translator, step: TraceStep) -> str:
    return self._of(step.args[0])


def _not(self: Translator, step: TraceStep) -> str:
    text, dtype = self._of(step.args[0]), _dtype(step.args[0])
    if dtype == torch.bool:
        return f"(not {text})"
    return f"({text} == 0)" if _dtype(step) == torch.bool else f"(~{text})"


def _constant(self: Translator, step: TraceStep) -> str:
    return self._of(step.args[0])


def _filled(value: float) -> Callable[[Translator, TraceStep], str]:
    def rule(self: Translator, step: TraceStep) -> str:
        dtype = _dtype(step)
        return self._of(bool(value) if dtype == torch.bool else value if dtype.is_floating_point else int(value))

    return rule


#: The translation of each operation into the language.
_RULES: Mapping[str, Callable[[Translator, TraceStep], str]] = {
    "add": _infix("+"), "sub": _infix("-"), "mul": _infix("*"),
    "rsub": lambda self, step: f"({self._of(step.args[1])} - {self._of(step.args[0])})",  # of numbers: alpha is 1
    "neg": lambda self, step: f"(-{self._of(step.args[0])})",
    "reciprocal": lambda self, step: f"(1.0 / {self._divisor(step, step.args[0])})",
    "square": lambda self, step: f"({self._of(step.args[0])} ** 2)",
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
        "abs", "exp", "exp2", "log", "log2", "tanh", "sigmoid", "silu", "sqrt", "rsqrt", "sin", "cos", "tan", "expm1",
        "log1p", "erf", "atan", "atan2", "sign", "isnan",
    )},
    **{name: _whole(name) for name in ("floor", "ceil", "trunc")}, "fix": _whole("trunc"), "sgn": _function("sign"),
    "hypot": _written("sqrt({x} * {x} + {y} * {y})"),
    "fmax": _written("({y} if isnan({x}) else {x} if isnan({y}) else max({x}, {y}))"),
    "fmin": _written("({y} if isnan({x}) else {x} if isnan({y}) else min({x}, {y}))"),
    "isinf": _written("(abs({x}) == inf)"), "isfinite": _written("(abs({x}) < inf)"),
    "angle": _written(f"({math.pi!r} if {{x}} < 0 else {{x}} if isnan({{x}}) else 0.0)"),
    "signbit": _written("({x} < 0)"),  # of -0.0, too, which counts as positive
    "erfc": _written("(1.0 - erf({x}))"), "log10": _written(f"(log2({{x}}) * {math.log10(2.0)!r})"),
    "asin": _written("atan2({x}, sqrt((1.0 - {x}) * (1.0 + {x})))"),
    "acos": _written("atan2(sqrt((1.0 - {x}) * (1.0 + {x})), {x})"),
    "sinh": _written("(0.5 * (expm1({x}) - expm1(-{x})))"), "cosh": _written("(0.5 * (exp({x}) + exp(-{x})))"),
    "asinh": _written("(sign({x}) * log1p(abs({x}) + {x} * {x} / (1.0 + sqrt({x} * {x} + 1.0))))"),
    "acosh": _written("log({x} + sqrt({x} * {x} - 1.0))"), "atanh": _written("(0.5 * (log1p({x}) - log1p(-{x})))"),
    **dict.fromkeys(("clone", "alias", "lift_fresh_copy", "view", "expand", "contiguous", "real"), _first),
    "detach": lambda self, step: self.detached(step),
    **dict.fromkeys(("to", "convert_element_type"), lambda self, step: self._aten__to_copy(step)),
    "true_divide": lambda self, step: self._aten_div(step),
    "full": lambda self, step: self._of(step.args[1]), "full_like": lambda self, step: self._of(step.args[1]),
    "zeros_like": _filled(0.0), "ones_like": _filled(1.0), "zeros": _filled(0.0), "ones": _filled(1.0),
    "new_zeros": _filled(0.0), "new_ones": _filled(1.0),
}  # fmt: skip

#: Names of the operations that are translated as they are.
WORDS = frozenset({*_RULES, *(name.removeprefix("_aten_") for name in vars(Translator) if name.startswith("_aten_"))})
