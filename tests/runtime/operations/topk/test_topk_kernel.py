"""The kernel that selects scores, run on the host through the runtime that launches it, beside a stable sort."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen.runtime.operations.topk import kernel as topk_kernel
from attngen.runtime.operations.topk.kernel import SELECTION, Topk, check, select
from tests.runtime.host_kernels import SPEC_OF_BLOCK_SCORES, HostDriver, kernels_for_indices, on_host
from tests.sampling import sampled

#: Scores that a block loads at once.
CHUNK = 4096


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostDriver]:
    """A device whose memory is the host's."""
    with on_host(monkeypatch, kernels_for_indices(), SELECTION.prepared) as driver:
        yield driver


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostDriver]:
    """The same with the kernel for short rows beside."""
    with on_host(monkeypatch, kernels_for_indices(SPEC_OF_BLOCK_SCORES), SELECTION.prepared) as driver:
        yield driver


def both(host: HostDriver, scores: Tensor, k: int, lengths: Tensor | None = None) -> None:
    """Select by the kernel and by a sort."""
    call = Topk(scores, k, lengths)
    launches = len(host.launches)
    assert torch.equal(attngen.topk(scores, k, lengths=lengths), select(call, check(call)))
    assert len(host.launches) == launches + 1


@sampled(always=1, k=[1, 700, 3072], columns=[3, CHUNK, 5 * CHUNK + 17])
def test_random_scores(host: HostDriver, columns: int, k: int) -> None:
    both(host, torch.randn(2, columns), k)
    both(host, torch.randn(2, 1, columns), k, torch.tensor([[columns // 2], [columns + 9]], dtype=torch.int32))


@pytest.mark.parametrize("shift", [1, 2, 3])
def test_rows_that_begin_anywhere(host: HostDriver, shift: int) -> None:
    both(host, torch.randn(3, 3 * CHUNK + 5)[:, shift:], 100)


def test_scores_that_need_many_cuts(host: HostDriver) -> None:
    rows = torch.randn(2, 6 * CHUNK)
    both(host, rows.sort(dim=1).values, 3000)
    both(host, torch.rand(2, 6 * CHUNK) * 1e-3 + 1.0, 2500)  # all in one bin of the first digits
    both(host, 1.0 + torch.arange(6.0 * CHUNK)[None] * 2.0**-23, 3000)


def test_samples_that_mislead(host: HostDriver) -> None:
    columns = 6 * CHUNK
    rows = torch.randn(2, columns)
    for segment in range(64):
        first = segment * (columns - 32) // 64
        rows[0, first : first + 32] += 10.0  # all that a sample reads is large,
        rows[1, first : first + 32] -= 10.0  # or small
    both(host, rows, 3000)
    both(host, rows, 700)


def test_ties_and_values_that_are_not_finite(host: HostDriver) -> None:
    rows = torch.randn(2, 5 * CHUNK)
    both(host, (2 * rows).round(), 2049)
    both(host, torch.ones(2, 5 * CHUNK), 3000)
    both(host, torch.where(rows > 0, 0.0, -0.0), 1000)
    both(host, torch.where(rows > -1.5, -torch.inf, rows), 2500)
    both(host, torch.full((2, 3 * CHUNK), -torch.inf), 7)
    both(host, torch.where(rows > 1, torch.nan, rows), 1500)
    both(host, torch.where(rows > 1.5, torch.inf, rows), 2500)
    both(host, rows * 1e-42, 500)


def test_long_rows_have_several_windows(host: HostDriver) -> None:
    both(host, torch.randn(1, 2**17 + 5), 300)


def test_slots_in_the_callers_rows(host: HostDriver) -> None:
    """Rows of packed sequences, some without any, and of sequences with two rows each."""
    scores, starts = torch.randn(6, 3000), torch.tensor([0, 0, 1, 1, 4, 6, 6], dtype=torch.int32)
    lengths = torch.tensor([3000, 2, 900, 0, 2999, 70], dtype=torch.int32)
    table, out = torch.randint(0, 999, (6, 48), dtype=torch.int32), torch.full((6, 600), 7, dtype=torch.int32)
    for k, more in ((500, {"cu_seqlens_q": starts}), (30, {})):
        own = {"lengths": lengths, "page_table": table, "page_size": 64, **more}
        given, into = (scores, out[:, :k]) if more else (scores.view(3, 2, 3000), out[:, :k].unflatten(0, (3, 2)))
        if not more:
            own |= {"lengths": lengths.view(3, 2), "page_table": table[:3]}
        launches = len(host.launches)
        assert attngen.topk(given, k, **own, out=into) is into
        assert len(host.launches) == launches + 1
        call = Topk(given, k, **own)
        assert torch.equal(into, select(call, check(call)))
    assert (out[:, 500:] == 7).all()


def test_kernels_of_earlier_versions_take_no_page_tables(host: HostDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topk_kernel, "takes", lambda kernel, tensor: False)
    scores, wide = torch.randn(2, 60), torch.zeros(2, 9, dtype=torch.int32)
    attngen.topk(scores, 5, out=wide[:, :5])
    attngen.topk(scores, 5, page_table=torch.zeros(2, 1, dtype=torch.int32), page_size=64)
    assert not host.launches
    attngen.topk(scores, 5, out=torch.zeros(2, 5, dtype=torch.int32))
    assert len(host.launches) == 1


@pytest.mark.exhaustive
def test_large_selections_have_a_launch_of_their_own(host: HostDriver) -> None:
    both(host, torch.randn(1, 8 * CHUNK), 3073)
    assert host.launches[-1][0].endswith("_large")
    both(host, torch.randn(1, 8 * CHUNK), 19456)


def test_short_rows(short: HostDriver) -> None:
    """Warps have a row each, and each launch has longer rows than the one before; still longer rows take blocks."""
    for columns in (3, 256, 700, 2000):
        for k in (1, 15, 300):
            scores = torch.randn(13, columns)
            both(short, scores, k)
            both(short, scores, k, torch.randint(-1, columns + 2, (13,), dtype=torch.int32))
    both(short, torch.randn(2, 2049), 15)
    by_warps = {("topk_sm90a_short", 2), ("topk_sm90a_short_wide", 2), ("topk_sm90a_short_widest", 2)}
    assert set(short.launches) == {*by_warps, ("topk_sm90a", 2)}


def test_short_rows_with_ties_values_that_are_not_finite_and_slots(short: HostDriver) -> None:
    rows = torch.randn(9, 300)
    for scores in (
        (2 * rows).round(), torch.ones(9, 300), torch.where(rows > 0, 0.0, -0.0),
        rows.masked_fill(rows < 1.5, -torch.inf),
        torch.where(rows > 1.0, torch.where(rows > 1.5, torch.nan, torch.inf), rows), torch.full((9, 300), torch.nan),
    ):  # fmt: skip
        both(short, scores, 15)
    lengths, table = torch.randint(0, 301, (9,)).int(), torch.randint(0, 99, (3, 10)).int()
    out = torch.zeros(9, 17, dtype=torch.int32)[:, 1:16]
    given: dict[str, Any] = {"lengths": lengths.view(3, 3), "page_table": table, "page_size": 32}
    attngen.topk(rows.view(3, 3, 300), 15, **given, out=out.unflatten(0, (3, 3)))
    call = Topk(rows.view(3, 3, 300), 15, lengths.view(3, 3), table, None, 32)
    assert torch.equal(out.unflatten(0, (3, 3)), select(call, check(call)))
