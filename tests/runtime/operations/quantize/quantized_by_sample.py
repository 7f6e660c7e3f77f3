"""Scales from a sample of rows: what calls of ``quantize="fp8"`` give, beside numbers in float64 and exact scales."""

from __future__ import annotations

import torch
from torch import Tensor

from attngen.families.quantize.tiles import SPAN
from attngen.lab.verify.inputs import in_groups
from attngen.runtime.operations.quantize.arguments import in_rows
from attngen.runtime.operations.quantize.call import quantize_by_sample, quantize_centered
from attngen.runtime.operations.quantize.in_torch import signs_of, transformed
from attngen.runtime.operations.quantize.sampled import Sampled
from attngen.runtime.operations.quantize.tiles import SAMPLES


def check_groups(q: Tensor, k: Tensor, v: Tensor, layout: str, centered: bool) -> None:
    """Assert that v in groups of keys has the bits of v in rows, and everything else those of the same call."""
    rows, groups = (
        quantize_by_sample(q, k, v, layout=layout, centered=centered, grouped=grouped)[0] for grouped in (False, True)
    )
    wanted = rows._replace(v=in_groups(in_rows(rows.v, layout)))
    assert all(_same(a, b) for a, b in zip(groups, wanted, strict=True))


def check(q: Tensor, k: Tensor, v: Tensor, layout: str, centered: bool) -> None:
    """Assert that scales are those of a sample, and that numbers are rounded from the rows themselves."""
    ours, mean = quantize_by_sample(q, k, v, layout=layout, centered=centered)
    group = in_rows(q, layout).shape[2] // in_rows(k, layout).shape[2]
    signs = signs_of(Sampled(q, k, v, layout, centered).exact(None)).double()
    for name, tensor, rows_of_token in (("q", q, group), ("k", k, 1), ("v", v, 1)):
        rows = in_rows(tensor, layout).double().transpose(1, 2)  # (batch, heads, seqlen, head_dim)
        count = min(rows.shape[2], max(SAMPLES // rows_of_token, 1))
        some = rows[:, :, : count * (rows.shape[2] // count) : rows.shape[2] // count]
        if name == "k" and centered:
            assert mean is not None
            torch.testing.assert_close(mean.double(), some.mean(2), rtol=2**-7, atol=2e-3)
            rows, some = (x - mean.double()[:, :, None] for x in (rows, some))
        scale = some.unflatten(1, (-1, rows_of_token)).square().mean((2, 3, 4)).sqrt() * SPAN / 448
        actual = getattr(ours, f"{name}_descale")
        torch.testing.assert_close(actual.double(), scale, rtol=1e-4, atol=0.0)
        if name != "v":
            rows = transformed(rows, signs) * rows.shape[-1] ** -0.5
        units = actual.double().repeat_interleave(rows_of_token, dim=1)[:, :, None, None]
        numbers = in_rows(getattr(ours, name), layout).double().transpose(1, 2)
        # Half a step of three bits, or of a subnormal number, and what float32 loses.
        apart = (numbers * units - rows).abs()
        assert bool((apart <= rows.abs() * 2**-4 * 1.001 + units * 2**-10 * 1.001 + 1e-3 * units).all()), name
    assert centered or mean is None


def quantized(q: Tensor, k: Tensor, v: Tensor, layout: str, centered: bool) -> list[Tensor]:
    """All results of a call."""
    ours, mean = quantize_by_sample(q, k, v, layout=layout, centered=centered)
    return [*ours, *([] if mean is None else [mean])]


def redone(q: Tensor, k: Tensor, v: Tensor, layout: str, centered: bool) -> bool:
    """Whether a call gives the same bits as one with exact scales and the same mean."""
    ours, mean = quantize_by_sample(q, k, v, layout=layout, centered=centered)
    exact = quantize_centered(q, k, v, layout=layout, k_mean=mean)
    return all(_same(a, b) for a, b in zip(ours, exact, strict=True))


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
