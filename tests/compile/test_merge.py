"""The machine code of the kernels that merge two results, for every architecture."""

from __future__ import annotations

import re

import pytest

from attngen.arch import ARCHES
from attngen.compile import compile_source
from attngen.compile.inspect import disassemble
from tests.compile.test_append import waits_before_memory
from tests.runtime.host_kernels import MERGED, prepared_mergers
from tests.sampling import sampled


@pytest.mark.exhaustive
@sampled(always=1, arch=[name for name, arch in ARCHES.items() if not arch.portable], dtype=MERGED)
def test_rows_move_16_bytes_at_a_time(arch: str, dtype: str) -> None:
    """Both parts are on their way with their log-sum-exps, and six blocks of a multiprocessor have registers."""
    (one,) = prepared_mergers(dtype, arch=arch)
    artifact = compile_source(one.plan, one.source)
    assert artifact.manifest["resources"]["spills"] == 0
    assert artifact.manifest["resources"]["registers"] <= 40
    code = disassemble(artifact.cubin)
    moved = re.findall(r"\b(?:LDG|STG|LDL|STL|LDS|STS|CALL)\S*", code)
    assert sorted(moved) == ["LDG.E", "LDG.E", "LDG.E.128", "LDG.E.128", "STG.E", "STG.E.128"]
    assert one.plan.launch("merge").pdl == (ARCHES[arch].capability >= 90) == ("ACQBULK" in code)
    waits_before_memory(code, one.plan)
