"""Sinks in plain torch: their values, and their gradients from what a backward computes for each row anyway.

With p = exp(sink − LSE), where the log-sum-exp includes the sink, and D = rowsum(dO ∘ O) − dLSE, the gradient of a sink
is the sum of −p · D over the rows of its head: a sink has no value, so that of P (dP − D) only D is left.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from attngen.lang.derivative import ONE, differentiate_loads
from attngen.lang.eager import evaluate
from attngen.lang.eager_gradients import product
from attngen.lang.ir import Expr, Load, Type, Var, names
from attngen.lang.variant import Variant
from attngen.runtime.arguments.checked import Call
from attngen.runtime.arguments.debug import limits_of


def sinks(call: Call, compute: torch.dtype, *, checked: bool = True) -> Tensor:
    """Return the sink of each head of each sequence, (batch, heads); autograd flows to the variant's tensors.

    Raises IndexError as the reference does, unless nothing is ``checked``.
    """
    assert call.variant.sink is not None
    tensors = {n: t.to(compute) if t.is_floating_point() else t for n, t in call.tensors.items()}
    return _of_heads(call.variant.sink, call, tensors, call.scalars, compute, checked=checked)


def sinks_of_kernels(call: Call, tensors: Mapping[str, Tensor], scalars: Mapping[str, object]) -> Tensor:
    """The sinks as kernels see them, (batch, heads) in float32: nothing is checked, nothing waits for a GPU.

    ``tensors`` and ``scalars`` are the variant's own, which a prepared call does not keep.
    """
    assert call.variant.sink is not None
    return _of_heads(call.variant.sink, call, tensors, scalars, torch.float32, checked=False)


def learned(variant: Variant) -> tuple[str, ...]:
    """Return the tensors that the sink reads and that get a gradient."""
    read = variant.uses(variant.sink)[1] if variant.sink is not None else frozenset()
    return tuple(tensor.name for tensor in variant.tensors if tensor.grad and tensor.name in read)


def add_gradients(call: Call, lse: Tensor, delta: Tensor, gradients: Mapping[str, Tensor]) -> None:
    """Add to the float32 ``gradients`` of the variant's tensors what these owe to the sink, always in one order.

    ``lse`` is the forward's and ``delta`` D of each row, both in the shape of the log-sum-exp. Enqueues a few small
    operations, and waits for nothing.
    """
    variant = call.variant
    if variant.sink is None or not learned(variant):
        return
    of_heads = _gradients_of_heads(call, lse, delta)
    for name in learned(variant):
        for load, derivative in differentiate_loads(variant.sink, name):
            contribution = of_heads
            if derivative != ONE:
                slope = _of_heads(derivative, call, call.tensors, call.scalars, torch.float32, checked=False)
                contribution = product(of_heads, slope)
            _add(call, load, contribution, gradients[name])


def _gradients_of_heads(call: Call, lse: Tensor, delta: Tensor) -> Tensor:
    """Return the gradient of the sink of each head of each sequence, (batch, heads)."""
    sink = sinks_of_kernels(call, call.tensors, call.scalars)
    if call.order != "thd":
        return _of_rows(sink[:, :, None], lse, delta).sum(dim=2)
    sequence, belongs = _sequences_of_rows(call)
    gradients = torch.where(belongs, _of_rows(sink[sequence].T, lse, delta), 0.0)
    if not _depends_on_sequence(call.variant):  # all sequences have the same: the first may stand for the others
        alone = gradients.new_zeros(call.batch, call.heads)
        alone[:1] = gradients.sum(dim=1)
        return alone
    return gradients.new_zeros(call.batch, call.heads).index_put_((sequence,), gradients.T, accumulate=True)


def without_keys(call: Call) -> tuple[Tensor, Tensor]:
    """Return out and the log-sum-exp of a call that has queries and no keys, which a sink makes: 0, and the sink."""
    out = torch.zeros(call.out_shape(), dtype=call.out_dtype, device=call.device)
    sink = sinks_of_kernels(call, call.tensors, call.scalars)
    lse = torch.empty_strided(call.lse_shape(), call.lse_strides(), dtype=torch.float32, device=call.device)
    lse.fill_(-math.inf)
    own = lse[..., 0] if call.variant.max_logits else lse
    if call.order != "thd":
        own.copy_(sink[:, :, None])
    elif call.batch:
        own.copy_(sink[_sequences_of_rows(call)[0]].T)
    return out, lse


def _sequences_of_rows(call: Call) -> tuple[Tensor, Tensor]:
    """Sequence of each packed row, and whether it has one; rows after the last sequence get the first."""
    assert call.cu_seqlens_q is not None
    row = torch.arange(call.total_q, device=call.device, dtype=torch.int32)
    sequence = torch.searchsorted(call.cu_seqlens_q[1:], row, right=True)
    belongs = sequence < call.batch
    return torch.where(belongs, sequence, 0), belongs


def _of_rows(sink: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """Return −p · D of each row; a row without key and sink has none."""
    p = torch.exp((sink - lse).clamp(max=0.0))  # at most 1, however the log-sum-exp was rounded
    return torch.where(lse == -math.inf, 0.0, -p * delta)


def _depends_on_sequence(variant: Variant) -> bool:
    assert variant.sink is not None
    return "b" in names(variant.sink)


def _of_heads(
    expr: Expr,
    call: Call,
    tensors: Mapping[str, Tensor],
    scalars: Mapping[str, object],
    compute: torch.dtype,
    *,
    checked: bool,
) -> Tensor:
    """Return the value of an expression over batch and head, (batch, heads)."""
    h = torch.arange(call.heads, device=call.device)
    env = {
        **scalars,
        "b": torch.arange(call.batch, device=call.device)[:, None],
        "h": h,
        "hk": h // max(call.heads // max(call.kv_heads, 1), 1),
        "heads": call.heads,
        "kv_heads": call.kv_heads,
    }
    value = evaluate(expr, env, tensors, compute, checked=checked, limits=limits_of(call) if checked else None)
    return value.to(call.device).broadcast_to(call.batch, call.heads)


def _add(call: Call, load: Load, contribution: Tensor, gradient: Tensor) -> None:
    """Add the contribution of each head of each sequence to the element that it reads."""
    if not load.indices:
        gradient += contribution.sum()
        return
    declared = call.variant.tensor(load.tensor)
    if load.indices == (Var("h", Type.INT),) and declared.shape == ("h",):
        gradient += contribution.sum(dim=0)
        return
    indices = [_index(call, index) for index in load.indices]
    inside = torch.ones_like(contribution, dtype=torch.bool)
    for index, extent in zip(indices, gradient.shape, strict=True):
        inside &= (index >= 0) & (index < extent)
    places = tuple(torch.where(inside, index, 0) for index in indices)
    gradient.index_put_(places, torch.where(inside, contribution, 0.0), accumulate=True)


def _index(call: Call, index: Expr) -> Tensor:
    return _of_heads(index, call, call.tensors, call.scalars, torch.float32, checked=False)
