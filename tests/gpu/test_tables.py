"""Small tables that a score reads at computed indices: right in whole tiles and ragged ones, with heads that share
keys, batches, heads that follow each other in a block, gradients of the table, packed sequences, and in a graph whose
table changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen.build.pipeline import Prepared, prepare
from attngen.schema import load_spec
from tests.gpu.family import only_known, package_of_spec
from tests.gpu.test_biases import inputs_of, verify
from tests.gpu.test_mask_bits import check

SPEC = Path(__file__).with_name("tables.yaml")
DEVICE = "cuda"
VARIANTS = ("shifted_windows", "windows", "of_videos", "of_pairs", "causal_by_blocks", "multiplied")
#: Head dim, queries, keys, batch, query heads, KV heads: whole tiles, ragged ones, more heads than a block takes at
#: once, fewer queries than keys.
SHAPES = (
    (64, 1024, 1024, 2, 2, 2), (64, 1001, 1001, 1, 6, 2), (64, 300, 300, 5, 48, 48), (128, 980, 980, 2, 4, 1),
    (128, 577, 577, 2, 2, 2), (128, 260, 260, 5, 32, 16), (64, 200, 333, 1, 2, 1), (128, 70, 650, 1, 2, 2),
)  # fmt: skip


def to_build() -> list[Prepared]:
    return prepare(load_spec(SPEC))


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    """Make these kernels known, and no others."""
    with only_known(package_of_spec(SPEC)):
        yield


def values(name: str, batch: int, heads: int) -> dict[str, Tensor]:
    """Random arguments of a variant."""

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=DEVICE)

    match name:
        case "shifted_windows":
            return {"table": random(heads, 32, 32)}
        case "of_videos":
            return {"table": random(3, 13, 13, heads).bfloat16()}
        case "of_pairs":
            return {"bias": random(heads, 49, 49)}
        case "causal_by_blocks":
            return {"table": random(batch, 41).half(), "other": random(heads, 3, 6)}
        case "multiplied":
            return {"table": random(heads, 19)}
        case "learned":
            return {"table": random(169, heads)}
        case "learned_by_blocks":
            kind = torch.randint(0, 6, (4, 4), device=DEVICE)
            return {"table": random(6, heads), "kind": kind, "other": random(heads, 32, 64)}
        case "learned_by_distance":
            return {"table": random(32, heads), "other": random(heads, 1200)}
    return {"table": random(heads, 169)}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", VARIANTS)
def test_against_float64(name: str, shape: tuple[int, int, int, int, int, int]) -> None:
    torch.manual_seed(sum(shape))
    inputs, above = inputs_of(*shape)
    verify(inputs, above, {"variant": name, **values(name, shape[3], shape[4])})


@pytest.mark.parametrize(("head_dim", "dtype"), [(128, torch.float16)])
def test_float16(head_dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    inputs, above = inputs_of(head_dim, 520, 520, 2, 2, 1, dtype)
    verify(inputs, above, {"variant": "windows", **values("windows", 2, 2)})


@pytest.mark.parametrize("head_dim", [96, 192])
def test_other_head_dims(head_dim: int) -> None:
    torch.manual_seed(head_dim)
    (q, k, v), _ = inputs_of(head_dim, 500, 500, 2, 4, 2)
    call: dict[str, Any] = {"variant": "windows", **values("windows", 2, 4)}
    with torch.no_grad():
        outs = [attngen.attention(q, k, v, **call)]
        wanted = [attngen.attention(*(one.double() for one in (q, k, v)), backend="reference", **call)]
        plain = [attngen.attention(q, k, v, backend="reference", **call)]
    check(outs, wanted, plain)


@pytest.mark.parametrize(
    ("name", "head_dim"),
    [("learned", 64), ("learned", 128), *product(("learned_by_blocks", "learned_by_distance"), (64, 128, 256))],
)
def test_learned_tables(name: str, head_dim: int) -> None:
    torch.manual_seed(2)
    inputs, above = inputs_of(head_dim, 500, 500, 2, 4, 2)
    tables = values(name, 2, 4)

    def results(backend: str | None, dtype: torch.dtype) -> list[Tensor]:
        given = [one.to(dtype, copy=True).requires_grad_() for one in inputs]
        of_tables = torch.float64 if dtype == torch.float64 else torch.float32
        own = {key: one.to(of_tables, copy=True).requires_grad_() for key, one in tables.items() if key != "kind"}
        out = attngen.attention(*given, variant=name, **{**tables, **own}, backend=backend)
        assert isinstance(out, Tensor)
        return [out.detach(), *torch.autograd.grad(out, [*given, *own.values()], above.to(dtype))]

    wanted, plain = results("reference", torch.float64), results("reference", torch.bfloat16)
    check(results(None, torch.bfloat16), wanted, plain)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_packed_sequences(head_dim: int) -> None:
    torch.manual_seed(3)
    lengths, heads = [130, 1, 700, 257], 2
    tokens, longest = sum(lengths), max(lengths)
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], device=DEVICE, dtype=torch.int32)
    q, k, v, above = (torch.randn(tokens, heads, head_dim, device=DEVICE, dtype=torch.bfloat16) for _ in range(4))
    table = values("packed", 1, heads)["table"]

    def results(backend: str | None, dtype: torch.dtype) -> list[Tensor]:
        given = [one.to(dtype, copy=True).requires_grad_() for one in (q, k, v)]
        q_, k_, v_ = given
        out = attngen.attention_varlen(
            q_, k_, v_, cu_seqlens_q=bounds, cu_seqlens_k=bounds, max_seqlen_q=longest, max_seqlen_k=longest,
            variant="packed", backend=backend, table=table,
        )  # fmt: skip
        assert isinstance(out, Tensor)
        return [out.detach(), *torch.autograd.grad(out, given, above.to(dtype))]

    wanted, plain = results("reference", torch.float64), results("reference", torch.bfloat16)
    check(results(None, torch.bfloat16), wanted, plain)


def test_a_graph_follows_its_table() -> None:
    torch.manual_seed(4)
    inputs, _ = inputs_of(64, 512, 512, 2, 4, 4)
    call: dict[str, Any] = {"variant": "shifted_windows", **values("shifted_windows", 2, 4)}
    attngen.attention(*inputs, **call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attngen.attention(*inputs, **call)
    call["table"].copy_(values("shifted_windows", 2, 4)["table"])
    graph.replay()
    assert torch.equal(out, attngen.attention(*inputs, **call))
