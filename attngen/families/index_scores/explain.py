"""The plan of a kernel that scores keys for an index, in words."""

from __future__ import annotations

from collections.abc import Iterator

from attngen.operations import BLOCK_SCORES
from attngen.plan.model import Plan


def facts(plan: Plan) -> Iterator[tuple[str, str]]:
    """Label and text of each line of its explanation."""
    element, row = plan.operands.q, plan.head_dim_qk
    of_blocks = plan.direction == BLOCK_SCORES
    of_heads = "maxima over a block of keys of q k" if of_blocks else "sums over heads of w relu(q k)"
    what = "blocks of keys" if of_blocks else "keys"
    yield "does", f"scores {what} for an index, mask '{plan.variant.name}': {of_heads}, in float32"
    boxes = [one.box for launch in plan.launches for one in launch.arguments if one.of == "q" and one.box]
    yield "head_dim", f"{row}, and up to {max(box[2] for box in boxes)} heads, which share the keys"
    if plan.ragged_queries:
        yield "queries", "as many of each sequence, or packed: then blocks look up their sequence in cu_seqlens_q"
    heads = plan.launch(plan.main).name.removeprefix("heads_")
    yield "tile", f"{plan.tile_n} keys by {plan.tile_m} queries of {heads} heads"
    yield "loads", f"by the copy engine, {plan.stages} tiles of keys at a time; {plan.launch(plan.main).shared_bytes} B"
    yield "launches", f"{len(plan.launches)}, of which a call runs the one for its heads and its number of queries"
    out = "a head and a block" if of_blocks else "a key"
    yield "moves", f"{row * element.bytes} B of a key in, 4 B of a query and {out} out"
    yield "multiplies", f"{2 * int(heads) * row} operations in {plan.dtype_name} for a key and a query of {heads} heads"
