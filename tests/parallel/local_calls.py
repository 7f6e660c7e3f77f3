"""The calls that ranks make over their rows and all keys, one after the other in one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import attngen
from attngen.parallel import Plan
from attngen.parallel.called import called
from attngen.parallel.local import local_variant
from attngen.parallel.one_row import as_one_row, documents
from attngen.variants import PythonVariant


def by_tiles(plan: Plan) -> Plan:
    """The plan whose calls read where their rows lie, in however few runs these are."""
    (layer,) = plan.layers
    packed = plan.cu_seqlens is not None
    variant = as_one_row(layer.stated) if packed else layer.stated
    values = {**layer.values, **documents(plan.cu_seqlens)} if packed else layer.values
    own = local_variant(variant, "tiles", layer.sent.keys)
    kept = {"local": own, "called": called(own.variant)}
    return replace(plan, layers=(replace(layer, in_segments=False, variant=variant, values=values, kept=kept),))


def variant_of(plan: Plan) -> PythonVariant:
    """The variant that all ranks call."""
    variant = plan.called()
    assert isinstance(variant, PythonVariant)
    return variant


def call(plan: Plan, rank: int, q: Tensor, k: Tensor, v: Tensor, values: dict[str, Any], **options: Any) -> Any:
    """The result of one rank; ``q`` holds its rows, ``k`` and ``v`` those of all ranks, each with a batch axis."""
    layer = plan.layers[0]
    arguments = plan.arguments(layer, q, values, rank=rank)
    return attngen.attention(q, k, v, variant=plan.called(), **options, **arguments)


def gradients(
    plan: Plan, whole: list[Tensor], weight: Tensor, values: dict[str, Any], **options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output and gradients of q, k and v of all ranks together: rows in their places, those of keys added up."""
    q, k, v = whole
    out, dq = torch.empty_like(weight), torch.empty_like(q)
    dk, dv = (torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device) for x in (k, v))
    for rank in range(plan.ranks):
        rows = plan.rows(rank, device=q.device)
        leaves = [x.detach().clone().requires_grad_() for x in (q[:, rows], k, v)]
        ours = call(plan, rank, leaves[0], leaves[1], leaves[2], values, **options)
        grads = torch.autograd.grad(ours, leaves, weight[:, rows])
        out[:, rows], dq[:, rows] = ours.detach(), grads[0]
        dk += grads[1]
        dv += grads[2]
    return out, dq, dk, dv
