"""Rows that are put together or added up: windows of tensors, sums in order, and the kernel's parameters."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from attngen.parallel.gather_launch import GatherForm, columns_of, compiled
from attngen.parallel.gathers import Gather, Rows, of_each, side_by_side, widths_of


def test_keys_are_put_side_by_side_from_several_sources() -> None:
    """K and V of different widths, from rows apart and from rows side by side, with holes, in places of their own."""
    generator = torch.Generator().manual_seed(3)
    k = torch.randn(2, 5, 3, 4, generator=generator)
    v = torch.randn(2, 3, 5, 2, generator=generator).transpose(1, 2)  # heads before rows
    received = torch.randn(4, 2, 3 * 4 + 3 * 2, generator=generator)
    room = torch.full((2, 8, 3 * 4 + 3 * 2), torch.nan)
    listed = np.array([4, 6, 0, 8])
    places = np.array([7, 1, 3, 5, 2])
    widths = widths_of(k, v)
    gather = Gather(5, np.array([0, 1, 2, 4]), listed, places)
    gather(side_by_side(room, widths, batch_first=True), of_each(k, v), side_by_side(received, widths))
    own = torch.cat([k.flatten(2), v.flatten(2)], dim=2).transpose(0, 1)
    both = torch.cat([own, received])
    for row, place in zip((4, 6, 0, None, 8), places, strict=True):
        wanted = both[row] if row is not None else torch.zeros_like(both[0])
        assert torch.equal(room[:, place], wanted)
    assert room[:, [0, 4, 6]].isnan().all()


def test_sums_are_in_float32() -> None:
    x = torch.tensor([256.0, 1.0, 1.0, -256.0], dtype=torch.bfloat16).view(1, 4, 1, 1)
    out = torch.empty(1, 1, 1, 1, dtype=torch.bfloat16)
    Gather(1, np.zeros(4, dtype=np.int64), np.arange(4))([Rows.placed(out)], [Rows.of(x)])
    assert out.item() == 2.0


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", [
    GatherForm(torch.bfloat16, 1, True, True, False, columns_of(1024), True),
    GatherForm(torch.float32, 3, False, False, True, columns_of(24), False),
], ids=["copies", "sums"])  # fmt: skip
def test_the_kernel_compiles_without_a_gpu(form: GatherForm) -> None:
    """And has the parameters that its launches pass."""
    pytest.importorskip("triton")
    cubin, symbol, _, scratch = compiled(form, 90)
    assert cubin[:4] == b"\x7fELF"
    assert symbol.encode() in cubin
    assert scratch in (0, 1, 2)
