"""The machine code of kernels that quantize, for every architecture that rounds to 8 bits."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from attngen.arch import ARCHES
from attngen.build.pipeline import Prepared
from attngen.compile import compile_source
from attngen.compile.inspect import disassemble
from attngen.errors import PlanError
from attngen.plan import plan
from tests.compile.test_append import waits_before_memory
from tests.runtime.host_kernels import prepared_quantizers
from tests.sampling import few

ROUNDING = [name for name, arch in ARCHES.items() if arch.capability >= 89]


# often on the arch on which registers were too few before, and on Hopper
@few("one", prepared_quantizers(*ROUNDING), always=0, often=(1, 2), ids=lambda one: one.plan.name)
def test_a_thread_keeps_its_numbers_in_registers(one: Prepared) -> None:
    """128 registers, so that a block may have 512 threads; 16 bytes in, 16 or 8 out, scales and maxima beside."""
    artifact = compile_source(one.plan, one.source)
    resources = artifact.manifest["resources"]
    assert resources["spills"] == 0, "else the only plan there is would be compiled twice"
    assert resources["registers"] <= 128
    code = disassemble(artifact.cubin)
    assert not re.search(r"\b(LDL|STL)\b", code)
    assert {"ST.E.128", "ST.E.64", "STG.E"} <= set(re.findall(r"\bSTG?\.E\S*", code))
    assert re.search(r"\bLDG\.E\.128", code)
    assert len(re.findall(r"\bSHFL\.BFLY", code)) == 2 * 64, "one for each number and stage, in all sizes together"
    for form in ("E4M3", "E5M2"):
        assert len(re.findall(rf"\bF2FP\S*{form}", code)) >= 16, "two numbers each"
    assert one.plan.launch("quantize").pdl == (one.plan.arch.capability >= 90) == ("ACQBULK" in code)
    waits_before_memory(code, one.plan)


@few("one", prepared_quantizers(tiles=True), always=0, often=(1,), ids=lambda one: one.plan.name)
def test_tiles_are_multiplied_and_nothing_is_spilled(one: Prepared) -> None:
    """A multiprocessor has one block of 512 threads."""
    artifact = compile_source(one.plan, one.source)
    for launch in artifact.manifest["launches"]:
        assert launch["resources"]["registers"] <= 128
        assert launch["resources"]["shared_memory"] <= one.plan.arch.shared_memory
    parts = re.split(r"^//-+ \.text\.(\w+) -+$", disassemble(artifact.cubin), flags=re.MULTILINE)
    every = dict(zip(parts[1::2], parts[2::2], strict=True))
    symbols = [launch.symbol for launch in one.plan.launches]
    main, _, sample, sampled, rotated = (every[symbol] for symbol in symbols)
    assert [len(re.findall(r"\bHGMMA\b", every[symbol])) for symbol in symbols] == [8, 16, 0, 8, 0]
    for symbol, code in every.items():  # scales of heads of 64 columns spill one register
        spilled = len(re.findall(r"\b(?:LDL|STL)\b", code))
        assert spilled <= (2 if symbol.endswith("_kept") and one.plan.head_dim_qk == 64 else 0)
        assert bool(re.search(r"\bUTMALDG\b", code)) is (code is not sample)
    assert [symbol for symbol in symbols if re.search(r"\bUBLKCP\b", every[symbol])] == symbols[4:], "angles"
    waits_before_memory(main, one.plan)
    waits_before_memory(rotated, one.plan)
    assert "PREEXIT" in sample
    assert "ACQBULK" in sampled
    assert [row.get("cooperative", False) for row in artifact.manifest["launches"]] == [
        False,
        True,
        False,
        False,
        False,
    ]


@pytest.mark.parametrize("arch", ["sm80", "sm86"])
def test_older_devices_are_refused(arch: str) -> None:
    spec = prepared_quantizers()[0].spec
    with pytest.raises(PlanError, match=f"cuda has no quantize kernel for {arch}; arch sm89, sm90a, "):
        plan(replace(spec, arch=arch))
