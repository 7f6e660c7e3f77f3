"""The operator of ``torch.library`` that selects scores: ``scores__topk`` in the namespace of this runtime.

No variant can have its name. Its result is a new tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attngen.runtime.operations.shared.library import define_once
from attngen.runtime.operations.topk.kernel import SELECTION, Topk

NAME = "scores__topk"
NAMES = (NAME,)

_SCHEMA = (
    "(Tensor scores, int k, Tensor? lengths=None, Tensor? page_table=None, Tensor? cu_seqlens_q=None, "
    "int? page_size=None) -> Tensor"
)


@torch.compiler.assume_constant_result
def defined() -> str:
    """Define the operator at the first use, and return its namespace."""
    return define_once(NAME, _SCHEMA, _select, fake=_like)


def _select(*arguments: Any) -> Tensor:
    return SELECTION.run(Topk(*arguments))


def _like(*arguments: Any) -> Tensor:
    """A result of the right shape, for tracing."""
    call = Topk(*arguments)
    return call.scores.new_empty((*call.scores.shape[:-1], call.k), dtype=torch.int32)


def call(given: Topk) -> Tensor:
    """Call the operator with a checked call."""
    selected: Tensor = getattr(getattr(torch.ops, defined()), NAME)(*given[:-1])
    return selected
