"""Random masks of the whole language, forward and backward, against float64 over all pairs; 16 always, 1,000 at times.

``python -m tests.gpu.random_masks`` does the same without pytest.
"""

from __future__ import annotations

import shutil

import pytest

from attngen.build.pipeline import Prepared
from tests.fuzz.language import drawn
from tests.gpu.random_masks import available_cores, prepared, run, sanitize, summary
from tests.sampling import exhaustive, some

_ALWAYS = range(16)
SEEDS = range(1000)
#: Tile maps, their bits, biases copied by TMA, documents, pages: what memcheck sees.
SANITIZED = (8, 9, 10, 21, 70, 89, 140, 204)
#: Processes of a test, each of which takes long to begin.
_JOBS = 4


def to_build() -> list[Prepared]:
    seeds = SEEDS if exhaustive() else sorted({*_ALWAYS, *SANITIZED})
    return [kernel for seed in seeds for kernel in prepared(drawn(seed))]


@pytest.mark.parametrize("first", some(SEEDS[::8], _ALWAYS))
def test_random_masks(first: int) -> None:
    rows = list(run(SEEDS[first : first + 8], min(_JOBS, available_cores())))
    assert [row.describe() for row in rows if row.verdict != "passed"] == [], summary(rows)


@pytest.mark.parametrize("tool", some(["memcheck", "synccheck"], ["memcheck"]))
def test_random_masks_under_the_sanitizer(tool: str) -> None:
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not on the PATH")
    compiled = list(run(SANITIZED, min(_JOBS, available_cores())))
    assert [row.describe() for row in compiled if row.verdict != "passed"] == []
    assert list(sanitize(SANITIZED, tool, sanitizer, _JOBS)) == []
