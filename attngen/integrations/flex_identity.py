"""What tells one captured function from another: its code and what it captures, not the object; and a quick look at
whether a function still is what it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import ref

import torch
from torch import Tensor


def identity(value: Any, depth: int = 0) -> Any:
    """Return what tells one function, or captured value, from another: code and what it captures, not the object."""
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device):
        return type(value), value
    if isinstance(value, Tensor):
        return "tensor", id(value), version_of(value), value.requires_grad
    if depth > 4 or isinstance(value, ModuleType | type) or of_torch(value):
        return "object", id(value)
    if isinstance(value, FunctionType):
        cells = tuple(identity(cell.cell_contents, depth + 1) for cell in value.__closure__ or () if _filled(cell))
        seen = tuple(
            identity(value.__globals__[name], depth + 1)
            for name in names(value.__code__)
            if name in value.__globals__ and value.__globals__[name] is not value
        )
        given = tuple(identity(one, depth + 1) for one in value.__defaults__ or ())
        named = tuple((key, identity(one, depth + 1)) for key, one in (value.__kwdefaults__ or {}).items())
        return value.__code__, cells, seen, given, named
    if isinstance(value, MethodType):
        return "method", identity(value.__func__, depth + 1), identity(value.__self__, depth + 1)
    if isinstance(value, partial):
        given = tuple(identity(one, depth + 1) for one in (*value.args, *value.keywords.values()))
        return "partial", identity(value.func, depth + 1), given
    if isinstance(value, tuple | list):
        return type(value), tuple(identity(one, depth + 1) for one in value)
    if isinstance(value, dict):
        return "dict", tuple((key, identity(one, depth + 1)) for key, one in value.items())
    fields = (
        tuple((key, identity(one, depth + 1)) for key, one in vars(value).items()) if hasattr(value, "__dict__") else ()
    )
    return "object", id(value), fields


def names(code: CodeType) -> Iterator[str]:
    """Yield the names that a function looks up, and those of functions that are written inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names(constant)


def _filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018  (an empty cell raises)
    except ValueError:
        return False
    return True


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place; those of inference mode do not count that."""
    return -1 if tensor.is_inference() else tensor._version


class Watch:
    """What a function captures, as it was: whether that still holds takes a fraction of what finding it out took.

    It keeps no captured tensor alive that the function does not.
    """

    __slots__ = ("_constants", "_tensors")

    def __init__(self) -> None:
        self._constants: list[tuple[Any, Any, Any]] = []  # a cell or a mapping, the key, what stood there
        self._tensors: list[tuple[Any, Any, ref[Tensor], int, bool]] = []

    def holds(self) -> bool:
        """Whether nothing that the function reads was replaced, or changed in place."""
        for holder, key, value in self._constants:
            if (holder.cell_contents if key is _CELL else holder.get(key, _CELL)) is not value:
                return False
        for holder, key, find, version, learns in self._tensors:
            tensor = find()
            if tensor is None or (holder.cell_contents if key is _CELL else holder.get(key)) is not tensor:
                return False
            if version_of(tensor) != version or tensor.requires_grad is not learns:
                return False
        return True

    def look(self, value: Any, depth: int = 0) -> bool:
        """Take note of all that something captures, and return whether that is all: False for what can change unseen,
        such as the items of a list."""
        if depth > 4:
            return False
        if isinstance(value, FunctionType) and not of_torch(value):
            cells = [(cell, _CELL, cell.cell_contents) for cell in value.__closure__ or () if _filled(cell)]
            read = [(value.__globals__, name, value.__globals__[name])
                    for name in names(value.__code__) if name in value.__globals__]  # fmt: skip
            defaults = tuple(value.__defaults__ or ()) + tuple((value.__kwdefaults__ or {}).values())
            return all(self._note(*one, value, depth) for one in (*cells, *read)) and all(map(_is_plain, defaults))
        if isinstance(value, partial):
            given = (*value.args, *value.keywords.values())
            return self.look(value.func, depth + 1) and all(map(_is_plain, given))
        return _is_plain(value) or of_torch(value) or isinstance(value, ModuleType | type | BuiltinFunctionType)

    def _note(self, holder: Any, key: Any, value: Any, function: Any, depth: int) -> bool:
        if isinstance(value, Tensor):
            self._tensors.append((holder, key, ref(value), version_of(value), value.requires_grad))
            return True
        if isinstance(value, list | dict | set | bytearray):
            return False
        self._constants.append((holder, key, value))
        if value is function:
            return True
        return all(map(_is_plain, value)) if isinstance(value, tuple) else self.look(value, depth + 1)


#: The key of what lies in a cell.
_CELL = object()


def of_torch(value: Any) -> bool:
    """Whether something is a function of torch's or of Python's, which nobody changes."""
    return isinstance(value, FunctionType) and value.__module__.split(".")[0] in ("torch", "math", "functools")


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device)


def watch(function: Any) -> Watch | None:
    """Return what tells whether a function still is what it is now; None where only looking again does."""
    found = Watch()
    return found if function is None or found.look(function) else None
