"""The inputs of a function beside its arguments: they tell one function from another, and whether one has changed.

A function is known by its code and by all that the code can reach: cells, globals, defaults, and the attributes of
objects, modules and classes that it names. Tensors count by shape, dtype and device; what they hold is not read here.
"""

from __future__ import annotations

import builtins
import dis
from collections.abc import Callable, Iterator
from enum import Enum
from functools import lru_cache, partial
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any
from weakref import ref

import torch
from torch import Tensor

_PLAIN = frozenset({bool, int, str, bytes, type(None), type(Ellipsis), range, torch.dtype, torch.device})
_OF_C = (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType, MethodWrapperType)

#: Modules whose contents nobody changes, by the first part of their names.
_CONSTANT = frozenset({"torch", "math", "functools", "operator", "builtins", "typing", "itertools", "cmath"})

#: Names by which code reads what its other names do not tell.
_HIDDEN = frozenset({
    "getattr", "hasattr", "vars", "globals", "locals", "eval", "exec", "open", "input", "dir", "super", "next", "iter",
    "__dict__", "__import__", "__getattribute__", "__globals__", "__closure__", "import_module", "environ", "getenv",
})  # fmt: skip

#: Functions and attributes of torch that read its state, which may change between calls.
_STATE = frozenset({
    "is_grad_enabled", "is_inference_mode_enabled", "is_autocast_enabled", "is_autocast_cpu_enabled",
    "is_autocast_cache_enabled", "is_autocast_available", "get_autocast_dtype", "get_autocast_gpu_dtype",
    "get_autocast_cpu_dtype", "get_default_dtype", "get_default_device", "are_deterministic_algorithms_enabled",
    "is_deterministic_algorithms_warn_only_enabled", "get_deterministic_debug_mode", "get_float32_matmul_precision",
    "is_anomaly_enabled", "is_anomaly_check_nan_enabled", "is_warn_always_enabled", "get_num_threads", "initial_seed",
    "get_rng_state", "current_device", "current_stream", "backends", "_C", "is_compiling", "is_dynamo_compiling",
    "is_exporting", "is_scripting", "is_tracing",
})  # fmt: skip

#: Methods that Python calls by itself, and that are read by name or read nothing that a trace could depend on.
_HARMLESS = frozenset({
    "__init__", "__new__", "__post_init__", "__repr__", "__str__", "__eq__", "__hash__", "__reduce__", "__reduce_ex__",
    "__call__", "__init_subclass__", "__class_getitem__", "__setattr__", "__delattr__", "__replace__", "__copy__",
    "__deepcopy__", "__getstate__", "__setstate__", "__format__", "__sizeof__",
})  # fmt: skip

_DEPTH, _LONGEST = 8, 4096

#: Looked up once: every call asks.
_default_dtype, _autocasts = torch.get_default_dtype, torch._C._is_any_autocast_enabled

#: The key of what lies in a cell; what stands where nothing is; the part of a key that does not tell all.
_CELL, _ABSENT, _UNKNOWN = object(), object(), "unknown"


