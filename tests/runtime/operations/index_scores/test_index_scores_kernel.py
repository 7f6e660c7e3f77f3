"""The kernels of index scores, run on the host through the runtime that launches them, beside plain torch.

Copies land at once and products are sums in float32; threads, barriers, addresses and masks are those of the kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch

import attngen
from attngen.runtime.operations.index_scores import arguments as index_scores
from attngen.runtime.operations.index_scores import kernel as index_scores_kernel
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


def both(host: HostDriver, launch: str, **given: Any) -> torch.Tensor:
    """Score by a launch of a kernel and in torch; what both gave."""
    launches = len(host.launches)
    scores = attngen.index_scores(**given)
    assert [name.split("_heads_")[1] for name, _ in host.launches[launches:]] == [launch]
    arguments = tuple((name, value) for name, value in given.items() if name not in IndexScores._fields)
    fields = {**dict.fromkeys(IndexScores._fields), "variant": "causal", **given, "arguments": arguments, "out": None}
    call = IndexScores(**{name: fields[name] for name in IndexScores._fields})
    wanted = index_scores.score(call, index_scores.check(call))
    if given.get("out") is not None:  # columns behind the keys of a sequence may hold anything
        assert scores is given["out"]
        scores = scores.where(wanted > -torch.inf, -torch.inf)
    torch.testing.assert_close(scores, wanted, rtol=1e-4, atol=1e-3)
    return wanted


@pytest.mark.exhaustive
@few(
    ("launch", "queries", "heads"),
    [
        ("32", 24, 20), ("32_few", 3, 32), ("64", 11, 64), ("64_few", 1, 40), ("128", 6, 100), ("128_few", 1, 128),
    ], always=(1,), often=(0, 3, 4))  # fmt: skip
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


def packed(
    starts: list[int], used: list[int], heads: int = 64, *, page_size: int = 16, listed: int = 12, head_dim: int = 128
) -> dict[str, Any]:
    """Packed queries over pages, of which no entry behind a sequence may be read."""
    total, batch = starts[-1], len(used)
    pages = torch.randn(batch * listed + 1, page_size, head_dim).bfloat16()
    table = torch.randperm(batch * listed).int().view(batch, listed)
    for b, length in enumerate(used):
        table[b, -(-length // page_size) :] = 2**30
    return {
        "q": torch.randn(total, heads, head_dim).bfloat16(), "k": pages, "weights": torch.randn(total, heads),
        "k_scale": torch.rand(pages.shape[:2]) + 0.5, "page_table": table,
        "seqused_k": torch.tensor(used, dtype=torch.int32), "cu_seqlens_q": torch.tensor(starts, dtype=torch.int32),
        "max_seqlen_q": max(end - start for start, end in pairwise(starts)),
    }  # fmt: skip


@pytest.mark.exhaustive
def test_packed_queries_over_pages(host: HostDriver) -> None:
    """A prompt, no query, one query without keys, decoding, and part of a prompt."""
    both(host, "64", **packed([0, 60, 60, 61, 62, 90], [60, 70, 0, 192, 130]))


@pytest.mark.exhaustive
@few(
    ("launch", "heads", "starts"),
    [
        ("64_few", 40, [0, 1, 2, 2, 3]), ("64_few", 64, [0, 3, 3, 4, 6]), ("32_few", 32, [0, 1, 4, 6, 6]),
        ("32", 20, [0, 90, 91, 91, 150]), ("128", 100, [0, 20, 20, 21, 40]), ("128_few", 128, [0, 0, 0, 1, 2]),
    ],
    always=1,
)  # fmt: skip
def test_packed_queries_of_every_launch(host: HostDriver, launch: str, heads: int, starts: list[int]) -> None:
    both(host, launch, **packed(starts, [192, 33, 7, 100], heads, page_size=64, listed=3, head_dim=64))


@pytest.mark.exhaustive
def test_many_sequences_are_searched(host: HostDriver) -> None:
    lengths = [(7 * b) % 5 for b in range(40)]
    starts = [sum(lengths[:b]) for b in range(41)]
    both(host, "64_few", **packed(starts, [max(one, 3 * b % 64) for b, one in enumerate(lengths)], listed=4))


def test_scores_of_the_callers(host: HostDriver) -> None:
    """Columns behind the keys of a sequence, and rows of no sequence, stay as they are."""
    given = packed([0, 9, 9, 10], [70, 100, 3])
    more = {"q": torch.zeros(2, 64, 128).bfloat16(), "weights": torch.zeros(2, 64)}
    given |= {name: torch.cat([given[name], rows]) for name, rows in more.items()}
    out = torch.full((12, 200), torch.nan)[:, :192]
    both(host, "64_few", **given, out=out)
    assert out[:9, 128:].isnan().all()
    assert out[9, 64:].isnan().all()
    assert out[10:].isnan().all()
    assert (out[9, 3:64] == -torch.inf).all()
    one = operands(2, 192, 64)
    both(host, "64_few", **one, out=torch.empty(2, 2, 256)[..., :192])


def test_kernels_of_earlier_versions_take_no_packed_queries(host: HostDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_scores_kernel, "takes", lambda kernel, tensor: False)
    attngen.index_scores(**packed([0, 1, 2], [3, 4]))
    assert not host.launches
    (reason,) = SCORES.prepared.values()
    assert "from an older attngen, does not take packed queries; rebuild it" in str(reason)


def test_calls_without_a_kernel_run_in_torch(host: HostDriver) -> None:
    given = operands(3, 40, 140)
    assert torch.isfinite(attngen.index_scores(**given)[:, -1]).all()
    attngen.index_scores(**{**operands(3, 40, 8), "q": torch.randn(2, 3, 8, 132).bfloat16()[..., :128]})
    assert not host.launches
