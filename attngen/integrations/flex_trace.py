"""A mask_mod or score_mod of FlexAttention as a graph of aten operations, by torch's own tracer.

The function runs once on indices that are tensors without dimensions. Indexing a tensor by one becomes a gather, where
torch would read the index as a number.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attngen.errors import CallError
from attngen.integrations.flex_effects import Kept, effect_of

#: What nodes of a trace call the line of the function that was traced.
_LINE = "line of the traced function"


class _Gathers(TorchFunctionMode):
    """Makes indexing by tensors without dimensions a gather, as in FlexAttention.

    If the indexed tensor requires a gradient, a number as an index is made to depend on an argument, too, so that the
    trace has the gather. Each operation of the trace gets the line of ``function``'s file at which it was written.
    """

    def __init__(self, argument: Tensor, function: Callable[..., Any]) -> None:
        super().__init__()
        self._argument = argument
        self._code = getattr(plain_of(function), "__code__", None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = self._computed(func, args, kwargs)
        self._mark(sys._getframe(1))
        return result

    def _mark(self, frame: FrameType | None) -> None:
        """Write down where the last operations of the trace stand."""
        tracing = get_proxy_mode()
        if tracing is None or self._code is None:
            return
        while frame is not None and frame.f_code.co_filename != self._code.co_filename:
            frame = frame.f_back
        for node in reversed(tracing.tracer.graph.nodes):
            if frame is None or node.op == "placeholder" or _LINE in node.meta:
                break
            node.meta[_LINE] = frame.f_lineno

    def _computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is Tensor.__getitem__:
            tensor, index = args
            indices = index if isinstance(index, tuple) else (index,)
            numbers = all(isinstance(i, int) or (isinstance(i, Tensor) and not i.dim()) for i in indices)
            if numbers and 0 < len(indices) <= tensor.dim():
                gathered = [torch.as_tensor(i, device=tensor.device) for i in indices]
                if tensor.requires_grad and not any(isinstance(i, Tensor) for i in indices):
                    gathered = [0 * self._argument + i for i in indices]
                return torch.ops.aten.index(tensor, gathered)
        return func(*args, **(kwargs or {}))


class _OperationError(Exception):
    """An operation that a mask_mod or score_mod may not have; the text says why."""


class _Watch(TorchDispatchMode):
    """Refuses operations before they run: those that change a tensor, since captured tensors are the caller's, and
    those on nothing but captured tensors that require a gradient, since a trace has only their result."""

    def __init__(self, arguments: Sequence[Tensor]) -> None:
        super().__init__()
        self._depend = {id(argument) for argument in arguments}
        self._alive: list[Any] = []  # so that nothing else gets the identity of what depends on the arguments

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:
            raise _OperationError(f"it changes a tensor ({func}); a function may only compute")
        given = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, Tensor)]
        depends = any(id(leaf) in self._depend for leaf in given)
        learned = any(leaf.requires_grad for leaf in given)
        if learned and not depends and func is not torch.ops.aten.detach.default:
            raise _OperationError(
                f"it computes {func} of a captured tensor that requires a gradient, which would be lost; index the "
                "tensor first, or compute that outside of the function"
            )
        result = func(*args, **(kwargs or {}))
        if depends:
            self._alive.append(result)
            self._depend.update(id(leaf) for leaf in tree_leaves(result))
        return result


def traced(function: Callable[..., Any], kind: str, device: torch.device) -> GraphModule:
    """Return the graph of a function of (b, h, q_idx, kv_idx), or with ``kind='score_mod'`` of (score, b, h, …).

    Raises CallError, in one sentence with the place, for a function that cannot be traced.
    """
    effect = effect_of(function)
    if effect is not None:
        told, reason, line = effect
        raise refusal(told, kind, f"{reason}; a function may only compute", line)
    for name, tensor in captured_tensors(function).values():
        if tensor.dim() and tensor.device.type != device.type:
            raise refusal(function, kind, f"the captured tensor '{name}' is on {tensor.device}, the call on {device}")
    indices = [torch.zeros((), dtype=torch.int32, device=device) for _ in range(4)]
    samples = [torch.ones((), device=device), *indices] if kind == "score_mod" else indices

    def called(*arguments: Tensor) -> Any:
        with _Gathers(arguments[-1], function), _Watch(arguments):
            return function(*arguments)

    kept = Kept(function)
    try:
        with torch.no_grad():
            graph = make_fx(called, tracing_mode="real")(*samples)
    except Exception as error:
        kept.changed()
        raise refusal(function, kind, _reason(error), _line_of_error(error, function)) from error
    changed = kept.changed()
    if changed is not None:
        raise refusal(function, kind, f"it changes {changed}, which a trace does once; a function may only compute")
    returned = next(node for node in graph.graph.nodes if node.op == "output").args[0]
    if not isinstance(returned, Node):
        raise refusal(function, kind, "it returns no tensor that depends on its arguments")
    return graph


def _line_of_error(error: Exception, function: Callable[..., Any]) -> int | None:
    """Return the line of a function's file at which an error was raised."""
    code, found, trace = getattr(plain_of(function), "__code__", None), None, error.__traceback__
    while trace is not None:
        if code is not None and trace.tb_frame.f_code.co_filename == code.co_filename:
            found = trace.tb_lineno
        trace = trace.tb_next
    return found


def _reason(error: Exception) -> str:
    if isinstance(error, _OperationError):
        return str(error)
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if "data-dependent" in str(error) or "get value out of a tracing tensor" in str(error):
        return "it branches on the value of an index, as 'if' and .item() do; write torch.where with both arms"
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


def line_of(node: Node) -> int | None:
    """Return the line of the traced function's file at which an operation was written, if it is known."""
    found = node.meta.get(_LINE)
    return found if isinstance(found, int) else None


def captured_names(function: Callable[..., Any]) -> dict[int, str]:
    """Return what a function calls the tensors that it captures, by their identity."""
    return {identity: name for identity, (name, _) in captured_tensors(function).items()}


def captured_tensors(function: Callable[..., Any]) -> dict[int, tuple[str, Tensor]]:
    """Return names and tensors that a function captures, by identity: closures, globals, arguments."""
    found: dict[int, tuple[str, Tensor]] = {}

    def look(value: Any, name: str, depth: int = 0) -> None:
        if type(value) is ModuleType or isinstance(value, type):
            return
        if isinstance(value, Tensor):
            found.setdefault(id(value), (name, value))
        elif depth < 3 and isinstance(value, tuple | list):
            for given in value:
                look(given, name, depth)
        elif depth < 3 and isinstance(value, partial):
            for key, given in value.keywords.items():
                look(given, key, depth + 1)
            look(value.func, name, depth + 1)
        elif depth < 3 and isinstance(value, FunctionType | MethodType):
            for key, given in inspect.getclosurevars(value).nonlocals.items():
                look(given, key, depth + 1)
            for key, given in inspect.getclosurevars(value).globals.items():
                look(given, key, depth + 1)
            if isinstance(value, MethodType):
                look(value.__self__, name, depth + 1)
        elif depth < 3 and hasattr(value, "__dict__"):
            for key, given in vars(value).items():
                look(given, key, depth + 1)

    look(function, "captured")
    return found
