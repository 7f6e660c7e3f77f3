"""Operators of ``torch.library`` that belong to no variant, and the lock under which all are defined."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from attngen.runtime.operations.shared.sharding import refuse, register_waiting
from attngen.runtime.operations.shared.tags import TAGS


def namespace_of(package: str) -> str:
    """Return the operator namespace of a package; never one of torch's own."""
    return package if package.startswith("attngen") else f"attngen_{package}"


#: The namespace of operators that belong to no variant: that of the package which has this runtime.
NAMESPACE = namespace_of(__name__.partition(".")[0])

_others: dict[tuple[str, str], torch.library.Library] = {}

LOCK = threading.RLock()

BUSY = threading.local()  # whether a thread is defining operators


@contextmanager
def defining() -> Iterator[None]:
    """Say that this thread defines operators, for which torch looks meanwhile."""
    BUSY.defining = True
    try:
        yield
    finally:
        BUSY.defining = False


def define_once(
    name: str, schema: str, run: Callable[..., object], *, fake: Callable[..., object] | None = None,
    keys: Sequence[str] = ("CPU", "CUDA"), tags: Sequence[torch.Tag] = (),
) -> str:  # fmt: skip
    """Define an operator that belongs to no variant, unless it is, and return its namespace: that of the package which
    has this runtime. ``run`` serves the dispatch ``keys``. ``fake`` returns results of the right shapes, for tracing;
    without it ``run`` is traced."""
    namespace = NAMESPACE
    with LOCK:
        if (namespace, name) not in _others:
            library = _others[namespace, name] = torch.library.Library(namespace, "FRAGMENT")
            with defining():
                library.define(name + schema, tags=(*TAGS, *tags))
                for key in keys:
                    library.impl(name, run, key)
                if fake is not None:
                    torch.library.register_fake(f"{namespace}::{name}", fake, lib=library)
                    refuse(getattr(getattr(torch.ops, namespace), name).default, name)
    register_waiting()
    return namespace
