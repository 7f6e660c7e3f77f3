"""The machine code of kernels that append to caches, for every architecture."""

from __future__ import annotations

import re

import pytest

from attngen.arch import ARCHES
from attngen.compile import compile_source
from attngen.compile.inspect import disassemble
from tests.runtime.host_kernels import prepared


@pytest.mark.parametrize("arch", [name for name in ARCHES if name in ("sm80", "sm90a", "sm100a", "sm120a")])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_rows_move_16_bytes_at_a_time(dtype: str, arch: str) -> None:
    """In registers alone, and with one barrier, before anything is written."""
    (one,) = prepared(dtype, arch=arch)
    artifact = compile_source(one.plan, one.source)
    resources = artifact.manifest["resources"]
    assert resources["spills"] == 0
    assert resources["registers"] <= 64
    code = disassemble(artifact.cubin)
    stores = re.findall(r"\bSTG\S*", code)
    assert stores == ["STG.E.128"] * len(stores)
    assert stores
    assert re.search(r"\bLDG\.E\.128", code)
    assert not re.search(r"\b(LDL|STL)\b", code)
    assert code.index("BAR.SYNC") < code.index("STG.E.128")
    assert len(re.findall(r"\bBAR\.SYNC", code)) == 1
