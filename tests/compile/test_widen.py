"""The machine code of kernels that widen caches, for every architecture that reads 8 bits."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from attngen.arch import ARCHES
from attngen.compile import compile_source
from attngen.compile.inspect import disassemble
from attngen.errors import PlanError
from attngen.plan import plan
from attngen.render import render
from tests.compile.test_append import waits_before_memory
from tests.runtime.host_kernels import prepared_wideners
from tests.sampling import few

READING = [name for name, arch in ARCHES.items() if arch.capability >= 89]


@pytest.mark.exhaustive
@few(
    ("arch", "dtype"),
    [
        pytest.param(arch, dtype, marks=[] if (arch, dtype) == ("sm90a", "bf16") else pytest.mark.exhaustive)
        for arch in READING
        for dtype in ("bf16", "fp16")
    ],
    often=(0,),
)
def test_a_lane_reads_8_bytes_and_writes_16(arch: str, dtype: str) -> None:
    (spec,) = (one.spec for one in prepared_wideners() if one.spec.dtype == dtype)
    planned = plan(replace(spec, arch=arch))
    artifact = compile_source(planned, render(planned))
    assert artifact.manifest["resources"]["spills"] == 0
    assert artifact.manifest["resources"]["registers"] <= 128  # 512 threads of a multiprocessor
    code = disassemble(artifact.cubin)
    assert len(re.findall(r"\bLDG\.E\.64", code)) >= 4, "four loads of a thread are on their way at once"
    assert len(re.findall(r"\bSTG\.E\.128", code)) >= 4
    waits_before_memory(code, planned)


def test_older_devices_are_refused() -> None:
    spec = prepared_wideners()[0].spec
    with pytest.raises(PlanError, match="cuda has no widen kernel for sm80; arch sm89, sm90a, "):
        plan(replace(spec, arch="sm80"))
