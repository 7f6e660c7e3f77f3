"""Check 30: generated specs, forward and backward, meet their contracts, and touch no memory but their own.

``ATTNGEN_FUZZ_SEEDS=a:b`` names the seeds, and ``ATTNGEN_FUZZ_MEMCHECK=a:b`` those under compute-sanitizer; a few by
default. ``python -m tests.gpu.generated`` does the same without pytest, and goes on after each kernel.
"""

from __future__ import annotations

import os
import shutil

import pytest

from tests.gpu.generated import describe, memchecked, run, seeds_of


def test_generated_specs_meet_their_contracts() -> None:
    seeds = seeds_of(os.environ.get("ATTNGEN_FUZZ_SEEDS", "0:32"))
    rows = run(seeds)
    assert {row.seed for row in rows} == set(seeds)
    assert describe(rows) == []
    assert sum(row.verdict == "passed" for row in rows) > len(rows) // 2


def test_generated_specs_stay_within_their_memory() -> None:
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not on the PATH")
    seeds = seeds_of(os.environ.get("ATTNGEN_FUZZ_MEMCHECK", "0:12"))
    rows = memchecked(seeds, sanitizer)
    assert {row.seed for row in rows} == set(seeds)
    assert describe(rows) == []
