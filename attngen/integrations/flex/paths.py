"""Paths to the tensors and numbers that functions capture, so that a compiled program reads them itself.

A program that torch compiles takes what a function means as a constant. It has to read all that this depends on, so
that torch's guards notice when that changes: the functions here are traced, save ``paths_of``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

from attngen.integrations.flex.identity import names, of_torch

#: Steps from a function to something that it reads, each of a kind and a key.
Path = tuple[tuple[str, Any], ...]

_LEAVES = (Tensor, bool, int, float, str, type(None), torch.dtype)
_DEPTH = 6


class NoPathError(Exception):
    """A function reads something that a traced program cannot; the text says what."""


def paths_of(function: Callable[..., Any]) -> tuple[dict[int, Path], tuple[tuple[Path, Any], ...]]:
    """Return the path to each captured tensor, by its identity, and the path and the value of each number.

    Raises NoPathError for what no path leads to.
    """
    tensors: dict[int, Path] = {}
    numbers: list[tuple[Path, Any]] = []
    for path, value in _captures(function, (), 0):
        if isinstance(value, Tensor):
            tensors.setdefault(id(value), path)
        else:
            numbers.append((path, value))
    return tensors, tuple(numbers)


def _captures(value: Any, path: Path, depth: int) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, _LEAVES):
        yield path, value
    elif isinstance(value, FunctionType):
        for place, cell in enumerate(value.__closure__ or ()):
            try:
                inside = cell.cell_contents
            except ValueError:  # an empty cell
                continue
            if inside is not value:
                yield from _deeper(inside, (*path, ("cell", place)), depth)
        for name in dict.fromkeys(names(value.__code__)):
            if name in value.__globals__ and value.__globals__[name] is not value:
                yield from _deeper(value.__globals__[name], (*path, ("global", name)), depth)
        for place, given in enumerate(value.__defaults__ or ()):
            yield from _deeper(given, (*path, ("default", place)), depth)
        if value.__kwdefaults__:
            raise NoPathError("a function has keyword arguments with defaults")
    elif isinstance(value, partial):
        yield from _deeper(value.func, (*path, ("attribute", "func")), depth)
        for place, given in enumerate(value.args):
            yield from _deeper(given, (*path, ("attribute", "args"), ("item", place)), depth)
        for name, given in value.keywords.items():
            yield from _deeper(given, (*path, ("attribute", "keywords"), ("item", name)), depth)
    elif isinstance(value, tuple | list):
        for place, given in enumerate(value):
            yield from _deeper(given, (*path, ("item", place)), depth)
    elif isinstance(value, dict):
        for name, given in value.items():
            yield from _deeper(given, (*path, ("item", name)), depth)
    elif isinstance(value, ModuleType | type | BuiltinFunctionType):
        return  # torch, math, and their functions
    else:
        raise NoPathError(f"a function reads an object of type {type(value).__name__}")


def _deeper(value: Any, path: Path, depth: int) -> Iterator[tuple[Path, Any]]:
    if depth == _DEPTH:
        raise NoPathError("functions are nested too deeply")
    if not of_torch(value):
        yield from _captures(value, path, depth + 1)


def follow(function: Any, path: Path) -> Any:
    """The value at the end of a path. Traced, so that the program reads it."""
    value = function
    for kind, key in path:
        if kind == "cell":
            value = value.__closure__[key].cell_contents
        elif kind == "global":
            value = value.__globals__[key]
        elif kind == "default":
            value = value.__defaults__[key]
        elif kind == "attribute":
            value = getattr(value, key)
        else:
            value = value[key]
    return value
