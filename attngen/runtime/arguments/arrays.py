"""Calls on arrays of other libraries, by DLPack: tensors over the same memory go in, and arrays come out.

Calls on tensors do not come here: a call is looked at once its first argument turns out to be no tensor. CuPy's arrays
are used on CuPy's current stream of their device, which is torch's current one meanwhile. Neither side has to record a
stream: torch's allocator gives the results to that stream, and what is freed there is used again in its order, as by
CuPy's own memory pool. Other libraries wait for torch's current stream, as the protocol says.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor

from attngen.errors import CallError
from attngen.runtime.arguments.given import Given
from attngen.runtime.arguments.torch_state import is_compiling

Result = TypeVar("Result")

#: Libraries whose arrays a call may write to.
_WRITTEN = ("cupy", "numpy")

#: Handles of CUDA's default streams: that of all threads, which also has 0, and that of each thread.
_LEGACY, _PER_THREAD = 1, 2


def is_array(value: object) -> bool:
    """Whether a value is an array of another library, as told by ``__dlpack__``."""
    return not isinstance(value, Tensor) and hasattr(value, "__dlpack__")


def refuse_beside(tensors: Mapping[str, object], name: str) -> None:
    """Raise CallError if the argument of a ``name`` is an array and no number, in a call on ``tensors``."""
    value = tensors[name]
    if not getattr(value, "ndim", 1):  # a number
        return
    _refuse_traced(name, value)
    first = next((other for other, tensor in tensors.items() if isinstance(tensor, Tensor)), None)
    beside = "" if first is None else f", but {first} is a torch.Tensor: all tensors of a call are of one kind"
    raise CallError(f"{name} is {_kind(value)}{beside}; allowed: torch.from_dlpack({name}), which copies nothing")


def serve_given(run: Callable[[Given], Result], given: Given) -> Result:
    """Result of a call of attention whose q is an array; see ``serve``."""
    pages = {"k": "k_pages", "v": "v_pages"} if given.form == "paged" else {}  # by their names in the call
    named = {name: pages.get(name, name) for name in given._fields}
    fields = {named[name]: value for name, value in given._asdict().items()}
    return serve(lambda **fields: run(Given(**{name: fields[named[name]] for name in named})), fields, ("out",))


def serve(run: Callable[..., Result], arguments: Mapping[str, object], written: Collection[str] = ()) -> Result:
    """Result of ``run(**arguments)`` on tensors in place of arrays, with arrays of their library in place of tensors.

    ``written``: names of the arguments that the call writes to. Arrays also stand in mappings, lists, tuples, and pairs
    of a name and a value. Raises CallError for arrays of several kinds, traced ones, those that cannot be written, and
    those that torch or the library cannot take.
    """
    if is_compiling():
        torch._dynamo.graph_break(msg="attngen is called on arrays of another library")
    named: list[tuple[str, object]] = []
    _each(lambda name, value: named.append((name, value)), "", arguments)
    (first, array), *others = named
    library = _library(array)
    for name, value in others:
        if _library(value) is not library:
            raise CallError(
                f"{first} is {_kind(array)}, but {name} is {_kind(value)}: all tensors of a call are of one kind"
            )
    for name, value in named:
        _check(name, value, library, name in written)
    tensors: dict[int, Tensor] = {}  # by the identity of arrays: one that is passed twice is one tensor
    arrays: dict[int, object] = {}

    def tensor_of(name: str, value: object) -> Tensor:
        if id(value) not in tensors:
            tensor = tensors[id(value)] = _tensor(name, value, library)
            arrays[id(tensor)] = value
        return tensors[id(value)]

    # Arrays without strides are contiguous: some releases of JAX take a transposed tensor for one.
    def array_of(_: str, value: Tensor) -> object:
        if id(value) in arrays:
            return arrays[id(value)]
        return _array(value if hasattr(array, "strides") else value.contiguous(), library)

    with _stream(first, array, library):
        result = run(**_each(tensor_of, "", arguments))
        return _each(array_of, "", result)


def _each(change: Callable[[str, Any], object], name: str, value: Any) -> Any:
    """A value with ``change(name, value)`` in place of each tensor and array in it."""
    if isinstance(value, Mapping):
        return {key: _each(change, key, one) for key, one in value.items()}
    if type(value) is tuple and len(value) == 2 and isinstance(value[0], str):
        return value[0], _each(change, value[0], value[1])
    if type(value) in (tuple, list):
        return type(value)(_each(change, f"{name}[{i}]", one) for i, one in enumerate(value))
    return change(name, value) if isinstance(value, Tensor) or is_array(value) else value


def _library(value: Any) -> ModuleType:
    """The module of an array's or a tensor's library that has ``from_dlpack``. Raises CallError where there is none."""
    if hasattr(value, "__array_namespace__"):
        return value.__array_namespace__()
    for one in type(value).__mro__:
        module = sys.modules.get(one.__module__.partition(".")[0])
        if module is not None and hasattr(module, "from_dlpack"):
            return module
    raise CallError(f"{type(value).__module__} has arrays with __dlpack__, but no from_dlpack for results")


def _kind(value: object) -> str:
    return "a torch.Tensor" if isinstance(value, Tensor) else f"an array of {_library(value).__name__}"


def _check(name: str, value: Any, library: ModuleType, written: bool) -> None:
    """Raise CallError for an array that no tensor stands for, and for one that cannot be ``written``."""
    _refuse_traced(name, value)
    masked = sys.modules.get("numpy.ma")
    if masked is not None and isinstance(value, masked.MaskedArray):
        raise CallError(f"{name} is a numpy.ma.MaskedArray, whose mask would be lost; allowed: {name}.filled(...)")
    if any(stride < 0 for stride in getattr(value, "strides", None) or ()):  # on which torch ends the process
        raise CallError(
            f"{name} has negative strides, which tensors cannot have; allowed: {library.__name__}."
            f"ascontiguousarray({name})"
        )
    if not written:
        return
    if library.__name__ not in _WRITTEN:
        raise CallError(f"{name} is written, and is {_kind(value)}; allowed: arrays of CuPy and numpy, torch tensors")
    if library.__name__ == "numpy" and not value.flags.writeable:
        raise CallError(f"{name} is written, but is a read-only array of numpy; allowed: one that is writable")


def _refuse_traced(name: str, value: object) -> None:
    """Raise CallError for an argument of ``jax.grad`` and other transforms of JAX, which holds no numbers."""
    if any(one.__name__ == "Tracer" and one.__module__.startswith("jax") for one in type(value).__mro__):
        raise CallError(
            f"{name} is traced by JAX ({type(value).__name__}), as in jax.grad, jax.jit and jax.vmap: arrays must hold "
            "numbers, and have no gradient; allowed: torch tensors for gradients, jax.pure_callback in jax.jit"
        )


def _tensor(name: str, array: object, library: ModuleType) -> Tensor:
    try:
        tensor: Tensor = torch.from_dlpack(array)
    except Exception as error:
        dtype = getattr(array, "dtype", "unknown")
        raise CallError(f"{name}: torch takes no such array of {library.__name__}, dtype {dtype}: {error}") from error
    return tensor


def _array(tensor: Tensor, library: ModuleType) -> object:
    try:
        with torch.cuda.device_of(tensor):  # torch exports what is on its current device
            return library.from_dlpack(tensor)
    except Exception as error:
        raise CallError(f"{library.__name__} takes no result of {tensor.dtype}: {error}") from error


def _stream(name: str, array: Any, library: ModuleType) -> AbstractContextManager[object]:
    """Context in which CuPy's current stream is torch's."""
    if library.__name__ != "cupy":
        return nullcontext()
    if torch.version.cuda is None:
        raise CallError(f"{name} is an array of cupy, but this torch ({torch.__version__}) is built without CUDA")
    device = array.device.id
    handle = library.cuda.get_current_stream(device).ptr
    if handle == _PER_THREAD:
        raise CallError(
            "CuPy's current stream is the default stream of each thread, which has one handle for all threads, so "
            "that their calls cannot be told apart; allowed: cupy.cuda.Stream.null, or another cupy.cuda.Stream"
        )
    if handle in (0, _LEGACY):  # of which ExternalStream makes another stream
        return torch.cuda.stream(torch.cuda.default_stream(device))
    return torch.cuda.stream(torch.cuda.ExternalStream(handle, device=device))
