"""Kernels that make the tile maps of random masks, forward and backward, on the CPU: every tile and every pair."""

from __future__ import annotations

import pytest
import torch

from attngen.build.pipeline import prepare
from attngen.inspect.cases import Case
from attngen.inspect.values import arguments_of
from attngen.runtime.arguments.given import Given
from attngen.runtime.registry.binding import bind_call
from tests.fuzz.language import drawn, fill
from tests.host_compiler import COMPILER
from tests.map_oracle import check_map, tiles_of
from tests.render.test_maps_on_host import OTHERS, made

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

#: Batch, query heads, KV heads, queries and keys.
_SIZES = ((2, 2, 1, 250, 333), (1, 3, 1, 70, 700))


@pytest.mark.exhaustive
@pytest.mark.long
@pytest.mark.parametrize("seed", range(200))
def test_random_maps(seed: int) -> None:
    mask = drawn(seed)
    kernels = [one for one in prepare(mask.spec) if one.plan.iteration == "tile_map" and one.plan.backend == "cuda"]
    for one in kernels:
        plan = one.plan
        if plan.layout == "dense":
            OTHERS[:] = [one]
            for number, (batch, heads, kv_heads, rows, keys) in enumerate(_SIZES):
                case = Case("maps", (rows,) * batch, (keys,) * batch, heads, kv_heads)
                generator = torch.Generator().manual_seed(seed + number)
                arguments = fill(mask, arguments_of(plan.variant, case, "dense", generator), seed + number)
                dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[mask.dtype]
                q = torch.zeros(batch, rows, heads, mask.head_dim, dtype=dtype)
                k = torch.zeros(batch, keys, kv_heads, mask.head_dim, dtype=dtype)
                given = Given(q, k, k, variant=plan.variant, arguments=arguments)
                call, _ = bind_call(given)
                for owner, shape, maps in made(plan, given, call):
                    for words in maps:
                        check_map(words, shape, tiles_of(plan.launch(owner)), call, by_keys=shape.by_keys)
