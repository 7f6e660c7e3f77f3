"""Results that do not depend on their inputs, though a caller may still ask for a gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class _Constant(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, lse: Tensor | None, *inputs: Tensor) -> tuple[Tensor, Tensor | None]:
        ctx.save_for_backward(*inputs)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return (None, None, *(torch.zeros_like(tensor) for tensor in ctx.saved_tensors))


def with_zero_gradients(out: Tensor, lse: Tensor | None, inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Return the results so that their gradients by the inputs exist and are zero, as those of an empty call are.

    A log-sum-exp that has gradients, as that of sinks alone has, keeps them.
    """
    if lse is not None and lse.requires_grad:
        return with_zero_gradients(out, None, inputs)[0], lse
    if out.requires_grad or not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in inputs):
        return out, lse
    anchored: tuple[Tensor, Tensor | None] = _Constant.apply(out, lse, *inputs)
    return anchored
