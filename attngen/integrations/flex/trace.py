"""A mask_mod or score_mod of FlexAttention as a list of aten operations.

The function runs once, on indices that are tensors without dimensions, and what torch dispatches is written down.
Indexing a tensor by one becomes a gather, where torch would read the index as a number.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from attngen.errors import CallError
from attngen.integrations.flex.direct import DIRECT, Rule
from attngen.integrations.flex.effects import Kept, effect_of
from attngen.integrations.flex.identity import FunctionInputs
from attngen.integrations.flex.rewrites import REWRITES

_aten = torch.ops.aten
_NO_TENSORS: frozenset[int] = frozenset()
_AN_INDEX = (torch.int32, torch.int64)
_DIVIDES = frozenset({_aten.div, _aten.floor_divide, _aten.remainder, _aten.fmod})


@dataclass(eq=False, slots=True)
class TraceStep:
    """An argument, or an operation on what depends on arguments; args hold other operands, and Python's numbers."""

    name: str  # such as "add"; of an argument "argument"
    overload: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dtype: torch.dtype
    shape: torch.Size
    line: int | None = None


@dataclass(eq=False, slots=True)
class CapturedTensor:
    """A captured tensor: its place among those of the reading, and its name."""

    slot: int
    name: str
    dtype: torch.dtype
    shape: torch.Size
    device: torch.device
    requires_grad: bool


@dataclass(eq=False, slots=True)
class Made:
    """A tensor that does not depend on arguments: made inside of the function, or computed from captured ones.

    Of one ``element`` of a captured tensor, ``tensor`` is left out.
    """

    tensor: Tensor | None
    dtype: torch.dtype
    shape: torch.Size
    sources: frozenset[int]  # slots of the captured tensors that it was computed from
    line: int | None
    element: tuple[CapturedTensor, tuple[int, ...]] | None = None


Operand = TraceStep | CapturedTensor | Made


@dataclass(slots=True)
class Trace:
    """The trace of a function: steps in order, and what it returns."""

    steps: list[TraceStep] = field(default_factory=list)
    result: Operand | None = None
    #: Slots of captured tensors whose values, not only shapes, decided what was recorded.
    fixed: set[int] = field(default_factory=set)
    #: Whether a tensor was met that the reading of the function did not find.
    strange: bool = False


#: Attributes of a tensor that a function may read without its values.
_ABOUT = {
    Tensor.shape.__get__, Tensor.dtype.__get__, Tensor.device.__get__, Tensor.ndim.__get__, Tensor.is_cuda.__get__,
    Tensor.requires_grad.__get__, Tensor.layout.__get__, Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__,
    Tensor.nelement, Tensor.is_floating_point, Tensor.ndimension,
}  # fmt: skip


class _OperationError(Exception):
    """An operation that a mask_mod or score_mod may not have; the text says why, and what to write instead."""


_BRANCHES = (
    "it branches on the value of an index, as 'if', 'and', max(), slices and .item() do; write torch.where with both "
    "arms, &, torch.maximum, and one index for each dimension of a tensor"
)


class _Gathers(TorchFunctionMode):
    """Makes indexing by tensors without dimensions a gather, as in FlexAttention.

    If the indexed tensor requires a gradient, a number as an index is made to depend on an argument, too, so that the
    trace has the gather.
    """

    def __init__(self, argument: Tensor, recorder: _Recorder) -> None:
        super().__init__()
        self._argument, self._recorder = argument, recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        direct = None if kwargs else DIRECT.get(func)
        if direct is not None:
            known = self._recorder.direct(*direct, args)
            if known is not None:
                return known
        if func is Tensor.__getitem__:
            tensor, index = args
            indices = index if isinstance(index, tuple) else (index,)
            numbers = all(isinstance(i, int) or (isinstance(i, Tensor) and not i.dim()) for i in indices)
            if numbers and 0 < len(indices) <= tensor.dim():
                self._recorder.expect(tensor)
                constant = not any(isinstance(i, Tensor) for i in indices)
                if constant and tensor.requires_grad:
                    indices = tuple(0 * self._argument + i for i in indices)
                elif constant and len(indices) == tensor.dim():
                    return self._recorder.element(tensor, indices)
                elif len(indices) == tensor.dim():
                    gathered = self._recorder.gather(tensor, indices)
                    if gathered is not None:
                        return gathered
                return _aten.index(
                    tensor, [i if isinstance(i, Tensor) else torch.tensor(i, device="cpu") for i in indices]
                )
        result = func(*args, **(kwargs or {}))
        if func not in _ABOUT and not isinstance(result, Tensor):
            self._recorder.read(args)  # tolist and the like are not dispatched
        return result


