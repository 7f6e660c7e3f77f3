"""Masks by bits of a tile map: right on the first use, which evaluates the expression, with bits from the second on,
after a write to the mask's tensors, with a map that the caller made, and in a graph whose inputs change.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen.build.pipeline import Prepared, prepare
from attngen.runtime.launch.map_cache import kept_maps
from attngen.schema import load_spec
from tests.gpu.family import only_known, package_of_spec

SPEC = Path(__file__).with_name("masks.yaml")
DEVICE = "cuda"
VARIANTS = (
    "pairs", "pairs_of_heads", "runs", "runs_scored", "runs_capped", "windows", "documents_apart", "neighbourhood_3d",
    "tiles_3d", "causal",
)  # fmt: skip
#: Head dim, tokens, batch, query heads, KV heads: whole tiles and ragged ones, a last tile of one key.
SHAPES = ((64, 768, 2, 2, 2), (64, 577, 1, 4, 1), (128, 777, 1, 4, 2), (128, 1152, 1, 2, 2), (256, 705, 1, 2, 1))


def to_build() -> list[Prepared]:
    return prepare(load_spec(SPEC))


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    """Make these kernels known, and no others."""
    with only_known(package_of_spec(SPEC)):
        yield


def in_runs(generator: torch.Generator, *shape: int) -> Tensor:
    """Random ids that come in runs and come back."""
    *outer, length = shape
    ids = torch.randint(0, 4, (*outer, length // 48 + 1), generator=generator, dtype=torch.int32)
    return ids.repeat_interleave(48, -1)[..., :length].contiguous().to(DEVICE)


def in_blocks(generator: torch.Generator, *shape: int) -> Tensor:
    """Random pairs, of which whole tiles are visible or hidden."""
    *outer, rows, keys = shape
    coarse = torch.rand(*outer, rows // 64 + 1, keys // 64 + 1, generator=generator)
    coarse = coarse.repeat_interleave(64, -2).repeat_interleave(64, -1)[..., :rows, :keys]
    fine = torch.rand(*outer, rows, keys, generator=generator) < 0.5
    return ((coarse < 0.3) | ((coarse < 0.6) & fine)).to(DEVICE)


def values(name: str, batch: int, heads: int, tokens: int, seed: int) -> dict[str, Any]:
    """Return random arguments of a variant."""
    generator = torch.Generator().manual_seed(seed)
    match name:
        case "pairs":
            return {"allowed": in_blocks(generator, tokens, tokens)}
        case "pairs_of_heads":
            return {"allowed": in_blocks(generator, heads, tokens, tokens)}
        case "runs" | "runs_capped":
            return {"id": in_runs(generator, tokens)}
        case "runs_scored":
            slope = torch.rand(heads, generator=generator).to(DEVICE) / 8
            return {"id": in_runs(generator, batch, tokens), "slope": slope}
        case "documents_apart":
            numbers = 1 + torch.arange(tokens, dtype=torch.int32) // 37
            return {"id": numbers.expand(batch, -1).contiguous().to(DEVICE)}
        case "windows":
            width = torch.randint(1, 300, (tokens,), generator=generator, dtype=torch.int32)
            return {"width": width.to(DEVICE)}
        case "neighbourhood_3d":
            return {"nx": 12, "ny": 8, "depth": 3, "wx": 7, "wy": 5}
        case "tiles_3d":
            return {"per": 40, "nx": 3, "ny": 2, "nz": 2, "wx": 3, "wy": 1, "wz": 1, "video": min(tokens - 7, 480)}
    return {}


def gradients(inputs: list[Tensor], above: Tensor, **call: Any) -> list[Tensor]:
    """Return the output and the gradients of q, k and v."""
    given = [one.detach().requires_grad_() for one in inputs]
    out = attngen.attention(*given, **call)
    return [out.detach(), *torch.autograd.grad(out, given, above.to(out.dtype))]


def check(actual: list[Tensor], wanted: list[Tensor], plain: list[Tensor]) -> None:
    """The error is at most a small multiple of that of plain arithmetic in the same dtype."""
    for number, (one, right, usual) in enumerate(zip(actual, wanted, plain, strict=True)):
        error, limit = (one.double() - right).abs().max(), (usual.double() - right).abs().max()
        least = 0.01 * right.abs().max() + 1e-6  # one key alone has gradients of 0
        assert error <= (3 if number else 2) * limit + least, f"result {number}: {error} > {limit}"


def inputs_of(head_dim: int, tokens: int, batch: int, heads: int, kv_heads: int) -> tuple[list[Tensor], Tensor]:
    sizes = (heads, kv_heads, kv_heads, heads)
    q, k, v, above = (torch.randn(batch, tokens, n, head_dim, device=DEVICE, dtype=torch.bfloat16) for n in sizes)
    return [q, k, v], above


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", VARIANTS)
def test_with_bits_and_without(name: str, shape: tuple[int, int, int, int, int]) -> None:
    head_dim, tokens, batch, heads, _ = shape
    if (head_dim == 256 and name not in ("runs", "runs_scored")) or (name == "causal" and head_dim != 128):
        pytest.skip("the spec has no such kernel")
    torch.manual_seed(tokens)
    inputs, above = inputs_of(*shape)
    call: dict[str, Any] = {"variant": name, **values(name, batch, heads, tokens, seed=head_dim + tokens)}
    before = set(kept_maps())
    wanted = gradients([one.double() for one in inputs], above, backend="reference", **call)
    plain = gradients(inputs, above, backend="reference", **call)
    first = gradients(inputs, above, **call)
    check(first, wanted, plain)
    assert set(kept_maps()) - before
    second = gradients(inputs, above, **call)
    check(second, wanted, plain)
    assert torch.equal(first[0], second[0])  # bits and expression hide the same pairs
    tiles = attngen.tile_map(*inputs[:2], **call)
    given = attngen.attention(*inputs, tile_map=tiles, **call)
    assert torch.equal(given, first[0])


@pytest.mark.parametrize("name", ["pairs", "runs_scored", "windows"])
def test_a_write_is_seen(name: str) -> None:
    shape = SHAPES[2]
    inputs, above = inputs_of(*shape)
    call: dict[str, Any] = {"variant": name, **values(name, shape[2], shape[3], shape[1], seed=1)}
    for _ in range(2):
        gradients(inputs, above, **call)
    for tensor_name, value in values(name, shape[2], shape[3], shape[1], seed=2).items():
        call[tensor_name].copy_(value)
    wanted = gradients([one.double() for one in inputs], above, backend="reference", **call)
    plain = gradients(inputs, above, backend="reference", **call)
    for _ in range(2):
        check(gradients(inputs, above, **call), wanted, plain)


@pytest.mark.parametrize("name", ["pairs", "runs_scored"])
def test_a_graph_follows_its_inputs(name: str) -> None:
    shape = SHAPES[2]
    inputs, _ = inputs_of(*shape)
    call: dict[str, Any] = {"variant": name, **values(name, shape[2], shape[3], shape[1], seed=3)}
    for _ in range(2):  # a map with bits is kept, which the graph must not take
        attngen.attention(*inputs, **call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attngen.attention(*inputs, **call)
    for tensor_name, value in values(name, shape[2], shape[3], shape[1], seed=4).items():
        call[tensor_name].copy_(value)
    graph.replay()
    assert torch.equal(out, attngen.attention(*inputs, **call))


def test_a_graph_takes_the_kept_map_of_positions() -> None:
    shape = SHAPES[2]
    inputs, _ = inputs_of(*shape)
    call: dict[str, Any] = {"variant": "neighbourhood_3d", **values("neighbourhood_3d", *shape[2:4], shape[1], seed=7)}
    for _ in range(2):
        wanted = attngen.attention(*inputs, **call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attngen.attention(*inputs, **call)
    assert any(entry.captured for entry in kept_maps().values())
    out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(out, wanted)


@pytest.mark.parametrize("name", ["pairs", "runs_scored"])
def test_a_fixed_order_has_the_same_bits(name: str) -> None:
    shape = SHAPES[3]
    inputs, above = inputs_of(*shape)
    call: dict[str, Any] = {"variant": name, **values(name, shape[2], shape[3], shape[1], seed=5)}
    runs = [gradients(inputs, above, deterministic=True, **call) for _ in range(4)]
    wanted = gradients([one.double() for one in inputs], above, backend="reference", **call)
    plain = gradients(inputs, above, backend="reference", **call)
    check(runs[0], wanted, plain)
    for one in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], one, strict=True))


def test_packed_sequences() -> None:
    lengths = (300, 1, 129, 511)
    bounds = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
    total, heads = sum(lengths), 2
    q, k, v, above = (torch.randn(total, heads, 64, device=DEVICE, dtype=torch.bfloat16) for _ in range(4))
    ids = in_runs(torch.Generator().manual_seed(6), len(lengths), max(lengths))
    slope = torch.rand(heads, device=DEVICE) / 8
    for _ in range(2):
        given = [one.detach().requires_grad_() for one in (q, k, v)]
        out = attngen.attention_varlen(
            *given, cu_seqlens_q=bounds, cu_seqlens_k=bounds, max_seqlen_q=511, max_seqlen_k=511,
            variant="runs_scored", id=ids, slope=slope,
        )  # fmt: skip
        grads = torch.autograd.grad(out, given, above)
        for n, length in enumerate(lengths):
            rows = slice(int(bounds[n]), int(bounds[n + 1]))
            call = {"variant": "runs_scored", "id": ids[n : n + 1, :length].contiguous(), "slope": slope}
            parts = [one[rows][None] for one in (q, k, v)]
            wanted = gradients([one.double() for one in parts], above[rows][None], backend="reference", **call)
            plain = gradients(parts, above[rows][None], backend="reference", **call)
            check([out[rows][None].detach(), *(one[rows][None] for one in grads)], wanted, plain)
