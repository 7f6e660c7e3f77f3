"""Results that do not depend on their inputs, though a caller may still ask for a gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx


class _Constant(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, result: Tensor, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return result

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *(torch.zeros_like(tensor) for tensor in ctx.saved_tensors))


def with_zero_gradients(results: Sequence[Tensor], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Results of which those that depend on no input, as of an empty call, have gradients of zero.

    Autograd must have recorded the others (``torch_state.recording``): they keep their gradients.
    """
    return tuple(result if result.requires_grad else _Constant.apply(result, *inputs) for result in results)
