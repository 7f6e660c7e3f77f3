"""Tile maps against brute force: every tile is empty, partial or full as the mask says, and the visible pairs of
partial tiles are those of the mask; for forward and backward kernels, ragged lengths, and values at the ends of types.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen.errors import CallError
from attngen.lang.eager import evaluate
from attngen.runtime.checked import Call
from attngen.runtime.module import read_kernel
from attngen.runtime.reference import lengths, names_of
from attngen.runtime.registry import package_of_kernels, registry
from attngen.runtime.tile_map import kept_maps
from attngen.schema import load_spec
from attngen.store.store import Store
from attngen.tools.build.pipeline import Prepared, compile_kernels, prepare
from tests.gpu.family import for_this_gpu

SPEC = Path(__file__).with_name("maps.yaml")
DEVICE = "cuda"
VARIANTS = (
    "ids", "ids_of_64_bits", "apart", "other_heads", "shifted", "nested", "windows", "images", "unlike", "later",
    "not_earlier", "halves", "squares",
)  # fmt: skip
#: Batch, heads, queries and keys.
SHAPES = ((2, 2, 577, 577), (1, 2, 1280, 1280), (1, 1, 130, 4400), (2, 1, 1, 259))


def to_build() -> list[Prepared]:
    return prepare(load_spec(SPEC))


@cache
def _package() -> Any:
    here = [for_this_gpu(kernel) for kernel in to_build()]
    store = Store()
    built, failures = compile_kernels(here, store=store)
    assert not failures, "\n".join(f"{failure.name}: {failure.error}" for failure in failures)
    return package_of_kernels([read_kernel(store.path(built[one.plan.name].key)) for one in here], "tests/gpu/maps")


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    """Make these kernels known, and no others."""
    before = [found for rank, found in registry.packages() if rank == "loaded"]
    registry.clear()
    registry.add(_package())
    yield
    registry.clear()
    for other in before:
        registry.add(other)


def in_runs(values: list[float], generator: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    """Values that come in runs of random length and come back, some longer than a tile."""
    *outer, length = shape
    rows = []
    for _ in range(math.prod(outer)):
        numbers: list[float] = []
        while len(numbers) < length:
            longest = (4, 90, 700)[int(torch.randint(3, (), generator=generator))]
            run = int(torch.randint(1, longest, (), generator=generator))
            numbers += [values[int(torch.randint(len(values), (), generator=generator))]] * run
        rows.append(torch.tensor(numbers[:length], dtype=dtype))
    return torch.stack(rows).reshape(shape).to(DEVICE)


def values(name: str, batch: int, heads: int, queries: int, keys: int, seed: int) -> dict[str, Any]:
    """Return random arguments of a variant, which reads no tensor beyond its end but where it says so."""
    generator = torch.Generator().manual_seed(seed)
    n = max(queries, keys)
    ids = [-(2**31), 2**31 - 1, -1, 0, 1, 2, 3]
    match name:
        case "ids":
            return {"id": in_runs(ids, generator, torch.int32, batch, keys)}
        case "ids_of_64_bits":
            return {"id": in_runs([-(2**63), 2**63 - 1, 2**40, 2**40 + 1, -5, 0], generator, torch.int64, n)}
        case "apart":
            return {"id": in_runs(ids, generator, torch.int32, n), "gap": -1}
        case "other_heads":
            return {"id": in_runs(ids, generator, torch.int32, heads, n)}
        case "shifted":
            return {"id": in_runs(ids, generator, torch.int32, n + 1), "shift": 200}
        case "nested":
            start = torch.randint(-300, n + 300, (16,), generator=generator, dtype=torch.int32).to(DEVICE)
            return {"id": in_runs(list(range(16)), generator, torch.int32, n), "start": start}
        case "windows":
            return {"width": in_runs([-(2**31), 2**31 - 1, 0, 1, 65, 300, 400], generator, torch.int32, n)}
        case "images" | "unlike":
            return {"image": in_runs([0, 1], generator, torch.bool, n)}
        case "later" | "not_earlier":
            times = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -2.0, 3.0e38]
            kept = times if seed % 2 else times[1:]
            return {"time": in_runs(kept, generator, torch.float32, n)}
        case "halves":
            return {"time": in_runs([math.nan, math.inf, -1.0, 0.25, 0.5, 0.75], generator, torch.bfloat16, n)}
    return {"n": 37, "m": 5, "w": 2}


def visible(call: Call) -> list[Tensor]:
    """Return the mask of each sequence, over heads, queries and keys."""
    masks = []
    for b, (rows, keys, q_offset, k_offset) in enumerate(lengths(call)):
        names = names_of(call, b, slice(0, rows), rows, keys, q_offset, k_offset)
        mask = torch.as_tensor(evaluate(call.variant.mask, names, call.tensors), dtype=torch.bool)
        masks.append(mask.to(DEVICE).broadcast_to(call.heads, rows, keys))
    return masks


def tiled(mask: Tensor, tile_m: int, tile_n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return whether each tile is full, whether it is partial, and its pairs: those beyond the ends are hidden."""
    rows, keys = mask.shape
    q_tiles, kv_tiles = -(-rows // tile_m), -(-keys // tile_n)
    padded = mask.new_zeros(q_tiles * tile_m, kv_tiles * tile_n)
    padded[:rows, :keys] = mask
    pairs = padded.reshape(q_tiles, tile_m, kv_tiles, tile_n).transpose(1, 2)
    behind = (torch.arange(q_tiles * tile_m, device=DEVICE) >= rows).reshape(q_tiles, 1, tile_m, 1)
    full, some = (pairs | behind).all(-1).all(-1), pairs.any(-1).any(-1)
    return full & some, some & ~full, pairs


def bits_of(words: Tensor) -> Tensor:
    """Return the bits of the last axis, one after the other."""
    places = torch.arange(32, device=words.device, dtype=torch.int32)
    return (words[..., None] >> places & 1).bool().flatten(-2)


def check_map(words: Tensor, shape: Any, tiles: tuple[int, int], call: Call, *, by_keys: bool) -> None:
    """Compare a map, with visible pairs if it has them, with the mask."""
    rows = words[: shape.map_words].reshape(shape.batch, shape.heads, shape.rows, 2, shape.words)
    slots = words[shape.map_words :][: shape.slots].reshape(shape.batch, shape.heads, shape.rows, -1)
    stored = words[shape.map_words + shape.slots :]
    width = tiles[0] if by_keys else tiles[1]
    lane_words = -(-width // 64)
    count = len(stored) // shape.tile_words if shape.tile_words else 0
    pairs = pairs_of(stored.reshape(count, tiles[by_keys] // 64, lane_words, 128), width) if count else None
    for b, masks in enumerate(visible(call)[: shape.batch]):
        for h in range(shape.heads):
            full, partial, wanted = tiled(masks[h], *tiles)
            if by_keys:
                full, partial, wanted = full.T, partial.T, wanted.permute(1, 0, 3, 2)
            for number, kind in enumerate((full, partial)):
                found = bits_of(rows[b, h, :, number])
                assert torch.equal(found[: kind.shape[0], : kind.shape[1]], kind), ("full", "partial")[number]
                assert found.sum() == kind.sum()
            if pairs is None:
                continue
            slot = slots[b, h, : partial.shape[0], : partial.shape[1]]
            assert torch.equal(slot >= 0, partial)
            assert torch.equal(pairs[slot[partial].long()], wanted[partial])


def pairs_of(words: Tensor, width: int) -> Tensor:
    """Return what the words of lanes of consumers say of each pair, by rows of the map and by its columns."""
    tiles, consumers, lane_words, _ = words.shape
    consumer, part, lane, bit = torch.meshgrid(
        *(torch.arange(n, device=DEVICE) for n in (consumers, lane_words, 128, 32)), indexing="ij"
    )
    row = 64 * consumer + 16 * (lane // 32) + lane % 32 // 4 + 8 * (bit % 4 // 2)
    column = 64 * part + 8 * (bit // 4) + 2 * (lane % 4) + bit % 2
    pairs = torch.zeros(tiles, 64 * consumers, 64 * lane_words, dtype=torch.bool, device=DEVICE)
    pairs[:, row.flatten(), column.flatten()] = bits_of(words).flatten(1)
    return pairs[..., :width]


def tiles_of(name: str, head_dim: int, layout: str, direction: str) -> tuple[int, int]:
    """Return the tile of the launch that reads the map."""
    for one in (for_this_gpu(kernel).plan for kernel in to_build()):
        if (one.variant.name, one.head_dim_qk, one.layout, one.direction) == (name, head_dim, layout, direction):
            launch = one.launch("forward" if direction == "forward" else "dqkv")
            return launch.tile_m, launch.tile_n
    raise LookupError(name)


def check_kept(call: Call, name: str, head_dim: int, layout: str, before: set[Any]) -> int:
    """Check the maps that were kept since, and return how many these are."""
    count = 0
    for key, entry in list(kept_maps().items()):
        if key in before:
            continue
        backward = key[1] == "dqkv"
        tiles = tiles_of(name, head_dim, layout, "backward" if backward else "forward")
        check_map(entry.words, entry.launches.maps[key[1]], tiles, call, by_keys=backward)
        count += 1
    return count


@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", VARIANTS)
def test_every_tile_and_every_pair(name: str, shape: tuple[int, int, int, int], head_dim: int) -> None:
    if head_dim == 256 and name not in ("ids_of_64_bits", "later"):
        pytest.skip("the spec has no such kernel")
    batch, heads, queries, keys = shape
    for seed in range(3):
        torch.manual_seed(seed)
        sizes = [(batch, n, heads, head_dim) for n in (queries, keys, keys)]
        inputs = [torch.randn(size, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for size in sizes]
        given = values(name, batch, heads, queries, keys, seed)
        before = set(kept_maps())
        for _ in range(2):  # without visible pairs, then with these
            out = attngen.attention(*inputs, variant=name, **given)
            torch.autograd.grad(out, inputs, torch.ones_like(out))
            call = attngen.explain(*inputs, variant=name, **given).call
            assert check_kept(call, name, head_dim, "dense", before) == 2
        tiles = attngen.tile_map(*inputs[:2], variant=name, **given)
        (forward,) = (entry for key, entry in kept_maps().items() if key not in before and key[1] == "forward")
        assert torch.equal(tiles.words, forward.words)


def test_packed_sequences() -> None:
    sizes = (300, 1, 129, 511, 0)
    bounds = torch.tensor([0, *sizes], device=DEVICE).cumsum(0).int()
    inputs = [torch.randn(sum(sizes), 2, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for _ in "qkv"]
    given = values("ids", len(sizes), 2, max(sizes), max(sizes), 7)
    packing = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen_q": 511, "max_seqlen_k": 511}
    before = set(kept_maps())
    for _ in range(2):
        out = attngen.attention_varlen(*inputs, **packing, variant="ids", **given)
        torch.autograd.grad(out, inputs, torch.ones_like(out))
        call = attngen.explain(*inputs, **packing, variant="ids", **given).call
        assert check_kept(call, "ids", 64, "varlen", before) == 2


def test_an_uncounted_write_is_an_error_in_debug_mode() -> None:
    q, k, v = (torch.randn(1, 512, 1, 64, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    given = values("ids_of_64_bits", 1, 1, 512, 512, 3)
    for _ in range(2):
        attngen.attention(q, k, v, variant="ids_of_64_bits", **given)
    with attngen.debug():
        attngen.attention(q, k, v, variant="ids_of_64_bits", **given)
        given["id"].data[:200] = torch.arange(200, device=DEVICE)
        with pytest.raises(CallError, match="without torch counting it"):
            attngen.attention(q, k, v, variant="ids_of_64_bits", **given)