class FunctionInputs:
    """The inputs of functions, at the time when this is made.

    ``key`` is the same for functions that compute the same, given tensors of the same shapes, dtypes and devices.
    ``tensors`` are those that are captured, each once, with a name. Where code can read what is not found here, such
    as what a property computes, the reading is not ``complete``: only running the function tells what it computes.
    """

    __slots__ = ("_by_name", "_names", "_open", "_slots", "_watch", "complete", "key", "tensors")

    def __init__(self, *functions: Callable[..., Any] | None, watch: Watch | None = None) -> None:
        """All that is read is also put under ``watch``."""
        self._names: dict[str, None] = {"__call__": None}  # of all code that was met, in order
        self._watch = watch
        while True:
            known = len(self._names)
            self._by_name = False
            self._slots: dict[int, int] = {}
            self._open: dict[int, int] = {}  # what is being read, so that cycles end
            self.tensors: list[tuple[str, Tensor]] = []
            self.complete = True
            self.key: tuple[Any, ...] = (modes(), *(self._of(one, "captured", 0) for one in functions))
            if not self._by_name or len(self._names) == known:  # all names of all code were looked up
                break
            if watch is not None:
                watch.clear()
        if watch is not None and not self.complete:
            watch.complete = False

    def _unknown(self) -> str:
        self.complete = False
        return _UNKNOWN

    def _unwatched(self) -> None:
        """Note that the next input can change in place."""
        if self._watch is not None:
            self._watch.complete = False

    def _held(self, holder: Any, key: Any, value: Any, name: str, depth: int) -> Any:
        """The key of the value of a cell, a dictionary or the like."""
        if self._watch is not None and not isinstance(value, Tensor):
            self._watch.values.append((holder, key, value))
        return self._of(value, name, depth, (holder, key))

    def _of(self, value: Any, name: str, depth: int, place: tuple[Any, Any] = (None, None)) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return kind, value
        if kind is float:
            return kind, value.hex()  # which tells -0.0 from 0.0, and NaN is equal to itself
        if isinstance(value, Tensor):
            return self._tensor(value, name, place)
        identity = id(value)
        if depth > _DEPTH:
            return self._unknown()
        if identity in self._open:
            return "again", self._open[identity]
        self._open[identity] = len(self._open)
        try:
            return self._inside(value, kind, name, depth + 1)
        finally:
            del self._open[identity]

    def _tensor(self, value: Tensor, name: str, place: tuple[Any, Any]) -> Any:
        slot = self._slots.get(id(value))
        if slot is None:
            slot = self._slots[id(value)] = len(self.tensors)
            self.tensors.append((name, value))
        if self._watch is not None:
            self._watch.tensors.append((*place, ref(value), state_of(value), *_form(value)))
        if type(value) not in (Tensor, torch.nn.Parameter):
            self.complete = False
        return "tensor", slot, *_form(value), name

    def _inside(self, value: Any, kind: type, name: str, depth: int) -> Any:
        if kind is FunctionType:
            return self._of_torch(value) if of_torch(value) else self._function(value, depth)
        if kind is MethodType:
            return "method", self._of(value.__func__, name, depth), self._of(value.__self__, name, depth)
        if kind is partial:
            return self._partial(value, name, depth)
        if isinstance(value, tuple) and (kind in (tuple, torch.Size) or hasattr(kind, "_fields")):
            return kind, tuple(self._of(one, name, depth) for one in value)
        if kind in (list, dict, set, frozenset):
            return self._container(value, kind, name, depth)
        if isinstance(value, ModuleType):
            return self._named(value, (vars(value),), name, depth) if _changes(value.__name__) else value
        if isinstance(value, type):
            constant = issubclass(value, Enum) or not _changes(value.__module__)
            return value if constant else self._class(value, name, depth)
        if isinstance(value, _OF_C):
            owner = getattr(value, "__self__", None)
            known = owner is None or (isinstance(owner, ModuleType) and not _changes(owner.__name__))
            return self._of_torch(value) if known or isinstance(owner, type) else self._unknown()
        if isinstance(value, Enum) or (kind.__module__.startswith("torch._ops") and callable(value)):
            return value
        return self._object(value, kind, name, depth)

    def _of_torch(self, function: Any) -> Any:
        """The key of a function of torch's or of Python's: itself, unless it reads torch's state."""
        return self._unknown() if function.__name__ in _STATE else function

    def _function(self, function: FunctionType, depth: int) -> Any:
        code, watch = function.__code__, self._watch
        read, hidden, shadows = reads_of(code)
        self._names.update(dict.fromkeys(read))
        if hidden:
            self.complete = False
        if watch is not None:
            watch.functions.append((function, code, function.__defaults__, function.__kwdefaults__))
        cells = [
            self._held(cell, _CELL, inside, name, depth)
            for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True)
            if (inside := _content(cell)) is not _ABSENT
        ]
        around = function.__globals__
        keys = [self._held(around, name, around[name], name, depth) for name in read if name in around]
        if watch is not None:
            watch.values.extend((around, name, _ABSENT) for name in shadows if name not in around)
        if function.__defaults__ or function.__kwdefaults__:
            given = code.co_varnames[code.co_argcount - len(function.__defaults__ or ()) :]
            keys += [self._of(one, name, depth) for name, one in zip(given, function.__defaults__ or (), strict=False)]
            named = function.__kwdefaults__ or {}
            keys += [(key, self._held(named, key, one, key, depth)) for key, one in named.items()]
        return code, len(cells), *cells, *keys

    def _partial(self, value: partial[Any], name: str, depth: int) -> Any:
        named = value.keywords
        given = tuple(self._of(one, name, depth) for one in value.args)
        keywords = tuple((key, self._held(named, key, one, key, depth)) for key, one in named.items())
        return "partial", self._of(value.func, name, depth), given, keywords

    def _container(self, value: Any, kind: type, name: str, depth: int) -> Any:
        self._unwatched()
        if len(value) > _LONGEST:
            return self._unknown()
        if kind is dict:
            return kind, tuple((self._of(key, name, depth), self._of(one, name, depth)) for key, one in value.items())
        if kind is list:
            return kind, tuple(self._of(one, name, depth) for one in value)
        if not all(type(one) in _PLAIN for one in value):
            return self._unknown()
        return kind, frozenset((type(one), one) for one in value)

    # --- what is read by name: attributes -------------------------------------------------------------------

    def _named(self, value: Any, holders: tuple[Any, ...], name: str, depth: int) -> Any:
        """Return the key of a module, of which the names count that some code reads."""
        self._by_name = True
        if "__getattr__" in holders[0]:
            return self._unknown()
        keys = [
            (one, self._held(holder, one, holder[one], one, depth))
            for one in tuple(self._names) for holder in holders if one in holder and one != "__call__"
        ]  # fmt: skip
        return type(value), *keys

    def _class(self, value: type, name: str, depth: int) -> Any:
        if type(value) is not type:
            return self._unknown()
        self._by_name = True
        self._names.update({"__init__": None, "__new__": None, "__post_init__": None})
        keys = []
        for one in tuple(self._names):
            part = self._of_class(value, value, one, depth)
            if part is not None:
                keys.append((one, part))
        return value, *keys

    def _of_class(self, owner: Any, kind: type, name: str, depth: int) -> Any:
        """The key of an attribute of a class, or None: the values of properties and the like are unknown."""
        for each in kind.__mro__:
            if name in vars(each):
                attribute = vars(each)[name]
                if isinstance(attribute, staticmethod | classmethod):
                    attribute = attribute.__func__
                if isinstance(attribute, MemberDescriptorType):
                    self._unwatched()
                    there = getattr(owner, name, _ABSENT)
                    return None if there is _ABSENT else self._of(there, name, depth)
                if hasattr(type(attribute), "__get__") and not isinstance(attribute, (FunctionType, *_OF_C)):
                    return self._unknown()
                return self._held(vars(each), name, attribute, name, depth)
        return None

    def _object(self, value: Any, kind: type, name: str, depth: int) -> Any:
        """Return the key of an object: of the attributes that some code names, its own and those of its class."""
        if kind.__module__ == "numpy" and getattr(value, "shape", None) == () and kind.__name__ != "ndarray":
            return kind, self._of(value.item(), name, depth)
        fields = getattr(value, "__dict__", None)
        if (fields is None and not _slotted(kind)) or _computes(kind):
            return self._unknown()
        self._by_name = True
        holders = [{} if fields is None else fields]
        if isinstance(value, torch.nn.Module):
            holders += [value._parameters, value._buffers, value._modules]
        keys = []
        for one in tuple(self._names):
            part = self._of_class(value, kind, one, depth)
            if part is not None:
                keys.append((one, part))
            for holder in holders:
                if one in holder:
                    keys.append((one, self._held(holder, one, holder[one], one, depth)))
                elif part is not None and self._watch is not None:
                    self._watch.values.append((holder, one, _ABSENT))
        return kind, *keys


