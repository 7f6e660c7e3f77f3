"""The plan of a kernel that scores keys for an index, in words."""

from __future__ import annotations

from collections.abc import Iterator

from attngen.plan.model import Plan


def facts(plan: Plan) -> Iterator[tuple[str, str]]:
    """Label and text of each line of its explanation."""
    element, row = plan.operands.q, plan.head_dim_qk
    yield "does", f"scores keys for an index, mask '{plan.variant.name}': sums over heads of w relu(q k), in float32"
    boxes = [one.box for launch in plan.launches for one in launch.arguments if one.of == "q" and one.box]
    yield "head_dim", f"{row}, and up to {max(box[2] for box in boxes)} heads, which share the keys"
    if plan.ragged_queries:
        yield "queries", "as many of each sequence, or packed: then blocks look up their sequence in cu_seqlens_q"
    yield "tile", f"{plan.tile_n} keys by {plan.tile_m} queries of 64 heads"
    yield "loads", f"by the copy engine, {plan.stages} tiles of keys at a time; {plan.launch(plan.main).shared_bytes} B"
    yield "launches", f"{len(plan.launches)}, of which a call runs the one for its heads and its number of queries"
    yield "moves", f"{row * element.bytes} B of a key in, 4 B of a query and a key out"
    yield "multiplies", f"{2 * 64 * row} operations in {plan.dtype_name} for a key and a query of 64 heads"
