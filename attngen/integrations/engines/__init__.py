"""Shared parts of the backends for serving engines: a layer's variant, its arguments, and a user's own mask.

Defined in ``attngen.integrations.engines.layers``.
"""

from attngen.integrations.engines.layers import (
    INVARIANT_SPLIT,
    MASK_VARIABLE,
    SPEC,
    Layer,
    Mask,
    Step,
    VariantCall,
    bound_of,
    bound_of_queries,
    card_reason,
    combination_reason,
    configured,
    float32_on,
    head_dim_reason,
    image_ranges,
    leading_decodes,
    paged_kinds,
    scale_of_requests,
)

__all__ = [
    "bound_of",
    "bound_of_queries",
    "Step",
    "Mask",
    "leading_decodes",
    "configured",
    "VariantCall",
    "Layer",
    "combination_reason",
    "head_dim_reason",
    "card_reason",
    "paged_kinds",
    "image_ranges",
    "scale_of_requests",
    "float32_on",
    "SPEC",
    "MASK_VARIABLE",
    "INVARIANT_SPLIT",
]
