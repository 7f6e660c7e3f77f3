"""Gradients of a variant's own tensors: which of them kernels compute."""

from __future__ import annotations

from attngen.lang.variant import Variant
from attngen.plan.model import Plan


def differentiable(plan: Plan) -> tuple[str, ...]:
    """Return the tensors whose gradients the kernels of a plan compute."""
    return differentiable_of(plan.variant)


def differentiable_of(variant: Variant) -> tuple[str, ...]:
    """Return the variant's tensors that get a gradient through the score; sinks get theirs after the kernels."""
    read = variant.uses(variant.score)[1] if variant.score is not None else frozenset()
    return tuple(tensor.name for tensor in variant.tensors if tensor.grad and tensor.name in read)
