"""Stubs in the place of serving engines: their modules, and what is imported while they stand there."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Protocol


class Stub(Protocol):
    """A module that stands in for an engine."""

    def modules(self) -> dict[str, ModuleType]: ...

    def install(self) -> dict[str, ModuleType]: ...


def module_tree(contents: Mapping[str, Mapping[str, Any]]) -> dict[str, ModuleType]:
    """Modules with these contents, each an attribute of its parent, which must be among them."""
    made = {name: ModuleType(name) for name in contents}
    for name, module in made.items():
        vars(module).update(contents[name])
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(made[parent], last, module)
    return made


@contextmanager
def imported_with(stub: Stub, *names: str) -> Iterator[Any]:
    """The last of some modules, all imported afresh while the stub is installed. Afterwards ``sys.modules`` holds what
    it held before."""
    before = {name: sys.modules.pop(name, None) for name in (*stub.modules(), *names)}
    stub.install()
    try:
        yield importlib.import_module(names[-1])
    finally:
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module
