"""The operator of ``torch.library`` that makes block masks: ``blocks__mask`` in the namespace of this runtime.

No variant can have its name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attngen.runtime.operations.block_mask.arguments import FIELDS, BlockLists, check
from attngen.runtime.operations.block_mask.kernel import BLOCK_MASKS
from attngen.runtime.operations.shared.library import define_once

NAME = "blocks__mask"
NAMES = (NAME,)


@torch.compiler.assume_constant_result
def defined() -> str:
    """Define the operator at the first use, and return its namespace."""
    return define_once(NAME, FIELDS.schema("Tensor"), _make, fake=_like)


def _make(*arguments: Any) -> Tensor:
    return BLOCK_MASKS.run(BlockLists(*arguments))


def _like(*arguments: Any) -> Tensor:
    """A mask of the right shape, for tracing."""
    call = BlockLists(*arguments)
    return call.indices.new_empty(check(call).shape, dtype=torch.bool)


def call(given: BlockLists) -> Tensor:
    """Call the operator with a checked call."""
    made: Tensor = getattr(getattr(torch.ops, defined()), NAME)(*given)
    return made