class _Recorder(TorchDispatchMode):
    """Writes down what depends on the arguments, and computes what does not.

    Refused before they run are operations that change a tensor, since captured tensors are the caller's, and those on
    nothing but captured tensors that require a gradient, since only their result would be known.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: Sequence[Tensor],
        reading: FunctionInputs,
        device: torch.device,
        words: Container[str],
    ) -> None:
        super().__init__()
        self.trace = Trace()
        #: Whether something that depends on arguments was read in a way that is not dispatched, as by tolist.
        self.decided = False
        self._words = words
        self._device = device
        self._file = getattr(getattr(plain_of(function), "__code__", None), "co_filename", None)
        self._place = arguments[-1].device
        self._alive: list[Any] = list(arguments)  # so that nothing else gets the identity of what is known
        self.known: dict[int, Operand] = {
            id(tensor): CapturedTensor(slot, name, tensor.dtype, tensor.shape, tensor.device, tensor.requires_grad)
            for slot, (name, tensor) in enumerate(reading.tensors)
        }
        for argument in arguments:
            step = TraceStep("argument", "", (), {}, argument.dtype, argument.shape)
            self.known[id(argument)] = step
            self.trace.steps.append(step)

    def expect(self, tensor: Tensor) -> None:
        """Refuse a captured tensor that is on another device than the call."""
        if tensor.dim() and tensor.device.type != self._device.type:
            known = self.known.get(id(tensor))
            name = f"'{known.name}' " if isinstance(known, CapturedTensor) else ""
            raise _OperationError(
                f"the captured tensor {name}is on {tensor.device}, the call on {self._device}; capture its copy there, "
                f"by .to('{self._device}')"
            )

    def element(self, tensor: Tensor, indices: tuple[int, ...]) -> Tensor:
        """Return an element of a tensor, which is read where it is used, unless its value is looked at here."""
        known = self.known.get(id(tensor))
        if not isinstance(known, CapturedTensor):
            return _aten.index(tensor, [torch.tensor(i, device="cpu") for i in indices])
        places = tuple(i + size if i < 0 else i for i, size in zip(indices, known.shape, strict=True))
        with torch._C._DisableTorchDispatch():
            result = tensor[places]
        self.known[id(result)] = Made(
            None, result.dtype, result.shape, frozenset({known.slot}), self._line(), (known, places)
        )
        self._alive.append(result)
        return result

    def direct(self, name: str, rule: Rule, args: Sequence[Any]) -> Tensor | None:
        """Return the result of an operation on steps and numbers, which is not run; None of any other."""
        operands: list[Any] = []
        dtypes: list[torch.dtype] = []
        numbers: list[float] = []
        depends = False
        for value in args:
            if type(value) is int or type(value) is float:
                if not dtypes:
                    return None
                numbers.append(value)
                operands.append(value)
            else:
                known = self.known.get(id(value))
                if type(known) is TraceStep:
                    depends = True
                elif type(known) is not CapturedTensor or known.requires_grad:
                    return None
                if known.shape:
                    return None
                dtypes.append(known.dtype)
                operands.append(known)
        dtype = rule(dtypes, numbers) if depends else None
        return None if dtype is None else self._written(name, f"aten.{name}", tuple(operands), dtype)

    def gather(self, tensor: Tensor, indices: Sequence[Any]) -> Tensor | None:
        """Return an element of a captured tensor at indices that are steps or numbers; None of any other."""
        source = self.known.get(id(tensor))
        if type(source) is not CapturedTensor:
            return None
        places: list[Any] = []
        for index, size in zip(indices, source.shape, strict=True):
            if type(index) is int and -size <= index < size:
                places.append(index if index >= 0 else index + size)
                continue
            place = self.known.get(id(index))
            if type(place) is not TraceStep or place.dtype not in _AN_INDEX:
                return None
            places.append(place)
        return self._written("index", "aten.index.Tensor", (source, places), source.dtype)

    def _written(self, name: str, overload: str, args: tuple[Any, ...], dtype: torch.dtype) -> Tensor:
        """Write down an operation whose result is a number, and return something of its dtype."""
        zero = _ZEROS.get((dtype, self._place))
        with torch._C._DisableTorchDispatch():
            result = (_zero(dtype, self._place) if zero is None else zero).detach()
        step = TraceStep(name, overload, args, {}, dtype, result.shape, self._line())
        self.trace.steps.append(step)
        self.known[id(result)] = step
        self._alive.append(result)
        return result

    def read(self, values: Any) -> None:
        """Take note that the values of tensors were read."""
        for tensor in _tensors(values):
            known = self.known.get(id(tensor))
            if isinstance(known, CapturedTensor):
                self.trace.fixed.add(known.slot)
            elif isinstance(known, Made):
                self.trace.fixed |= known.sources
            elif isinstance(known, TraceStep):
                self.decided = True
            else:
                self.trace.strange = True

    def returned(self, value: Any) -> None:
        """Take a function's result: a tensor, or a Python bool or number, which stands for all pairs."""
        if isinstance(value, Tensor):
            self.trace.result = self._operand(value)
        elif isinstance(value, bool | int | float):
            if self.decided:
                raise _OperationError(_BRANCHES)
            dtype = torch.tensor(value, device="cpu").dtype
            self.trace.result = TraceStep("scalar_tensor", "aten.scalar_tensor", (value,), {}, dtype, torch.Size())
            self.trace.steps.append(self.trace.result)
        else:
            raise _OperationError(f"it returns {type(value).__name__}; allowed: a tensor, or a Python bool or number")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise _OperationError(
                f"{func} returns random numbers, which differ from call to call; {REWRITES['random'].instead}"
            )
        if func._schema.is_mutable:
            raise _OperationError(
                f"it changes a tensor ({func}), and a function must have no side effects; give the result another name"
            )
        known, tensors = self.known, list(_tensors((args, kwargs)))
        for tensor in tensors:
            self.expect(tensor)
        depends = any(type(known.get(id(tensor))) is TraceStep for tensor in tensors)
        if not depends and tensors:
            return self._constant(func, args, kwargs, tensors)
        if depends and torch.Tag.dynamic_output_shape in func.tags and func is not _aten.index.Tensor:
            raise _OperationError(_BRANCHES)  # nonzero and its like
        if depends and _name(func) not in self._words:
            result = self._decomposed(func, args, kwargs)
            if result is not None:
                return result
        if func is _aten.index.Tensor:
            result = self._gathered(*args)
        elif func.overloadpacket in _DIVIDES and isinstance(args[1], Tensor):
            result = func(args[0], torch.ones_like(args[1]), **kwargs)  # samples may be 0
        else:
            result = func(*args, **kwargs)
        if not isinstance(result, Tensor | tuple | list):
            raise _OperationError(_BRANCHES)
        for one in _tensors(result):
            self._alive.append(one)
            self.known[id(one)] = self._step(func, args, kwargs, one) if depends or not one.dim() else self._made(one)
        return result

    def _decomposed(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Compute an operation by torch's own decomposition, whose operations are written down; None if it has none."""
        from torch._decomp import decomposition_table  # takes a while, and most functions need none

        decomposition = decomposition_table.get(func)
        if decomposition is None:
            return None
        steps = self.trace.steps
        before = len(steps)
        try:
            with self:
                result = decomposition(*args, **kwargs)
        except Exception:  # such as one that looks at values
            result = NotImplemented
        complete = all(step.name in self._words for step in steps[before:])
        if complete and result is not NotImplemented and all(id(one) in self.known for one in _tensors(result)):
            return result
        del steps[before:]  # a refusal names the operation that the function has, not a part of it
        return None

    def _step(self, func: Any, args: Any, kwargs: dict[str, Any], result: Tensor) -> TraceStep:
        given = {key: self._operand(value) for key, value in kwargs.items()}
        step = TraceStep(_name(func), str(func), self._operands(args), given, result.dtype, result.shape, self._line())
        self.trace.steps.append(step)
        return step

    def _gathered(self, tensor: Tensor, indices: Sequence[Any]) -> Tensor:
        """Return a gather's result, of which nothing but dtype and shape is looked at, whatever the indices."""
        if any(index is None or index.dim() for index in indices):
            return _aten.index.Tensor(tensor, indices)
        return torch.empty(tensor.shape[len(indices) :], dtype=tensor.dtype, device=tensor.device)

    def _constant(self, func: Any, args: Any, kwargs: Any, tensors: Sequence[Tensor]) -> Any:
        """Compute something that does not depend on arguments."""
        sources: set[int] = set()
        if func is not _aten.lift_fresh.default:  # of a number that the function made a tensor
            for tensor in tensors:
                known = self.known.get(id(tensor))
                if isinstance(known, CapturedTensor):
                    sources.add(known.slot)
                elif isinstance(known, Made):
                    sources |= known.sources
                else:
                    self.trace.strange = True
            if func is not _aten.detach.default and any(tensor.requires_grad for tensor in tensors):
                raise _OperationError(
                    f"it computes {func} of a captured tensor that requires a gradient, which would be lost; index the "
                    "tensor first, or compute that outside of the function"
                )
        self.trace.fixed |= sources
        result = func(*args, **kwargs)
        for tensor in _tensors(result):
            if id(tensor) not in self.known:
                self.known[id(tensor)] = self._made(tensor, frozenset(sources))
                self._alive.append(tensor)
        return result

    def _operand(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            known = self.known.get(id(value))
            if known is None:  # that the reading of the function did not find
                self.trace.strange = True
                known = self.known[id(value)] = self._made(value)
                self._alive.append(value)
            return known
        return self._operands(value) if isinstance(value, list | tuple) else value

    def _operands(self, values: Any) -> tuple[Any, ...]:
        return tuple(self._operand(value) for value in values)

    def _made(self, tensor: Tensor, sources: frozenset[int] = _NO_TENSORS) -> Made:
        return Made(tensor, tensor.dtype, tensor.shape, sources, self._line())

    def _line(self) -> int | None:
        """Return the line of the function's file that runs now."""
        frame = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename != self._file:
            frame = frame.f_back  # type: ignore[assignment]
        return None if frame is None else frame.f_lineno


def _name(func: Any) -> str:
    """The name of an operation without its namespace and overload: ``add`` of ``aten.add.Tensor``."""
    return str(func).split(".")[1]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)
    elif isinstance(value, dict):
        for one in value.values():
            yield from _tensors(one)


_SAMPLES: dict[torch.device, tuple[Tensor, ...]] = {}

#: A zero of each dtype, whose aliases stand for results that are not computed.
_ZEROS: dict[tuple[torch.dtype, torch.device], Tensor] = {}


def _samples(kind: str, device: torch.device) -> list[Tensor]:
    """Return arguments for a function: a logit, and four indices."""
    samples = _SAMPLES.get(device)
    if samples is None:
        with torch.inference_mode(False):
            indices = (torch.zeros((), dtype=torch.int32, device=device) for _ in range(4))
            samples = torch.ones((), dtype=torch.float32, device=device), *indices
        if _runs(device):
            _SAMPLES[device] = samples
    return [*samples] if kind == "score_mod" else [*samples[1:]]


def _zero(dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        made = torch.zeros((), dtype=dtype, device=device)
    if _runs(device):
        _ZEROS[dtype, device] = made
    return made


def _runs(device: torch.device) -> bool:
    """Whether tensors that are made now hold numbers; while a CUDA graph is captured, nothing runs."""
    return device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


def traced(
    function: Callable[..., Any], kind: str, device: torch.device, reading: FunctionInputs, words: Container[str]
) -> Trace:
    """Trace a function of (b, h, q_idx, kv_idx), or with ``kind='score_mod'`` of (score, b, h, …).

    ``reading`` is of this function, or of several with it. Operations that are not among ``words`` are written down as
    torch decomposes them, where it does. The function runs in the modes of the caller, such as no_grad or autocast.
    Raises CallError, in one sentence with the place, for a function that cannot be traced.
    """
    effect = effect_of(function)
    if effect is not None:
        effectful, reason, line = effect
        raise refusal(effectful, kind, f"{reason}; a function must have no side effects", line)
    arguments = _samples(kind, device)
    recorder = _Recorder(function, arguments, reading, device, words)
    kept = Kept(function)
    try:
        with recorder, _Gathers(arguments[-1], recorder):
            returned = function(*arguments)
    except Exception as error:
        kept.changed()
        raise refusal(function, kind, _reason(error), _line_of_error(error, function)) from error
    changed = kept.changed()
    if changed is not None:
        raise refusal(
            function, kind, f"it changes {changed}, which a trace does only once; a function must have no side effects"
        )
    try:
        recorder.returned(returned)
    except _OperationError as error:
        raise refusal(function, kind, str(error)) from None
    return recorder.trace


def _line_of_error(error: Exception, function: Callable[..., Any]) -> int | None:
    """Return the line of a function's file at which an error was raised."""
    code, line, trace = getattr(plain_of(function), "__code__", None), None, error.__traceback__
    while trace is not None:
        if code is not None and trace.tb_frame.f_code.co_filename == code.co_filename:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def _reason(error: Exception) -> str:
    if isinstance(error, _OperationError):
        return str(error)
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return f"it cannot be traced: {text}"


def refusal(function: Callable[..., Any], kind: str, reason: str, line: int | None = None) -> CallError:
    """Return the error that says why a function is not served, and where it is defined."""
    plain = plain_of(function)
    code = getattr(plain, "__code__", None)
    place = "" if code is None else f" ({code.co_filename}:{line or code.co_firstlineno})"
    return CallError(f"{kind} {getattr(plain, '__qualname__', repr(plain))}{place}: {reason}")


def plain_of(function: Callable[..., Any]) -> Any:
    """Return the plain function inside partial objects, methods and callable objects."""
    while isinstance(function, partial):
        function = function.func
    if isinstance(function, MethodType):
        return function.__func__
    if isinstance(function, FunctionType):
        return function
    call = vars(type(function)).get("__call__")
    return call if isinstance(call, FunctionType) else function