class Watch:
    """Earlier inputs of functions: checking that they still hold takes a fraction of the time of reading them.

    It keeps no captured tensor alive that a function does not. Without ``complete`` it does not see all changes.
    """

    __slots__ = ("_modes", "complete", "functions", "tensors", "values")

    def __init__(self, *functions: Callable[..., Any] | None) -> None:
        self._modes = modes()
        self.clear()
        FunctionInputs(*functions, watch=self)

    def clear(self) -> None:
        """Forget what was taken note of."""
        self.complete = True
        self.functions: list[tuple[FunctionType, CodeType, Any, Any]] = []
        self.values: list[tuple[Any, Any, Any]] = []  # a cell or a mapping, the key, what stood there
        self.tensors: list[tuple[Any, ...]] = []

    def holds(self) -> bool:
        """Whether nothing that the functions read was replaced, or changed in place, as far as torch counts that."""
        of_dtypes = self._modes if len(self._modes) > 1 or _autocasts() else None
        if _default_dtype() is not self._modes[0] or (of_dtypes is not None and modes() != of_dtypes):
            return False
        for function, code, defaults, named in self.functions:
            if function.__code__ is not code or function.__defaults__ is not defaults:
                return False
            if function.__kwdefaults__ is not named:
                return False
        try:
            for holder, key, value in self.values:
                if (holder.cell_contents if key is _CELL else holder.get(key, _ABSENT)) is not value:
                    return False
            for holder, key, find, state, shape, dtype, _, learns in self.tensors:
                tensor = find()
                if tensor is None or state_of(tensor) != state:
                    return False
                if holder is not None and (holder.cell_contents if key is _CELL else holder.get(key)) is not tensor:
                    return False
                if tensor.requires_grad is not learns or tensor.dtype is not dtype or tensor.shape != shape:
                    return False
        except ValueError:  # a cell that was emptied
            return False
        return True


