"""Generated specs, forward and backward, meet their contracts, and touch no memory but their own.

``ATTNGEN_FUZZ_SEEDS=a:b`` names the seeds, and ``ATTNGEN_FUZZ_MEMCHECK=a:b`` those under compute-sanitizer; a few by
default. ``python -m tests.gpu.generated`` does the same without pytest, and goes on after each kernel.
"""

from __future__ import annotations

import os
import shutil

import pytest

from attngen.build.pipeline import Prepared
from tests.fuzz.trials import plan_one
from tests.gpu.generated import describe, memchecked, run, seeds_of

SEEDS = seeds_of(os.environ.get("ATTNGEN_FUZZ_SEEDS", "0:32"))
#: Processes of a test, each of which takes long to begin.
_JOBS = 4

MEMCHECKED = seeds_of(os.environ.get("ATTNGEN_FUZZ_MEMCHECK", "0:12"))


def shards(seeds: range, size: int) -> list[range]:
    """Cut seeds into parts, which may run at the same time."""
    return [seeds[first : first + size] for first in range(0, len(seeds), size)]


def to_build() -> list[Prepared]:
    return [kernel for seed in sorted({*SEEDS, *MEMCHECKED}) for kernel in plan_one(seed, True).kernels]


@pytest.mark.parametrize("seeds", shards(SEEDS, 8), ids=str)
def test_generated_specs_meet_their_contracts(seeds: range) -> None:
    rows = run(seeds, jobs=_JOBS)
    assert {row.seed for row in rows} == set(seeds)
    assert describe(rows) == []
    assert sum(row.verdict == "passed" for row in rows) > len(rows) // 2


@pytest.mark.parametrize("seeds", shards(MEMCHECKED, 4), ids=str)
def test_generated_specs_stay_within_their_memory(seeds: range) -> None:
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not on the PATH")
    rows = memchecked(seeds, sanitizer, jobs=_JOBS)
    assert {row.seed for row in rows} == set(seeds)
    assert describe(rows) == []
