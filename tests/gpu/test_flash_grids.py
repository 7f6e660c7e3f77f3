"""flash-attention's own grids on a GPU, with every kernel compiled when it is first called."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.gpu.flash_grid_runs import run_all, unexpected
from tests.integrations.flash_attn.flash_grids import draw


def _check(count: int, seed: int, processes: int, folder: Path, *, longest: int = 2**30) -> None:
    """Nothing is wrong, and nothing but ``qv`` is refused."""
    outcomes = run_all(draw(count, seed, longest=longest), min(os.cpu_count() or 1, processes), folder)
    assert not unexpected(outcomes), "\n".join(unexpected(outcomes))


def test_a_sample(tmp_path: Path) -> None:
    _check(60, 5, 4, tmp_path, longest=1024)


@pytest.mark.exhaustive
def test_three_thousand(tmp_path: Path) -> None:
    _check(3000, 0, 16, tmp_path)
