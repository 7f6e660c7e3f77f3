"""The machine code of kernels that append to caches, for every architecture, and how early kernels start."""

from __future__ import annotations

import re

import pytest

from attngen.arch import ARCHES
from attngen.compile import compile_source
from attngen.compile.inspect import disassemble
from attngen.plan.model import Plan
from attngen.render.source import render
from tests.plan.specs import planned
from tests.runtime.host_kernels import prepared
from tests.sampling import sampled

#: Bytes that may spill. NVRTC 12.9 and 13.0 keep one flag of a thread, set before it reads a row and read after it
#: wrote the last one, in local memory: 4 B stored and 4 B loaded, in fp16.
FLAG = 8


def waits_before_memory(code: str, plan: Plan) -> None:
    """Check that a kernel that may start early reads and writes global memory only after its wait."""
    if not plan.launch(plan.main).pdl:
        return
    assert "PREEXIT" in code
    before = code[: code.index("ACQBULK")]
    assert not re.search(r"\b(LDG|STG|LD|ST|RED|ATOM|ATOMG|UBLKCP|UTMALDG|UTMASTG)\b", before)
    assert not re.search(r"\bEXIT\b", before), "nothing waits for a block that is already gone"


@pytest.mark.exhaustive
def test_a_split_kernel_waits_before_it_touches_memory() -> None:
    one = planned("causal", backend="cuda", split_kv="true", head_dim=64)
    assert one.launch(one.main).pdl
    waits_before_memory(disassemble(compile_source(one, render(one)).cubin), one)


@pytest.mark.exhaustive
@sampled(
    every=2,
    always=1,
    arch=[name for name in ARCHES if name in ("sm80", "sm90a", "sm100a", "sm120a")],
    dtype=["bf16", "fp16", "fp32"],
)
def test_rows_move_16_bytes_at_a_time(dtype: str, arch: str) -> None:
    """In registers alone, and with one barrier, before anything is written."""
    (one,) = prepared(dtype, arch=arch)
    artifact = compile_source(one.plan, one.source)
    resources = artifact.manifest["resources"]
    assert resources["spills"] <= FLAG
    assert resources["registers"] <= 64
    code = disassemble(artifact.cubin)
    stores = re.findall(r"\bSTG\S*", code)
    assert stores == ["STG.E.128"] * len(stores)
    assert stores
    assert re.search(r"\bLDG\.E\.128", code)
    assert set(re.findall(r"\b(?:LDL|STL)\S*", code)) <= {"STL.S16", "LDL.LU"}, "no row is in local memory"
    assert code.index("BAR.SYNC") < code.index("STG.E.128")
    assert one.plan.launch("append").pdl == (ARCHES[arch].capability >= 90) == ("ACQBULK" in code)
    waits_before_memory(code, one.plan)
    assert len(re.findall(r"\bBAR\.SYNC", code)) == 1
