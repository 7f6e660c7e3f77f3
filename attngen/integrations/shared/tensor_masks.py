"""Masks that are known as tensors only, bools that allow or numbers that are added, and the variants that read them."""

from __future__ import annotations

import torch
from torch import Tensor

from attngen.integrations.shared.arguments import contiguous_last
from attngen.integrations.shared.choice import VariantCandidate

#: Name of a bias's dtype in variants. The reference takes that of float32 for float64 inputs.
BIAS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp32"}


def full_size(mask: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A mask that broadcasts to ``shape`` (batch, heads, queries, keys), contiguous along the keys."""
    return contiguous_last(mask.expand(shape))


def candidate_of(mask: Tensor, shape: tuple[int, ...], *, cap: float | None = None) -> VariantCandidate:
    """The variant of a mask of four dimensions that broadcasts to ``shape`` (batch, heads, queries, keys).

    With a ``cap`` on logits, bools must be alike for all heads.
    """
    capped = {} if cap is None else {"cap": cap}
    if mask.dtype != torch.bool:
        prefix = "softcap_" if capped else ""
        return VariantCandidate(f"{prefix}bias_{BIAS[mask.dtype]}", {**capped, "bias": full_size(mask, shape)})
    if mask.shape[1] > 1:
        return VariantCandidate("allowed_by_head", {"allowed": full_size(mask, shape)})
    allowed = full_size(mask, (shape[0], 1, *shape[2:]))[:, 0]
    return VariantCandidate("allowed_softcap" if capped else "allowed", {"allowed": allowed, **capped})
