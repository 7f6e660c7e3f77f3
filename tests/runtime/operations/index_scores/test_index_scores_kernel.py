"""The kernels of index scores, run on the host through the runtime that launches them, beside plain torch.

Copies land at once and products are sums in float32; threads, barriers, addresses and masks are those of the kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import attngen
from attngen.runtime.operations.index_scores import arguments as index_scores
from attngen.runtime.operations.index_scores.arguments import IndexScores
from attngen.runtime.operations.index_scores.kernel import SCORES
from tests.runtime.host_kernels import HostDriver, kernels_for_indices, on_host
from tests.sampling import few


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostDriver]:
    """A device whose memory is the host's."""
    with on_host(monkeypatch, kernels_for_indices(), SCORES.prepared, unchecked=index_scores) as driver:
        yield driver


def operands(
    queries: int, keys: int, heads: int, *, batch: int = 2, head_dim: int = 128, dtype: torch.dtype = torch.bfloat16
) -> dict[str, Any]:
    return {
        "q": torch.randn(batch, queries, heads, head_dim).to(dtype),
        "k": torch.randn(batch, keys, head_dim).to(dtype),
        "weights": torch.randn(batch, queries, heads),
        "k_scale": torch.rand(batch, keys) + 0.5,
    }


def both(host: HostDriver, launch: str, **given: Any) -> None:
    """Score by a launch of a kernel and in torch."""
    launches = len(host.launches)
    scores = attngen.index_scores(**given)
    assert [name.split("_heads_")[1] for name, _ in host.launches[launches:]] == [launch]
    own = ("q", "k", "weights", "k_scale", "seqused_k", "page_table")
    arguments = tuple((name, value) for name, value in given.items() if name not in (*own, "variant"))
    call = IndexScores(*map(given.get, own), given.get("variant", "causal"), None, arguments)
    torch.testing.assert_close(scores, index_scores.score(call, index_scores.check(call)), rtol=1e-4, atol=1e-3)


@pytest.mark.exhaustive
@few(
    ("launch", "queries", "heads"),
    [
        ("32", 24, 20), ("32_few", 3, 32), ("64", 11, 64), ("64_few", 1, 40), ("128", 6, 100), ("128_few", 1, 128),
    ], always=(1,)
)  # fmt: skip
def test_every_launch(host: HostDriver, launch: str, queries: int, heads: int) -> None:
    both(host, launch, **operands(queries, 140, heads))


def test_narrow_rows_and_used_lengths(host: HostDriver) -> None:
    given = operands(14, 130, 64, head_dim=64, batch=3)
    given["k"][1, 70:] = torch.nan
    both(host, "64", **given, seqused_k=torch.tensor([130, 70, 0], dtype=torch.int32))


@pytest.mark.exhaustive
@few("name, scalar", [("chunked", {"chunk": 33}), ("sliding_window", {"window": 70})])
def test_windows_and_divisors(host: HostDriver, name: str, scalar: dict[str, int]) -> None:
    both(host, "64_few", **operands(3, 140, 40, batch=1, dtype=torch.float16), variant=name, **scalar)


@pytest.mark.exhaustive
@few("page_size", [1, 16, 96], always=(2,))
def test_pages(host: HostDriver, page_size: int) -> None:
    given = operands(2, 192, 64)
    listed = 192 // page_size
    pages = torch.randn(2 * listed + 1, page_size, 128).bfloat16()
    table = torch.randperm(2 * listed).int().view(2, listed)
    table[1, -(-50 // page_size) :] = 2**30  # never read
    given |= {"k": pages, "k_scale": torch.rand(pages.shape[:2]) + 0.5}
    both(host, "64_few", **given, page_table=table, seqused_k=torch.tensor([192, 50], dtype=torch.int32))


def test_calls_without_a_kernel_run_in_torch(host: HostDriver) -> None:
    given = operands(3, 40, 140)
    assert torch.isfinite(attngen.index_scores(**given)[:, -1]).all()
    attngen.index_scores(**{**operands(3, 40, 8), "q": torch.randn(2, 3, 8, 132).bfloat16()[..., :128]})
    assert not host.launches
