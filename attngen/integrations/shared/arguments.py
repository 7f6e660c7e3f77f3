"""Arguments of drop-ins: tensors, their layout, and those that no kernel serves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from attngen.errors import CallError, NoKernelError


def tensor(name: str, value: Any) -> Tensor:
    """Check that an argument is a tensor, and return it. Raises CallError."""
    if not isinstance(value, Tensor):
        raise CallError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    return value


def contiguous_rows(**tensors: Tensor) -> list[Tensor]:
    """The tensors with a contiguous last dimension, copied only if need be, as flash-attn does."""
    rows = list(tensors.values())
    for place, (name, given) in enumerate(tensors.items()):
        if tensor(name, given).stride(-1) != 1:
            rows[place] = given.contiguous()
    return rows


def contiguous_last(given: Tensor) -> Tensor:
    """A tensor whose last dimension is contiguous, or of one element; copied only if need be."""
    return given if given.stride(-1) == 1 or given.shape[-1] == 1 else given.contiguous()


def refused(argument: str, reason: str) -> NoKernelError:
    """Make the error for an argument that no kernel serves."""
    return NoKernelError(f"{argument} is not supported: {reason}")


def refuse(reasons: Mapping[str, str], **arguments: Any) -> None:
    """Raise NoKernelError for the first argument that is given, which no kernel serves."""
    for name, value in arguments.items():
        if value is not None and value is not False:
            raise refused(name, reasons[name])


def without_gradient(out: Tensor, *inputs: Tensor, reason: str) -> Tensor:
    """Make a backward pass through ``out`` raise an error, if any input asks for a gradient."""
    marked: Tensor = _NoGradient.apply(out, reason, *inputs)
    return marked


class _NoGradient(torch.autograd.Function):
    """The first argument itself, which depends on the others and cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, reason: str, *inputs: Tensor) -> Tensor:
        ctx.reason = reason
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise CallError(ctx.reason)
