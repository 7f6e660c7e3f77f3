"""Hidden keys change nothing, whatever they hold; a visible NaN reaches exactly the rows that see it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attngen.inspect.cases import Case
from tests.gpu.family import Run, bits, labels, left_out, of_variants, same
from tests.sampling import sampled

ALL = labels()
LEFT_OUT = left_out()
VALUES = (torch.nan, torch.inf, -torch.inf, 1e38)


def case_of(name: str) -> Case:
    """Return few queries and many keys, ragged on both sides, with keys after seqused_k."""
    if "varlen" in name:
        return Case("hidden", (70, 9), (517, 300), heads=2, used=(500, 261))
    return Case("hidden", (70,) * 2, (517,) * 2, heads=2, used=(500, 261))


def small_scalars(name: str) -> dict[str, int]:
    """Return scalars that leave many tiles empty."""
    values = {
        "sliding_window": {"window": 37},
        "sink_window": {"sinks": 3, "window": 20},
        "dilated": {"window": 5, "dilation": 7},
        "head_window": {"window": 11},
        "neighbourhood_2d": {"width": 16, "radius": 2},
    }
    return values.get(name.split("-")[0], {})


def representable(value: float, tensor: Tensor) -> float:
    """Return the value, or the largest of the dtype where it would overflow."""
    return min(value, torch.finfo(tensor.dtype).max) if value == 1e38 else value


@sampled(name=ALL, value=VALUES)
def test_keys_and_values_after_the_end_change_nothing(name: str, value: float) -> None:
    def results(fill: float) -> tuple[Tensor, Tensor]:
        run = Run.of(name, case_of(name), **small_scalars(name))
        for tensor in (run.inputs.k, run.inputs.v):
            behind = tensor.isnan()  # what ``make_inputs`` put there
            assert behind.any()
            tensor[behind] = representable(fill, tensor)
        return run.results()

    assert same(results(0.0), results(value))


@sampled(name=ALL, value=VALUES)
def test_keys_that_no_query_sees_change_nothing(name: str, value: float) -> None:
    """Hidden keys change nothing, also inside partial tiles."""

    def results(fill: float) -> tuple[Tensor, Tensor, int]:
        run = Run.of(name, case_of(name), **small_scalars(name))
        changed = 0
        for sequence, visible in enumerate(run.visible()):
            k, _ = run.keys_of(sequence)
            unseen = ~visible.any(0).any(0)
            k[unseen] = representable(fill, k)
            changed += int(unseen.sum())
        return (*run.results(), changed)

    *zeros, changed = results(0.0)
    *others, _ = results(value)
    if name.split("-")[0] in ("sliding_window", "sink_window", "dilated", "neighbourhood_2d"):
        assert changed > 100
    assert same(tuple(zeros), tuple(others))


@sampled(name=of_variants("sliding_window", "sink_window", "allowed"), value=[torch.nan, 1e38], rows=[70, 2])
def test_tiles_that_the_mask_proves_empty_change_nothing(name: str, value: float, rows: int) -> None:
    """No query sees anything of these KV tiles, so neither their keys nor their values matter.

    With two rows, that is so for the tile before a ragged last one too. Where tiles do not begin at multiples of their
    size, keys near a seen one may come with it.
    """
    case = Case("empty tiles", (rows,) * 2, (517,) * 2, heads=2)

    def results(fill: float) -> tuple[Tensor, Tensor, int]:
        arguments: dict[str, object] = {}
        if name.startswith("allowed"):
            allowed = torch.zeros(2, rows, 517, dtype=torch.bool, device="cuda")
            allowed[:, :, 513:516] = True
            arguments["allowed"] = allowed
        else:
            arguments = {"sinks": 0, "window": 3} if name.startswith("sink") else {"window": 3}
        run = Run.of(name, case, **arguments)
        tile, changed = run.kernel.tile_n, 0
        near = tile if run.kernel.manifest.get("structure", {}).get("end_alignment") else 0
        for sequence, visible in enumerate(run.visible()):
            seen = visible.any(0).any(0)
            for start in range(0, len(seen), tile):
                if not seen[max(start - near, 0) : start + tile + near].any():
                    for tensor in run.keys_of(sequence):
                        tensor[start : start + tile] = representable(fill, tensor)
                    changed += 1
        return (*run.results(), changed)

    *zeros, changed = results(0.0)
    *others, _ = results(value)
    assert changed > 3
    assert same(tuple(zeros), tuple(others))


@pytest.mark.parametrize("name", of_variants("causal", "full", "sliding_window", "allowed"))
def test_a_visible_nan_in_k_reaches_exactly_the_rows_that_see_it(name: str) -> None:
    run = Run.of(name, case_of(name), **small_scalars(name))
    before = run.results()
    visible = run.visible()
    key = int(visible[0].any(0).any(0).nonzero()[-10])
    k, _ = run.keys_of(0)
    k[key] = torch.nan
    after = run.results()
    seen = visible[0][:, :, key].transpose(0, 1)  # (rows, heads)
    rows = seen.shape[0]
    out_before, out_after = (r[0][:rows] if r[0].dim() == 3 else r[0][0] for r in (before, after))
    assert seen.any()
    assert torch.equal(out_after.isnan().all(-1), seen)
    assert torch.equal(bits(out_after)[~seen], bits(out_before)[~seen])
    others = (before[0][rows:], after[0][rows:]) if before[0].dim() == 3 else (before[0][1:], after[0][1:])
    assert torch.equal(bits(others[0]), bits(others[1]))


@pytest.mark.parametrize("name", of_variants("causal", "full", "sliding_window"))
def test_a_visible_nan_in_v_reaches_at_least_the_rows_that_see_it(name: str) -> None:
    run = Run.of(name, case_of(name), **small_scalars(name))
    before = run.results()
    visible = run.visible()
    key = int(visible[0].any(0).any(0).nonzero()[0])
    _, v = run.keys_of(0)
    v[key] = torch.nan
    after = run.results()
    seen = visible[0][:, :, key].transpose(0, 1)
    rows, tile_m = seen.shape[0], run.kernel.tile_m
    out_before, out_after = (r[0][:rows] if r[0].dim() == 3 else r[0][0] for r in (before, after))
    assert out_after[seen].isnan().all()
    # At most the rows of query tiles that load the key's tile, or its neighbour where the last tile is moved back.
    tile_n = run.kernel.tile_n
    loaded = visible[0][:, :, max(key // tile_n * tile_n - tile_n, 0) : key // tile_n * tile_n + 2 * tile_n].any(-1)
    for start in range(0, rows, tile_m):
        part = slice(start, start + tile_m)
        if not loaded[:, part].any():
            assert torch.equal(bits(out_after[part]), bits(out_before[part]))
