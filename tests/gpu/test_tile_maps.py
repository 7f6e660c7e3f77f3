"""Tile maps against brute force: every tile is empty, partial or full as the mask says, and the visible pairs of
partial tiles are those of the mask; for forward and backward kernels, ragged lengths, and values at the ends of types.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product
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
from tests.map_oracle import VARIANTS, check_map, tiles_of, values

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
def tiles() -> dict[tuple[str, int, str], dict[str, tuple[int, int]]]:
    """Queries and keys of a bit of each map, by variant, head dim and layout, and by the launch that reads it."""
    read: dict[tuple[str, int, str], dict[str, tuple[int, int]]] = {}
    for one in (for_this_gpu(kernel).plan for kernel in to_build()):
        maps = read.setdefault((one.variant.name, one.head_dim_qk, one.layout), {})
        owners = {launch.tile_map.owner for launch in one.launches if launch.tile_map is not None}
        maps |= {owner: tiles_of(one.launch(owner)) for owner in owners}
    return read


def check_kept(call: Call, name: str, head_dim: int, layout: str, before: set[Any]) -> None:
    """Check the maps that were kept since: one for each launch that reads one."""
    of_launches, owners = tiles()[name, head_dim, layout], []
    for key, entry in list(kept_maps().items()):
        if key in before:
            continue
        owners.append(key[0][1])
        check_map(entry.words, entry.shape, of_launches[owners[-1]], call, by_keys=entry.shape.by_keys)
    assert sorted(owners) == sorted(of_launches)


#: Head dims of the kernels of a variant; 64: of any other.
DIMS = {
    **dict.fromkeys(("ids_of_64_bits", "later"), (64, 256)),
    **dict.fromkeys(("blocks", "causal_blocks"), (64, 128, 192, 256)),
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("name", "head_dim"), [(name, dim) for name in VARIANTS for dim in DIMS.get(name, (64,))])
def test_every_tile_and_every_pair(name: str, shape: tuple[int, int, int, int], head_dim: int) -> None:
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
            check_kept(call, name, head_dim, "dense", before)
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
        check_kept(call, "ids", 64, "varlen", before)


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


#: Batch, query and KV heads, queries, keys, and the share of blocks that are seen.
BLOCKS = (
    (2, 4, 2, 1000, 1500, 0.3),
    (1, 8, 8, 4100, 4100, 0.1),
    (1, 2, 1, 64, 64, 1.0),
    (1, 2, 2, 130, 5000, 0.5),
    (2, 2, 1, 700, 700, 0.0),
)


@pytest.mark.parametrize("size", BLOCKS, ids=str)
@pytest.mark.parametrize(
    ("name", "head_dim"),
    [
        *product(("blocks", "causal_blocks"), ((64, 64), (128, 128), (192, 192), (256, 256))),
        *product(("far_blocks",), ((64, 64), (128, 128), (192, 128), (256, 256))),
    ],
    ids=str,
)
def test_consumers_visit_their_own_blocks(
    name: str, size: tuple[int, int, int, int, int, float], head_dim: tuple[int, int]
) -> None:
    batch, heads, kv_heads, queries, keys, share = size
    qk, columns = head_dim
    for seed in range(4):
        torch.manual_seed(seed)
        sel = torch.rand(heads, -(-queries // 64), -(-keys // 64), device=DEVICE) < share
        sel[0, 0] &= share == 1.0  # a row without keys
        if seed == 1:  # one consumer sees much more than the other
            sel[:, ::2] &= torch.rand(heads, 1, 1, device=DEVICE) < 0.5
        if seed == 2:  # the same of keys
            sel[:, :, ::2] &= torch.rand(heads, 1, 1, device=DEVICE) < 0.5
        if seed == 3:  # one consumer sees nothing, or a single block, which the other may see, too
            sel[0, 1::2], sel[1:, ::2] = False, torch.arange(sel.shape[2], device=DEVICE) == sel.shape[2] // 2
        shapes = (batch, queries, heads, qk), (batch, keys, kv_heads, qk), (batch, keys, kv_heads, columns)
        inputs = [torch.randn(shape, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
        dout = torch.randn(batch, queries, heads, columns, device=DEVICE, dtype=torch.bfloat16)
        results = []
        for backend in ("cuda", "reference"):
            leaves = inputs if backend == "cuda" else [one.detach().double().requires_grad_() for one in inputs]
            out, lse = attngen.attention(*leaves, variant=name, sel=sel, backend=backend, return_lse=True)
            results.append((out, lse, *torch.autograd.grad(out, leaves, dout.to(out.dtype))))
        for actual, wanted in zip(*results, strict=True):
            assert not actual.isnan().any()
            torch.testing.assert_close(actual.double(), wanted.double(), atol=0.03, rtol=0.03)


@pytest.mark.parametrize("head_dim", [(128, 128), (192, 128), (256, 256)], ids=str)
def test_blocks_of_packed_sequences(head_dim: tuple[int, int]) -> None:
    qk, columns = head_dim
    sizes = (300, 1, 129, 511, 0)
    torch.manual_seed(0)
    bounds = torch.tensor([0, *sizes], device=DEVICE).cumsum(0).int()
    shapes = [(sum(sizes), 2, columns) for columns in (qk, qk, columns)]
    inputs = [torch.randn(shape, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    sel = torch.rand(2, 8, 8, device=DEVICE) < 0.5
    dout = torch.randn(shapes[2], device=DEVICE, dtype=torch.bfloat16)
    packing = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen_q": 511, "max_seqlen_k": 511}
    exact = [one.detach().double().requires_grad_() for one in inputs]
    out = attngen.attention_varlen(*inputs, **packing, variant="causal_blocks", sel=sel)
    wanted = attngen.attention_varlen(*exact, **packing, variant="causal_blocks", sel=sel, backend="reference")
    results = (out, *torch.autograd.grad(out, inputs, dout))
    for actual, one in zip(results, (wanted, *torch.autograd.grad(wanted, exact, dout.double())), strict=True):
        torch.testing.assert_close(actual.double(), one, atol=0.03, rtol=0.03)


def test_a_map_of_blocks_is_made_in_each_replay_of_a_graph() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 700, 2, 128, device=DEVICE, dtype=torch.bfloat16) for _ in "qkv")
    sel = torch.rand(2, 11, 11, device=DEVICE) < 0.5
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        attngen.attention(q, k, v, variant="blocks", sel=sel)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = attngen.attention(q, k, v, variant="blocks", sel=sel)
    for _ in range(3):
        sel.copy_(torch.rand(2, 11, 11, device=DEVICE) < 0.5)
        graph.replay()
        wanted = attngen.attention(*(one.double() for one in (q, k, v)), variant="blocks", sel=sel, backend="reference")
        torch.testing.assert_close(out.double(), wanted, atol=0.03, rtol=0.03)
