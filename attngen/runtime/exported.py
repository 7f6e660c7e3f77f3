"""attngen's namespaces in ``torch.ops``, whose operators are defined when they are first named.

So a program that was exported in another process loads after ``import attngen``. Torch is not imported for that: where
it is not there yet, the namespaces are made known as soon as it is.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from attngen.operations import OPERATIONS

_PREFIX = "attngen"


def install() -> None:
    """Make the namespaces known to torch, now or when it is imported."""
    if not _known_to_torch() and not any(isinstance(finder, _WhenTorchIs) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WhenTorchIs())


class _WhenTorchIs:
    """Finds no module, and notices that torch has made ``torch.ops``. It stays in ``sys.meta_path``, over which Python
    iterates while it is asked."""

    def __init__(self) -> None:
        self._done = False

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> None:
        if not self._done and fullname.startswith("torch."):
            self._done = _known_to_torch()


def _known_to_torch() -> bool:
    module = sys.modules.get("torch._ops")
    ops = getattr(module, "ops", None)
    if ops is None:
        return False
    ops.__dict__.setdefault("__getattr__", _namespace)  # of a module, so that Python asks it for missing names
    return True


def _namespace(name: str) -> Any:
    if not name.startswith(_PREFIX):
        raise AttributeError(name)
    torch_ops = sys.modules["torch._ops"]

    class Namespace(torch_ops._OpNamespace):  # type: ignore[name-defined]
        """A namespace that defines the operators of a variant when one of them is first named."""

        def __getattr__(self, operator: str) -> Any:
            try:
                return super().__getattr__(operator)
            except AttributeError:
                if operator.startswith("_") or not _define(name, operator):
                    raise
            return super().__getattr__(operator)

    Namespace.__module__ = torch_ops._OpNamespace.__module__  # which saved programs give with each operator
    made = Namespace(name)
    setattr(torch_ops.ops, name, made)
    return made


def _define(namespace: str, operator: str) -> bool:
    """Define an operator, and return whether that was done; not while one is being defined, when torch looks for it.

    Raises AttributeError, and warns, with what to do if this process does not know the variant: torch asks whether
    there is an operator, and drops the error.
    """
    from attngen.errors import AttngenError
    from attngen.runtime.operations.attention import operators
    from attngen.runtime.operations.shared import library

    for operation in OPERATIONS if namespace == library.NAMESPACE else ():
        for name in operation.operators:
            module = import_module(f"attngen.{operation.folder}.{name}")
            if operator in module.NAMES:
                return bool(module.defined() == namespace)
    try:
        return operators.define_named(namespace, operator)
    except AttngenError as error:
        message = f"torch.ops has no operator {namespace}::{operator}: {error}"
        warnings.warn(message, RuntimeWarning, stacklevel=4)
        raise AttributeError(message) from None
