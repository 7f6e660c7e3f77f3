"""The operator of ``torch.library`` that selects scores: ``scores__topk`` in the namespace of this runtime.

No variant can have its name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attngen.runtime.operations.shared.library import define_once
from attngen.runtime.operations.topk.kernel import FIELDS, SELECTION, Topk

NAME = "scores__topk"
NAMES = (NAME,)


@torch.compiler.assume_constant_result
def defined() -> str:
    """Define the operator at the first use, and return its namespace."""
    return define_once(NAME, FIELDS.schema("Tensor"), _select, fake=_like)


def _select(*arguments: Any) -> Tensor:
    return SELECTION.run(Topk(*arguments))


def _like(*arguments: Any) -> Tensor:
    """A result of the right shape, for tracing."""
    call = Topk(*arguments)
    return call.scores.new_empty((*call.scores.shape[:-1], call.k), dtype=torch.int32)


def call(given: Topk) -> Tensor:
    """Call the operator with a checked call."""
    selected: Tensor = getattr(getattr(torch.ops, defined()), NAME)(*given)
    return selected
