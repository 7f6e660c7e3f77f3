"""Side effects of a function: names that it assigns, containers that it changes, output that it prints.

A function is traced once, whatever it does at each call of a program, so that such effects would be lost.
"""

from __future__ import annotations

import builtins
import dis
from collections.abc import Callable, Iterator
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor

from attngen.integrations.flex.identity import names, of_torch

#: Instructions that assign, by what they assign to.
_GLOBALS = ("STORE_GLOBAL", "DELETE_GLOBAL")
_CELLS = ("STORE_DEREF", "DELETE_DEREF")

_ASSIGNING = frozenset(dis.opmap[name] for name in (*_GLOBALS, *_CELLS) if name in dis.opmap)

#: Depth to which captured functions and objects are inspected, and the longest container that is compared.
_DEPTH, _LONGEST = 4, 4096


def effect_of(function: Callable[..., Any]) -> tuple[Any, str, int | None] | None:
    """The function, a sentence and the line of a side effect of its code or that of a captured one."""
    for one in _functions(function, 0, set()):
        for code in _codes(one.__code__):
            if _ASSIGNING.isdisjoint(code.co_code[::2]) and "print" not in code.co_names:
                continue
            line = None
            for step in dis.get_instructions(code):
                line = _line(step) or line
                name = step.argval
                if step.opname in _GLOBALS:
                    return one, f"it assigns the global '{name}', which a trace does only once", line
                if step.opname in _CELLS and name in one.__code__.co_freevars:
                    return one, f"it assigns '{name}' of the function around it, which a trace does only once", line
                prints = one.__globals__.get("print", builtins.print) is builtins.print
                if step.opname == "LOAD_GLOBAL" and name == "print" and prints:
                    return one, "it prints, which a trace does only once", line
    return None


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _line(step: dis.Instruction) -> int | None:
    """The line of an instruction, by any version of Python."""
    number = getattr(step, "line_number", None)
    if number is None and step.starts_line is not None and not isinstance(step.starts_line, bool):
        number = step.starts_line
    return number


def _captured(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield name and value of each input of a function: cells, globals, defaults, and the object of a method."""
    if isinstance(function, partial):
        yield "func", function.func
        yield from function.keywords.items()
        yield from (("argument", one) for one in function.args)
    elif isinstance(function, MethodType):
        yield "self", function.__self__
        yield "func", function.__func__
    elif isinstance(function, FunctionType) and not of_torch(function):
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                yield name, cell.cell_contents
            except ValueError:  # not filled yet
                continue
        for name in names(function.__code__):
            if name in function.__globals__:
                yield name, function.__globals__[name]
        yield from (("default", one) for one in function.__defaults__ or ())
    elif isinstance(function, tuple | list):
        yield from (("item", one) for one in function[:_LONGEST])
    elif callable(function) and hasattr(function, "__dict__") and not isinstance(function, type | ModuleType):
        call = vars(type(function)).get("__call__")
        if isinstance(call, FunctionType):
            yield "func", call


def _functions(value: Any, depth: int, seen: set[int]) -> Iterator[FunctionType]:
    if id(value) in seen or depth > _DEPTH or isinstance(value, Tensor):
        return
    seen.add(id(value))
    if isinstance(value, FunctionType) and not of_torch(value):
        yield value
    for _, one in _captured(value):
        yield from _functions(one, depth + 1, seen)


class Kept:
    """Containers and objects that a function captures, as they were; what changed is told, and put back."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._lists: list[tuple[str, list[Any], list[Any]]] = []
        self._maps: list[tuple[str, Any, Any]] = []
        self._look(function, "", 0, set())

    def _look(self, value: Any, name: str, depth: int, seen: set[int]) -> None:
        if id(value) in seen or depth > _DEPTH or isinstance(value, Tensor | torch.dtype | torch.device | type):
            return
        seen.add(id(value))
        if isinstance(value, list) and len(value) <= _LONGEST:
            self._lists.append((f"the list '{name}'", value, list(value)))
        elif isinstance(value, dict | set) and len(value) <= _LONGEST:
            self._maps.append((f"the {type(value).__name__} '{name}'", value, value.copy()))
        elif not callable(value) and not isinstance(value, ModuleType) and hasattr(value, "__dict__"):
            self._maps.append((f"an attribute of '{name}'", vars(value), dict(vars(value))))
        for inner, one in _captured(value):
            self._look(one, name if inner in ("item", "func") else inner, depth + 1, seen)

    def changed(self) -> str | None:
        """Put everything back, and return what was changed, or None."""
        changed = None
        for name, value, before in self._lists:
            if len(value) != len(before) or any(a is not b for a, b in zip(value, before, strict=True)):
                value[:] = before
                changed = changed or name
        for name, value, before in self._maps:
            if isinstance(value, set):
                same = value == before
            else:
                same = value.keys() == before.keys() and all(value[key] is before[key] for key in before)
            if not same:
                value.clear()
                value.update(before)
                changed = changed or name
        return changed
