"""Errors against the float64 reference, finite results, dead rows, and memory that nothing initialized."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from attngen.inspect.cases import Case
from attngen.lab.verify.gpu import try_pinned
from attngen.lab.verify.trial import Trial
from tests.gpu.family import Run, kernels, labels, left_out, same

ALL = labels()
LEFT_OUT = left_out()
SEED = 20_000


@cache
def trial(name: str) -> Trial:
    """Run a kernel on every case of its layout, into poisoned memory."""
    kernel = kernels()[name]

    return try_pinned(kernel, torch.device("cuda"), SEED, small=False)


@pytest.mark.parametrize("name", ALL)
def test_the_largest_error_is_within_its_bound(name: str) -> None:
    for result in trial(name).results:
        assert result.error is None, result.error
        assert result.skipped is None, result.skipped
        deviation = result.deviation
        assert deviation is not None
        assert deviation.max_error <= deviation.max_allowed, (result.case, result.seed)
        assert deviation.lse_error <= deviation.lse_allowed, (result.case, result.seed)


@pytest.mark.parametrize("name", ALL)
def test_the_rms_error_is_within_its_bound(name: str) -> None:
    tally = trial(name).tally
    assert 0 < tally.rmse <= tally.rmse_allowed


@pytest.mark.parametrize("name", ALL)
def test_results_of_large_inputs_are_finite(name: str) -> None:
    """Large inputs: logits up to 2^30, in fp16 2^26; docs/limits.md states the limit.

    exp2(x * scale - max) is one FMA, whose exact product differs from the rounded maximum by up to 2^-24 of it.
    """
    size = 2e3 if "fp16" in name else 8e3
    for signs in ("same", "random"):
        run = Run.of(name, Case("large", (65,), (150,), heads=2))
        for tensor in (run.inputs.q, run.inputs.k[: run.call.total_k] if "varlen" in name else run.inputs.k):
            sign = torch.ones_like(tensor) if signs == "same" else torch.where(tensor < 0, -1.0, 1.0).to(tensor.dtype)
            tensor.copy_(sign * size)
        out, lse = run.results()
        live = torch.cat([visible.any(-1) for visible in run.visible()], dim=1)  # (heads, rows)
        flat_out = out if out.dim() == 3 else out[0]
        flat_lse = lse if lse.dim() == 2 else lse[0]
        assert torch.isfinite(flat_out).all(), signs
        assert torch.isfinite(flat_lse[live]).all(), signs


@pytest.mark.parametrize("name", ALL)
def test_dead_rows_are_zero(name: str) -> None:
    """All cases together have dead rows: by mask, by more queries than keys, by a window, by an empty sequence."""
    result = trial(name)
    assert result.tally.dead_rows > 0
    assert not [r.describe() for r in result.results if r.deviation is None or r.deviation.wrong]


@pytest.mark.parametrize("name", ALL)
def test_uninitialized_memory_changes_nothing(name: str) -> None:
    """Outputs and tile maps full of NaN and of 0xAA give the same bits."""
    run = Run.of(name, Case("ragged", (70,) * 2, (333,) * 2, heads=2, used=(333, 201)))
    results = []
    for fill in (0xFF, 0xAA, 0x00):
        memory = run.memory()
        buffers = memory.buffers
        for tensor in (buffers.out, buffers.lse, buffers.words):
            if tensor is not None:
                tensor.view(torch.uint8).fill_(fill)
        run.launch(buffers)
        assert buffers.lse is not None
        results.append((buffers.out, buffers.lse))
    assert same(results[0], results[1])
    assert same(results[0], results[2])
