"""The operator of ``torch.library`` that merges two results: ``parts__merge`` in the namespace of this runtime.

No variant can have its name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attngen.runtime.operations.merge.arguments import FIELDS, Merge, check
from attngen.runtime.operations.merge.kernel import MERGES
from attngen.runtime.operations.shared.library import define_once

NAME = "parts__merge"
NAMES = (NAME,)


@torch.compiler.assume_constant_result
def defined() -> str:
    """Define the operator at the first use, and return its namespace."""
    return define_once(NAME, FIELDS.schema("(Tensor, Tensor)"), _merge, fake=_like)


def _merge(*arguments: Any) -> tuple[Tensor, Tensor]:
    out, lse = MERGES.run(Merge(*arguments))
    return out.contiguous(), lse.contiguous()


def _like(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Results of the right shapes, for tracing."""
    call = Merge(*arguments)
    sizes = check(call)
    return call.out_0.new_empty(sizes.out), call.lse_0.new_empty(sizes.lse)


def call(given: Merge) -> tuple[Tensor, Tensor]:
    """Call the operator with a checked call."""
    merged: tuple[Tensor, Tensor] = getattr(getattr(torch.ops, defined()), NAME)(*given)
    return merged
