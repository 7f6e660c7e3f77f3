"""Tile maps against brute force: every tile is empty, partial or full as the mask says, and the visible pairs of
partial tiles are those of the mask; for forward and backward kernels, ragged lengths, and values at the ends of types.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import attngen
from attngen.build.pipeline import Prepared, prepare
from attngen.errors import CallError
from attngen.runtime.arguments.checked import Call
from attngen.runtime.launch.map_cache import kept_maps, same_words
from attngen.schema import load_spec
from tests.gpu.family import for_this_gpu, only_known, package_of_spec
from tests.map_oracle import VARIANTS, check_map, values

SPEC = Path(__file__).with_name("maps.yaml")
DEVICE = "cuda"
#: Batch, heads, queries and keys.
SHAPES = ((2, 2, 577, 577), (1, 2, 1280, 1280), (1, 1, 130, 4400), (2, 1, 1, 259))


def to_build() -> list[Prepared]:
    return prepare(load_spec(SPEC))


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    """Make these kernels known, and no others."""
    with only_known(package_of_spec(SPEC)):
        yield


@cache
def tiles() -> dict[tuple[str, int, str, str], tuple[int, int]]:
    """The tile of the launch that reads the map, by variant, head dim, layout and direction."""
    read = {}
    for one in (for_this_gpu(kernel).plan for kernel in to_build()):
        launch = one.launch("forward" if one.direction == "forward" else "dqkv")
        read[one.variant.name, one.head_dim_qk, one.layout, one.direction] = launch.tile_m, launch.tile_n
    return read


def check_kept(call: Call, name: str, head_dim: int, layout: str, before: set[Any]) -> int:
    """Check the maps that were kept since, and return how many these are."""
    count = 0
    for key, entry in list(kept_maps().items()):
        if key in before:
            continue
        backward = key[0][1] == "dqkv"
        tile = tiles()[name, head_dim, layout, "backward" if backward else "forward"]
        check_map(entry.words, entry.shape, tile, call, by_keys=backward)
        count += 1
    return count


@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", VARIANTS)
def test_every_tile_and_every_pair(name: str, shape: tuple[int, int, int, int], head_dim: int) -> None:
    if head_dim == 256 and name not in ("ids_of_64_bits", "later"):
        pytest.skip("the spec has no such kernel")
    batch, heads, queries, keys = shape
    for seed in range(2):
        torch.manual_seed(seed)
        sizes = [(batch, n, heads, head_dim) for n in (queries, keys, keys)]
        inputs = [torch.randn(size, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for size in sizes]
        given = values(name, batch, heads, queries, keys, seed, DEVICE)
        before = set(kept_maps())
        for _ in range(2):  # without visible pairs, then with these
            out = attngen.attention(*inputs, variant=name, **given)
            torch.autograd.grad(out, inputs, torch.ones_like(out))
            call = attngen.explain(*inputs, variant=name, **given).call
            assert check_kept(call, name, head_dim, "dense", before) == 2
        made = attngen.tile_map(*inputs[:2], variant=name, **given)
        (forward,) = (entry for key, entry in kept_maps().items() if key not in before and key[0][1] == "forward")
        assert not forward.shape.keeps_pairs or same_words(made.words, forward.words, forward.shape)


def test_packed_sequences() -> None:
    sizes = (300, 1, 129, 511, 0)
    bounds = torch.tensor([0, *sizes], device=DEVICE).cumsum(0).int()
    inputs = [torch.randn(sum(sizes), 2, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for _ in "qkv"]
    given = values("ids", len(sizes), 2, max(sizes), max(sizes), 7, DEVICE)
    packing = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen_q": 511, "max_seqlen_k": 511}
    before = set(kept_maps())
    for _ in range(2):
        out = attngen.attention_varlen(*inputs, **packing, variant="ids", **given)
        torch.autograd.grad(out, inputs, torch.ones_like(out))
        call = attngen.explain(*inputs, **packing, variant="ids", **given).call
        assert check_kept(call, "ids", 64, "varlen", before) == 2


def test_an_uncounted_write_is_an_error_in_debug_mode() -> None:
    q, k, v = (torch.randn(1, 512, 1, 64, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    given = values("ids_of_64_bits", 1, 1, 512, 512, 3, DEVICE)
    for _ in range(2):
        attngen.attention(q, k, v, variant="ids_of_64_bits", **given)
    with attngen.debug():
        attngen.attention(q, k, v, variant="ids_of_64_bits", **given)
        given["id"].data[:200] = torch.arange(200, device=DEVICE)
        with pytest.raises(CallError, match="without torch counting it"):
            attngen.attention(q, k, v, variant="ids_of_64_bits", **given)
