"""Sparse latent attention of engines: results, refused caches, and launches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attngen.errors import CallError
from attngen.integrations.engines.listed_rows import attend_to_listed, cache_rows
from attngen.integrations.shared import catalogue
from attngen.runtime.arguments import torch_state
from attngen.runtime.device import driver as drivers
from attngen.runtime.registry.lookup import package_of_kernels, registry
from tests.integrations.engines.sparse_batches import SparseBatch, sparse_batch
from tests.runtime.support import FakeDriver, kernel
from tests.sampling import few


def lists(made: SparseBatch) -> tuple[Tensor, Tensor]:
    """Slots that are filled from the front, and how many of each row count."""
    return made.slots(), (made.topk >= 0).sum(-1).int()


def call(made: SparseBatch, **more: Any) -> tuple[Tensor, Tensor | None]:
    slots, counts = lists(made)
    return attend_to_listed(made.q, cache_rows(made.stored.flatten(0, 1)), slots, counts, 0.1, **more)


@pytest.mark.parametrize("form", ["576", "512", "656 bytes", "576 in e4m3", "512 in e4m3"])
def test_results(form: str) -> None:
    made = sparse_batch(columns=512 if form.startswith("512") else 576, holes=False, extra_tokens=2)
    made, more = made.packed() if form == "656 bytes" else made, {}
    if "e4m3" in form:
        made, more = made.in_e4m3(0.02), {"k_descale": torch.tensor(0.02)}
    out, lse = call(made, return_lse=True, **more)
    made.check(out, lse, 0.1, tolerance=0.02 if made.bytes_of_rows is not None else 1e-5)
    assert call(made, **more)[1] is None


def test_entries_beyond_the_counts_and_foreign_slots_are_ignored() -> None:
    made = sparse_batch(holes=False)
    slots, counts = lists(made)
    rows = cache_rows(made.stored.flatten(0, 1))
    wanted, _ = call(made)
    beyond = torch.where(torch.arange(slots.shape[1]) < counts[:, None], slots, 0)
    assert torch.equal(attend_to_listed(made.q, rows, beyond, counts, 0.1)[0], wanted)
    foreign = torch.where(slots < 0, rows.keys.shape[1] + 3, slots)
    full = torch.full_like(counts, slots.shape[1])
    assert torch.equal(attend_to_listed(made.q, rows, foreign, full, 0.1)[0], wanted)


@pytest.mark.parametrize(
    ("width", "dtype"),
    [(320, torch.bfloat16), (584, torch.uint8), (576, torch.float8_e5m2), (656, torch.bfloat16)],
)
def test_other_rows_are_refused(width: int, dtype: torch.dtype) -> None:
    with pytest.raises(
        CallError, match=f"576 or 512 columns of 16 bits or of e4m3, or 656 bytes, got {width} of {dtype}"
    ):
        cache_rows(torch.zeros(4, width).to(dtype))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeDriver]:
    """A driver that computes on the CPU, with kernels over lists of rows in 16 bits."""
    monkeypatch.setenv("ATTNGEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(torch_state, "on_gpu", lambda tensor: isinstance(tensor, Tensor))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    registry.clear()
    kernels = [
        kernel(catalogue.variant(name), head_dim=dims, dtype=dtype)
        for name in ("listed_keys", "listed_keys_sink")
        for dims in ((576, 512), 512)
        for dtype in ("bf16", "fp16")
    ]
    registry.add(package_of_kernels(kernels, "memory"))
    made = FakeDriver()
    with drivers.use(made):
        yield made
    registry.clear()


@few("columns", [576, 512])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sinks", [False, True])
def test_a_step_is_one_launch(driver: FakeDriver, columns: int, dtype: torch.dtype, sinks: bool) -> None:
    more = {"sinks": torch.tensor([0.5, -1.0, 2.0])} if sinks else {}
    for seed in range(3):
        made = sparse_batch(columns=columns, holes=False, seed=seed)
        made = replace(made, q=made.q.to(dtype), cache=made.cache.nan_to_num().to(dtype))
        out, lse = call(made, return_lse=True, **more)
        wanted, sums = made.expected(0.1)
        if sinks:
            wanted = wanted * torch.sigmoid(sums - more["sinks"].double())[..., None]
        torch.testing.assert_close(out.double(), wanted, atol=0.02, rtol=0.02)
        assert lse is not None
        torch.testing.assert_close(lse.double(), sums, atol=0.02, rtol=0.02)
        assert len(driver.launches) == seed + 1
