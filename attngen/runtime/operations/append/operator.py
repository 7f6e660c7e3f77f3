"""The operator of ``torch.library`` that appends to caches: ``kv__append`` in the namespace of this runtime.

It returns nothing, and says of the caches and of the rotated queries that it writes them. No variant can have its name.
"""

from __future__ import annotations

from typing import Any

import torch

from attngen.runtime.operations.append.arguments import FIELDS, Append
from attngen.runtime.operations.append.path import APPEND
from attngen.runtime.operations.shared.library import define_once

NAME = "kv__append"
NAMES = (NAME,)


@torch.compiler.assume_constant_result
def defined() -> str:
    """Define the operator at the first use, and return its namespace."""
    return define_once(NAME, FIELDS.schema("()"), _append, fake=lambda *arguments: None)


def _append(*arguments: Any) -> None:
    call = Append(*arguments)
    APPEND.run(call if call.q is not None else call._replace(q=call.q_out))


def call(given: Append) -> None:
    """Call the operator. ``q`` is left out where queries are rotated in place: no tensor is given twice."""
    if given.q_out is given.q:
        given = given._replace(q=None)
    getattr(getattr(torch.ops, defined()), NAME)(*given)
