"""Kernels of clusters compile with whatever else a spec says about the order, the tile, the softmax and the store."""

from __future__ import annotations

from attngen.render import render
from tests.compile.frontend import to_ptx
from tests.plan.specs import planned
from tests.sampling import sampled


@sampled(
    order=("natural", "longest_first"),
    epilogue=("direct", "staged"),
    softmax=("exact_max", "fixed_reference", "lazy"),
    variant=("sliding_window", "packed_documents", "causal_sink"),
)
def test_pairs_of_blocks_compile(order: str, epilogue: str, softmax: str, variant: str) -> None:
    fields = {"order": order, "epilogue": epilogue, "softmax": softmax, "warps": "{cluster: 2}"}
    plan = planned(variant, backend="cuda", head_dim=128, **fields)
    assert plan.structure.cluster == 2
    assert ".entry" in to_ptx(render(plan))
