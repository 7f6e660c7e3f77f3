"""The machine code of the kernels that merge results over parts of the keys."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from attngen.arch import ARCHES
from attngen.compile import compile_source
from attngen.compile.inspect import disassemble
from attngen.plan import plan
from attngen.render import render
from attngen.schema import expand, load_spec_text, mergers
from tests.compile.test_append import waits_before_memory
from tests.runtime.host_kernels import prepared_mergers

CUDA = [name for name, arch in ARCHES.items() if not arch.portable]


@pytest.mark.parametrize(
    ("arch", "dtype"),
    [
        pytest.param(arch, dtype, marks=[] if (arch, dtype) == ("sm90a", "bf16") else pytest.mark.exhaustive)
        for arch in CUDA
        for dtype in ("bf16", "fp16")
    ],
)
def test_a_lane_reads_and_writes_16_bytes(arch: str, dtype: str) -> None:
    (spec,) = (one.spec for one in prepared_mergers() if one.spec.dtype == dtype)
    planned = plan(replace(spec, arch=arch))
    artifact = compile_source(planned, render(planned))
    assert artifact.manifest["resources"]["spills"] == 0
    assert artifact.manifest["resources"]["registers"] <= 64
    code = disassemble(artifact.cubin)
    assert len(re.findall(r"\bLDG\.E\.128", code)) >= 4, "two loads of each part are on their way at once"
    assert len(re.findall(r"\bSTG\.E\.128", code)) >= 2
    waits_before_memory(code, planned)


def test_which_kernels_bring_one() -> None:
    """Forward kernels of listed keys in 16 bits: one for each arch and dtype."""
    text = """
        schema: 1
        package: mine
        arch: [sm90a, sm80]
        variants:
          listed: {keys: index}
        kernels:
          - {variant: listed, dtype: [bf16, fp16], head_dim: [64, 128], passes: [forward, backward]}
          - {variant: causal, dtype: [bf16, fp16], head_dim: 64}
    """
    brought = mergers(expand(load_spec_text(text)))
    assert [(one.arch, one.dtype) for one in brought] == [
        (arch, dtype) for arch in ("sm90a", "sm80") for dtype in ("bf16", "fp16")
    ]
    assert not mergers([one for one in expand(load_spec_text(text)) if one.variant.name == "causal"])
