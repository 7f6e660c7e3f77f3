"""The operator of ``torch.library`` that appends to caches: ``kv__append`` in the namespace of this runtime.

It returns nothing, and says of the caches and of the rotated queries that it writes them. No variant can have its name.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from attngen.runtime.append_run import run
from attngen.runtime.operators import TAGS, namespace_of

NAME = "kv__append"

_SCHEMA = (
    "(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor? cache_seqlens, Tensor? page_table, "
    "Tensor? slots, Tensor? batch_index, Tensor? cu_seqlens, str page_layout, Tensor? q, Tensor(c!)? q_out, "
    "Tensor? rotary_cos, Tensor? rotary_sin, bool rotary_interleaved, Tensor? rotary_offsets, Tensor? k_descale=None, "
    "Tensor? v_descale=None) -> ()"
)

_libraries: dict[str, torch.library.Library] = {}
_lock = threading.Lock()


@torch.compiler.assume_constant_result
def defined() -> str:
    """Define the operator at the first use, and return its namespace: that of the package which has this runtime."""
    namespace = namespace_of(__name__.partition(".")[0])
    with _lock:
        if namespace not in _libraries:
            library = _libraries[namespace] = torch.library.Library(namespace, "FRAGMENT")
            library.define(NAME + _SCHEMA, tags=TAGS)
            for key in ("CPU", "CUDA"):
                library.impl(NAME, _append, key)
            torch.library.register_fake(f"{namespace}::{NAME}", lambda *arguments: None, lib=library)
    return namespace


def _append(*arguments: Any) -> None:
    q, q_out = arguments[10:12]
    given = [*arguments[:10], q_out if q is None else q, *arguments[11:]]
    run(*given)


def call(*arguments: Any) -> None:
    """Call the operator. ``q`` is None where queries are rotated in place: no tensor is given twice."""
    getattr(getattr(torch.ops, defined()), NAME)(*arguments)