def modes() -> tuple[Any, ...]:
    """The state of torch that decides dtypes of operations: the default dtype, and those of autocast if any is on."""
    if not _autocasts():
        return (_default_dtype(),)
    casts = [torch.get_autocast_dtype(one) if torch.is_autocast_enabled(one) else None for one in ("cpu", "cuda")]
    return _default_dtype(), *casts


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad


def state_of(tensor: Tensor) -> tuple[int, int]:
    """A key that changes with a tensor's numbers: torch's version counter, and their address.

    Tensors of inference mode do not count it.
    """
    return -1 if tensor.is_inference() else tensor._version, tensor.data_ptr() if tensor.layout is torch.strided else 0


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return _ABSENT


@lru_cache(1024)
def reads_of(code: CodeType) -> tuple[tuple[str, ...], bool, tuple[str, ...]]:
    """The names that code looks up, whether it may read anything else, and the names that are Python's own."""
    read = tuple(dict.fromkeys(names(code)))
    hidden = not _HIDDEN.isdisjoint(read) or not _STATE.isdisjoint(read) or _imports(code)
    return read, hidden, tuple(name for name in read if hasattr(builtins, name))


def _imports(code: CodeType) -> bool:
    inside = [one for one in code.co_consts if isinstance(one, CodeType)]
    own = _IMPORT in code.co_code[::2] and any(step.opname == "IMPORT_NAME" for step in dis.get_instructions(code))
    return own or any(map(_imports, inside))


_IMPORT = dis.opmap["IMPORT_NAME"]


def names(code: CodeType) -> Iterator[str]:
    """Yield the names that a function looks up, and those of functions that are written inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names(constant)


def _changes(module: str | None) -> bool:
    """Whether what a module holds may change between calls."""
    return (module or "").partition(".")[0] not in _CONSTANT


def _slotted(kind: type) -> bool:
    return any("__slots__" in vars(each) for each in kind.__mro__)


@lru_cache(256)
def _computes(kind: type) -> bool:
    """Whether objects of a class answer Python's own questions, such as an index or an attribute, by code."""
    for each in kind.__mro__[:-1]:
        if _changes(each.__module__):
            methods = [name for name, value in vars(each).items() if isinstance(value, FunctionType)]
            if any(name.startswith("__") and name not in _HARMLESS for name in methods):
                return True
        elif not issubclass(each, torch.nn.Module) and each.__module__ != "typing":
            return True  # a list, a number, or whatever C has
    return False


def of_torch(value: Any) -> bool:
    """Whether something is a function of torch's or of Python's, which nobody changes and which captures nothing."""
    return isinstance(value, FunctionType) and value.__closure__ is None and not _changes(value.__module__)
