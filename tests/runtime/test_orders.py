"""The order of tiles of queries: every tile is taken once, and blocks end sooner than longest first."""

from __future__ import annotations

import pytest
import torch

from attngen.plan import plan
from attngen.runtime.arguments.shapes import bind
from attngen.runtime.geometry.orders import LONGEST_FIRST, Order, best_order
from attngen.runtime.geometry.sizes import Geometry, geometries
from attngen.runtime.geometry.splits import Capacity
from attngen.schema import expand, load_spec_text
from tests.runtime.test_cuts import _RESOURCES, BLOCKS, kernel_of

#: KV tiles of 80 keys of each tile of 192 queries under a causal mask of 8,192 tokens, the last queries first.
CAUSAL = tuple(-(-min(192 * (tile + 1), 8192) // 80) for tile in reversed(range(43)))


def geometry(score: str | None, heads: int, head_dim: int = 128, mask: str = "q_pos >= kv") -> Geometry:
    scored = f", score: '{score}'" if score else ""
    text = (
        f"schema: 1\npackage: mine\narch: [sm90a]\nvariants:\n  own: {{mask: '{mask}'{scored}}}\n"
        f"kernels:\n  - {{variant: own, head_dim: {head_dim}}}\n"
    )
    (spec,) = expand(load_spec_text(text))
    kernel = kernel_of({**plan(spec).to_dict(), "resources": _RESOURCES})
    q = torch.empty(1, 8192, heads, head_dim, dtype=torch.bfloat16, device="meta")
    return geometries(kernel, bind(kernel.variant, q, q, q, None), {}, capacity=Capacity(BLOCKS))[-1]


def taken(tiles: int, order: Order) -> list[int]:
    """The arithmetic of the scheduler: tiles of queries of a unit, in the order in which they are taken."""
    placed = []
    for q_tile in reversed(range(tiles)):
        after_long = tiles - 1 - q_tile - order.long
        short = after_long if after_long < order.short else q_tile + order.short
        placed.append(short if after_long >= 0 else q_tile)
    return placed


@pytest.mark.parametrize("order", [Order(), Order(0, 3), Order(4, 1), Order(3, 6), Order(9, 0), Order(2, 7)])
def test_every_tile_is_taken_once(order: Order) -> None:
    placed = taken(9, order)
    assert sorted(placed) == list(range(9))
    assert placed[: order.long] == list(range(8, 8 - order.long, -1))
    assert placed[order.long : order.long + order.short] == list(range(order.short))


def test_short_tiles_come_early_where_blocks_take_two_or_three_tiles() -> None:
    order = best_order(CAUSAL, 8, BLOCKS, 3.5)
    assert 0 < order.long < 20
    assert 0 < order.short < 20
    assert best_order(CAUSAL, 32, BLOCKS, 3.5) == LONGEST_FIRST  # ten tiles for each block
    assert best_order(CAUSAL, 3, BLOCKS, 3.5) == LONGEST_FIRST  # one for each
    assert best_order((100,) * 43, 8, BLOCKS, 3.5) == LONGEST_FIRST
    assert best_order(CAUSAL[::-1], 8, BLOCKS, 3.5) == LONGEST_FIRST
    assert best_order((), 8, BLOCKS, 3.5) == LONGEST_FIRST


def test_scored_causal_kernels_take_the_order_of_the_call() -> None:
    few, many, plain = geometry("s - abs(q_pos - kv)", 8), geometry("s - abs(q_pos - kv)", 32), geometry(None, 8)
    assert few.launch.short_early
    assert few.sizes["short_tiles"] > 0 < few.sizes["long_tiles"]
    assert (many.sizes["long_tiles"], many.sizes["short_tiles"]) == (0, 0)
    assert not plain.launch.short_early
    assert not geometry("s - abs(q_pos - kv)", 8, mask="kv >= q_pos").launch.short_early
    assert not geometry("s - abs(q_pos - kv)", 8, mask="abs(q_pos - kv) <= 512").launch.short_early
