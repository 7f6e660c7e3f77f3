"""``attngen verify`` and ``attngen explain`` of kernels that merge results, on the host."""

from __future__ import annotations

from pathlib import Path

import pytest

from attngen.build.pipeline import prepare_unrendered
from attngen.inspect.operations import explain_helpers
from attngen.lab.verify.gpu import try_pinned
from attngen.lab.verify.verdict import Verdict
from attngen.runtime.device import driver as drivers
from attngen.schema import load_spec_text
from tests.host_compiler import COMPILER
from tests.lab.test_verify_append import Idle, Short
from tests.runtime.host_kernels import MERGED, SPEC, HostDriver, merging_kernels, prepared_mergers
from tests.sampling import few


@pytest.mark.exhaustive
@pytest.mark.skipif(COMPILER is None, reason="needs g++")
@few("dtype", MERGED)
def test_kernels_are_right_in_all_cases(dtype: str) -> None:
    with drivers.use(HostDriver()):
        trial = try_pinned(merging_kernels()[MERGED.index(dtype)], "cpu", 5, small=True)  # type: ignore[arg-type]
    assert not trial.problems, "\n".join(trial.problems)
    assert len(trial.results) == 24
    assert Verdict(prepared_mergers(dtype)[0].plan, trial).status == "passed"


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
@few("driver", [Idle, Short])
def test_what_is_not_written_is_told(driver: type[HostDriver]) -> None:
    with drivers.use(driver()):
        trial = try_pinned(merging_kernels()[0], "cpu", 5, small=True)  # type: ignore[arg-type]
    assert Verdict(prepared_mergers("bf16")[0].plan, trial).status == "failed"
    assert any("beyond their rounding" in line for line in trial.problems)


CACHE = "  - {variant: causal, dtype: fp16, kv_dtype: fp8_e4m3, head_dim: 64, layout: paged, split_kv: true}"
EIGHT = "  - {variant: causal, dtype: fp8_e4m3, head_dim: 64, layout: paged}"


@pytest.mark.parametrize(
    ("entries", "dtypes"),
    [
        (SPEC.partition("kernels:\n")[2], ["bf16", "fp16"]),
        (SPEC.partition("kernels:\n")[2].replace("paged", "dense"), []),
        (CACHE, ["fp16"]),
        (EIGHT, ["bf16"]),
    ],
)
def test_a_spec_gets_one_kernel_for_each_dtype_of_outputs_with_pages(entries: str, dtypes: list[str]) -> None:
    spec = load_spec_text(f"schema: 1\npackage: merging\narch: [sm90a]\nkernels:\n{entries}")
    names = [one.plan.name for one in prepare_unrendered(spec) if one.plan.direction == "merge"]
    assert names == [f"merge_sm90a_{dtype}" for dtype in dtypes]


def test_they_are_explained(tmp_path: Path) -> None:
    path = tmp_path / "merging.yaml"
    path.write_text(SPEC)
    (actual,) = explain_helpers(path, "merge_sm90a_fp16")
    assert dict(actual.facts())["block"].startswith("256 threads of 16 B")
