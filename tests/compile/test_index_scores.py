"""The machine code of kernels that score keys for an index, and of those that select scores."""

from __future__ import annotations

import re
from functools import cache

import pytest

from attngen.build.pipeline import Prepared, prepare_unrendered
from attngen.compile import compile_source
from attngen.compile.artifact import Artifact
from attngen.compile.inspect import disassemble
from attngen.schema import load_spec_text
from tests.compile.test_append import waits_before_memory
from tests.sampling import few

SPEC = """
schema: 1
package: index
arch: [sm90a]
kernels:
  - {variant: causal, head_dim: [64, 128], dtype: [fp8_e4m3, bf16], layout: [dense, paged], passes: index_scores}
"""


@cache
def prepared() -> dict[str, Prepared]:
    return {one.plan.name: one for one in prepare_unrendered(load_spec_text(SPEC))}


def compiled(name: str) -> Artifact:
    one = prepared()[name]
    return compile_source(one.plan, one.source)


@few(
    "name",
    [
        "index_scores_sm90a_fp8_e4m3_d64_causal",
        "index_scores_sm90a_fp8_e4m3_d128_causal_paged",
        "index_scores_sm90a_bf16_d128_causal",
        "index_scores_sm90a_bf16_d128_causal_paged",
    ],
    always=0,
    often=(0, 3),
)
def test_heads_of_a_query_stay_in_registers(name: str) -> None:
    artifact, one = compiled(name), prepared()[name].plan
    assert artifact.manifest["resources"]["spills"] == 0
    assert not artifact.manifest["resources"]["serialized_wgmma"]
    code = disassemble(artifact.cubin)
    assert not re.search(r"\b(LDL|STL)\b", code), "nothing is spilled"
    for launch in artifact.manifest["launches"]:
        few = launch["name"].endswith("_few")
        assert launch["resources"]["registers"] <= (128 if few else 168)
    assert one.launch("heads_64").shared_bytes <= one.arch.shared_memory


@pytest.mark.exhaustive
def test_selections_wait_before_memory_and_fit_three_blocks() -> None:
    artifact, plan = compiled("topk_sm90a"), prepared()["topk_sm90a"].plan
    assert artifact.manifest["resources"]["spills"] <= 20  # two values with NVRTC 12.9, five with 13.5
    assert artifact.manifest["resources"]["registers"] <= 40  # 1,536 threads of a multiprocessor
    assert 3 * (plan.launch("topk").shared_bytes + 1024) <= 228 * 1024
    code = disassemble(artifact.cubin)
    assert len(re.findall(r"\bLDG\.E\.EF\.128", code)) >= 2, "a thread loads 16 bytes at once, which are read once"
    waits_before_memory(code, plan)
