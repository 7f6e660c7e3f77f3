"""The machine code of the kernel that makes block masks, for every architecture."""

from __future__ import annotations

import re

import pytest

from attngen.arch import ARCHES
from attngen.compile import compile_source
from attngen.compile.inspect import disassemble
from tests.compile.test_append import waits_before_memory
from tests.runtime.host_kernels import prepared_block_maskers


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "arch",
    [
        pytest.param(name, marks=[] if name == "sm90a" else pytest.mark.exhaustive)
        for name, arch in ARCHES.items()
        if not arch.portable
    ],
)
def test_rows_are_made_in_shared_memory_and_written_16_bytes_at_a_time(arch: str) -> None:
    (one,) = prepared_block_maskers(arch)
    artifact = compile_source(one.plan, one.source)
    assert artifact.manifest["resources"]["spills"] == 0
    assert artifact.manifest["resources"]["registers"] <= 48  # five blocks of a multiprocessor
    code = disassemble(artifact.cubin)
    assert not re.search(r"\b(LDL|STL|ATOM|ATOMS|RED)\b", code)
    assert {*re.findall(r"\bSTG\S*", code)} == {"STG.E.128", "STG.E.U8"}
    loads = re.findall(r"\bLDG\S*", code)
    assert len(loads) >= 5, "the first entries are on their way with their count"
    waits_before_memory(code, one.plan)
