"""Kernels that make the tile maps of neighbourhoods, on the CPU: every tile and every pair."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from attngen.build.kernel_filter import KernelFilter
from attngen.build.pipeline import Prepared, plans
from attngen.integrations.natten.boxes import BOX
from attngen.integrations.natten.functions import Axis, orders_of
from attngen.resources import specs_dir
from attngen.runtime.arguments.given import Given
from attngen.runtime.registry.binding import bind_call
from attngen.schema import load_spec
from tests.host_compiler import COMPILER
from tests.map_oracle import check_map, tiles_of
from tests.render import test_maps_on_host as host
from tests.sampling import sampled

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

AXES = {
    "2d, dilated, causal": [(1, 1, 1, 1, False), (13, 4, 3, 2, True), (22, 5, 2, 3, False)],
    "3d": [(5, 3, 1, 1, False), (7, 4, 1, 1, False), (18, 7, 1, 1, False)],
    "3d, strides of boxes": [(2, 2, 1, 1, False), (16, 16, 8, 1, False), (24, 8, 8, 1, False)],
    "1d, causal": [(1, 1, 1, 1, False), (1, 1, 1, 1, False), (700, 150, 3, 1, True)],
}


@cache
def prepared() -> dict[tuple[str, str], Prepared]:
    spec = load_spec(specs_dir() / "integrations/natten.yaml")
    return {
        (plan.variant.name, plan.direction): Prepared(one, plan)
        for one, plan in plans(spec, KernelFilter(dtype=("bf16",), head_dim=("128",)))
        if plan.iteration == "tile_map"
    }


@pytest.mark.exhaustive
@sampled(every=2, always=1, name=[*AXES], variant=["natten", "natten_and_more"], direction=["forward", "backward"])
def test_tiles_and_pairs(name: str, variant: str, direction: str) -> None:
    first, second, third = (Axis(*axis) for axis in AXES[name])
    queries, keys, scalars, boxes = orders_of((first, second, third))
    more = 50 if variant == "natten_and_more" else 0
    arguments = {**scalars, "own": keys.rows} if more else scalars
    one = prepared()[variant, direction]
    host.OTHERS[:] = [one]
    q, k = (torch.zeros(1, rows, 1, 128, dtype=torch.bfloat16) for rows in (queries.rows, keys.rows + more))
    given = Given(q, k, k, variant=one.plan.variant, arguments=arguments)
    call, _ = bind_call(given)
    ((owner, shape, maps),) = host.made(one.plan, given, call)
    by_keys = direction == "backward"
    for words in maps:
        check_map(words, shape, tiles_of(one.plan.launch(owner)), call, by_keys=by_keys)
    if not more and not by_keys:
        bits = maps[0][: shape.row_words].view(-1, 2, shape.words)[..., None] >> torch.arange(32) & 1
        assert int(bits.sum()) == boxes.visited
        assert queries.rows % BOX == 0 or name.startswith("1d")
