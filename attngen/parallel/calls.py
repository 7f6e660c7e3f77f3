"""Calls of a plan as functions that autograd differentiates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attngen.parallel.stages import CallOptions
from attngen.runtime.arguments.torch_state import recordable, recording

#: All plans by their numbers, by which compiled programs name them.
plans_by_number: WeakValueDictionary[str, Any] = WeakValueDictionary()


@dataclass(frozen=True, eq=False)
class ParallelCall:
    """A call but for its tensors: those of the variant follow q, k and v in the order of ``names``."""

    plan: Any
    layer: Any
    options: CallOptions
    numbers: Mapping[str, Any]
    names: tuple[str, ...]

    def values(self, tensors: Sequence[Tensor]) -> dict[str, Any]:
        """Scalars and tensors of the variant that the caller passed."""
        return {**self.numbers, **dict(zip(self.names, tensors, strict=True))}

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, tensors: Sequence[Tensor], *, lse: bool, keep: bool
    ) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        """Output, log-sum-exp, and what the backward gets beside them."""
        work = self.plan.rank_attention(self.layer)
        arguments = self.plan.arguments(self.layer, q, self.values(tensors))
        return work.forward(q, k, v, arguments, self.options, lse=lse, keep=keep)

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, tensors: Sequence[Tensor], out: Tensor, lse: Tensor,
        kept: Sequence[Tensor], dout: Tensor | None, dlse: Tensor | None, learned: Sequence[bool],
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor | None]]:  # fmt: skip
        """Gradients of q, k, v, and of the tensors that are ``learned``."""
        work = self.plan.rank_attention(self.layer)
        with recording():
            own_tensors = (recordable(x).detach() for x in tensors)
            leaves = [x.requires_grad_(wanted) for x, wanted in zip(own_tensors, learned, strict=True)]
            arguments = self.plan.arguments(self.layer, q, self.values(leaves))
        asked = [name for name, value in arguments.items() if isinstance(value, Tensor) and value.requires_grad]
        plain = {name: x.detach() if isinstance(x, Tensor) else x for name, x in arguments.items()}
        dq, dk, dv, own = work.backward(q, k, v, out, lse, dout, dlse, kept, plain, asked, self.options)
        gradients: list[Tensor | None] = [None] * len(leaves)
        wanted = [i for i, each in enumerate(learned) if each]
        if wanted:
            each = torch.autograd.grad(
                [arguments[name] for name in asked], [leaves[i] for i in wanted],
                [own[name].to(arguments[name].dtype) for name in asked], allow_unused=True,
            )  # fmt: skip
            for i, gradient in zip(wanted, each, strict=True):
                gradients[i] = torch.zeros_like(leaves[i]) if gradient is None else gradient
        return dq, dk, dv, gradients


def attend(
    call: ParallelCall, q: Tensor, k: Tensor, v: Tensor, tensors: Sequence[Tensor], *, return_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Output and log-sum-exp, (batch, rows, heads, head_dim) and (batch, heads, rows)."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, *tensors)):
        out, lse = _ParallelAttention.apply(call, q, k, v, *tensors)
        return out, lse if return_lse else None
    out, lse, _ = call.forward(q, k, v, tensors, lse=return_lse, keep=False)
    return out, lse


class _ParallelAttention(torch.autograd.Function):
    """Attention by a plan, and its gradients."""

    @staticmethod
    def forward(
        ctx: Any, call: ParallelCall, q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        out, lse, kept = call.forward(q, k, v, tensors, lse=True, keep=True)
        assert lse is not None
        ctx.call, ctx.count = call, len(kept)
        ctx.save_for_backward(out, lse, q, k, v, *kept, *tensors)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        out, lse, q, k, v, *tensors = ctx.saved_tensors
        kept, own = tensors[: ctx.count], tensors[ctx.count :]
        dq, dk, dv, gradients = ctx.call.backward(q, k, v, own, out, lse, kept, dout, dlse, ctx.needs_input_grad[4:])
        return None, dq, dk, dv, *gradients
