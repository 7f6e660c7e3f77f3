"""Contexts of autograd's functions, as far as rules of attention use them; read by type checkers alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Context(Protocol):
    """Autograd's memory of one call. Functions also keep values of their own in it."""

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        """The tensors that were saved, None for none."""

    @property
    def needs_input_grad(self) -> tuple[bool, ...]:
        """Whether the gradient of each input is asked for."""

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Save tensors for the backward."""

    def save_for_forward(self, *tensors: Tensor | None) -> None:
        """Save tensors for tangents."""

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        """Mark outputs that have no derivative."""

    def set_materialize_grads(self, value: bool) -> None:
        """Choose whether absent gradients arrive as zeros."""


class VmapInfo(Protocol):
    """Facts about a ``vmap`` that asks for a rule."""

    @property
    def batch_size(self) -> int:
        """Extent of the axis that it maps over."""
