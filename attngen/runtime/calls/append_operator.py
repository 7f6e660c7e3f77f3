"""The operator of ``torch.library`` that appends to caches: ``kv__append`` in the namespace of this runtime.

It returns nothing, and says of the caches and of the rotated queries that it writes them. No variant can have its name.
"""

from __future__ import annotations

from typing import Any

import torch

from attngen.runtime.calls.operators import define_once
from attngen.runtime.helpers.append_run import run

NAME = "kv__append"

_SCHEMA = (
    "(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor? cache_seqlens, Tensor? page_table, "
    "Tensor? slots, Tensor? batch_index, Tensor? cu_seqlens, str page_layout, Tensor? q, Tensor(c!)? q_out, "
    "Tensor? rotary_cos, Tensor? rotary_sin, bool rotary_interleaved, Tensor? rotary_offsets, Tensor? k_descale=None, "
    "Tensor? v_descale=None) -> ()"
)


@torch.compiler.assume_constant_result
def defined() -> str:
    """Define the operator at the first use, and return its namespace."""
    return define_once(NAME, _SCHEMA, _append, fake=lambda *arguments: None)


def _append(*arguments: Any) -> None:
    q, q_out = arguments[10:12]
    given = [*arguments[:10], q_out if q is None else q, *arguments[11:]]
    run(*given)


def call(*arguments: Any) -> None:
    """Call the operator. ``q`` is None where queries are rotated in place: no tensor is given twice."""
    getattr(getattr(torch.ops, defined()), NAME)(*arguments)
