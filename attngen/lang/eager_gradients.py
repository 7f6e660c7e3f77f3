"""Gradients of eager values by the derivatives that kernels compute.

Autograd of torch's functions would multiply an infinite derivative, as that of a root at 0, by the 0 of an argument
that ``min``, ``max``, a branch or a hidden pair does not choose: NaN. The derivative of an expression selects what is
not chosen away, and a gradient of 0 stays 0 whatever it is multiplied by.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attngen.lang.derivative import differentiate, differentiate_loads
from attngen.lang.ir import Expr, names
from attngen.lang.ir import tensors as tensors_of

#: Evaluates an expression over names, tensors and a guard.
Evaluate = Callable[[Expr, Mapping[str, Any], Mapping[str, Tensor], Tensor | None], Tensor]


@dataclass(frozen=True, eq=False)
class Differentiable:
    """An expression as a function of tensors: the ``names`` that it reads as variables, then the ``tensors`` that it
    loads from, then, if it is ``guarded``, where its value is wanted. ``numbers`` are its other variables."""

    expr: Expr
    names: tuple[str, ...]
    tensors: tuple[str, ...]
    guarded: bool
    numbers: Mapping[str, Any]
    #: With checks of indices, and without.
    value: Evaluate
    unchecked: Evaluate

    @classmethod
    def apply(
        cls, expr: Expr, env: Mapping[str, Any], tensors: Mapping[str, Tensor], guard: Tensor | None,
        value: Evaluate, unchecked: Evaluate,
    ) -> Tensor:  # fmt: skip
        """Return the value of an expression, through which gradients flow to all float tensors."""
        names = tuple(name for name, given in env.items() if isinstance(given, Tensor))
        numbers = {name: given for name, given in env.items() if name not in names}
        self = cls(expr, names, tuple(tensors), guard is not None, numbers, value, unchecked)
        given = (*(env[name] for name in names), *tensors.values(), *(() if guard is None else (guard,)))
        result: Tensor = _Value.apply(self, *given)
        return result

    def given(self, tensors: Sequence[Tensor]) -> tuple[dict[str, Any], dict[str, Tensor], Tensor | None]:
        """Return variables, tensors and guard of a call."""
        rest = tensors[len(self.names) :]
        env = {**self.numbers, **dict(zip(self.names, tensors, strict=False))}
        return env, dict(zip(self.tensors, rest, strict=False)), tensors[-1] if self.guarded else None

    def gradients(self, above: Tensor, tensors: Sequence[Tensor], needed: Sequence[bool]) -> list[Tensor | None]:
        """Return the gradient of each tensor that one is needed of, which can be differentiated again."""
        env, loaded, guard = self.given(tensors)
        if guard is not None and torch.broadcast_shapes(guard.shape, above.shape) == above.shape:
            above = torch.where(guard, above, 0.0)

        def contribution(slope: Expr) -> Tensor:
            return product(above, self.unchecked(slope, env, loaded, guard))

        gradients: list[Tensor | None] = [None] * len(tensors)
        read = names(self.expr) | tensors_of(self.expr)
        for place, (name, tensor) in enumerate(zip((*self.names, *self.tensors), tensors, strict=False)):
            if not needed[place] or name not in read:
                continue
            if place < len(self.names):
                total = contribution(differentiate(self.expr, name)).sum_to_size(tensor.shape)
            else:
                total = torch.zeros(tensor.shape, dtype=above.dtype, device=above.device)
                for load, slope in differentiate_loads(self.expr, name):
                    indices = [self.unchecked(index, env, loaded, guard) for index in load.indices]
                    total = _added(total, indices, contribution(slope))
            gradients[place] = total.to(tensor.device, tensor.dtype)
        return gradients


def product(above: Tensor, slope: Tensor) -> Tensor:
    """Return a gradient times a derivative, 0 where the gradient is 0, as kernels do."""
    return above * torch.where((above != 0) | torch.isfinite(slope), slope, 0.0)


class _Value(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(expression: Differentiable, *tensors: Tensor) -> Tensor:
        return expression.value(expression.expr, *expression.given(tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.expression, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.expression.gradients(above, ctx.saved_tensors, ctx.needs_input_grad[1:])


def _added(total: Tensor, indices: Sequence[Tensor], contributions: Tensor) -> Tensor:
    """Return a gradient of elements with contributions to those at ``indices`` added; none lies beyond its extents."""
    if not indices:
        return total + contributions.sum()
    if not total.numel():
        return total
    contributions, *places = torch.broadcast_tensors(contributions, *indices)
    inside = torch.ones_like(contributions, dtype=torch.bool)
    for place, extent in zip(places, total.shape, strict=True):
        inside = inside & (place >= 0) & (place < extent)
    within = tuple(torch.where(inside, place, 0) for place in places)
    return total.index_put(within, torch.where(inside, contributions, 0.0), accumulate=True)
