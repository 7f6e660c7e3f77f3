"""``attngen verify`` and ``attngen explain`` of kernels that append to caches, on the host."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from attngen.build.pipeline import prepare_unrendered
from attngen.inspect.of_spec import explain_spec
from attngen.inspect.operations import explain_helpers
from attngen.lab.bench.kernels import reason_against
from attngen.lab.verify.gpu import try_pinned
from attngen.lab.verify.interpreted import try_interpreted
from attngen.lab.verify.verdict import Verdict
from attngen.runtime.device import driver as drivers
from attngen.runtime.device.interface import Launch
from attngen.schema import load_spec_text
from tests.host_compiler import COMPILER
from tests.runtime.host_kernels import APPENDED, SPEC, HostDriver, kernels, plans
from tests.sampling import few


@pytest.mark.exhaustive
@pytest.mark.skipif(COMPILER is None, reason="needs g++")
@few("dtype", APPENDED, often=(0, 3))
def test_kernels_are_the_same_as_plain_torch_in_all_cases(dtype: str) -> None:
    (kernel,) = [one for one in kernels() if one.name.endswith(f"sm90a_{dtype}")]
    with drivers.use(HostDriver()):
        trial = try_pinned(kernel, "cpu", 5, small=True)  # type: ignore[arg-type]
    assert not trial.problems, "\n".join(trial.problems)
    assert len(trial.results) == 60
    assert Verdict(plans(dtype)[0], trial).to_dict()["max_error"] == 0.0


class Idle(HostDriver):
    """Launches nothing."""

    def launch(self, kernels: Sequence[Launch], device: int) -> None:
        pass


class Short(HostDriver):
    """Launches every kernel with one block less."""

    def launch(self, kernels: Sequence[Launch], device: int) -> None:
        super().launch([(function, grid - 1, *rest) for function, grid, *rest in kernels], device)  # type: ignore[misc]


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
@few("driver", [Idle, Short])
def test_what_is_not_written_is_told(driver: type[HostDriver]) -> None:
    with drivers.use(driver()):
        trial = try_pinned(kernels()[0], "cpu", 5, small=True)  # type: ignore[arg-type]
    assert Verdict(plans("bf16")[0], trial).status == "failed"
    assert any("other bits than plain torch" in line for line in trial.problems)


def test_a_spec_gets_one_kernel_for_each_dtype_with_pages() -> None:
    prepared = prepare_unrendered(load_spec_text(SPEC))
    appending = [one.plan for one in prepared if one.plan.direction == "append"]
    assert [one.name for one in appending] == ["append_sm90a_bf16", "append_sm90a_fp16"]
    assert {(one.head_dim_qk, one.head_dim_v) for one in appending} == {(192, 128)}
    dense = prepare_unrendered(load_spec_text(SPEC.replace("paged", "dense")))
    assert not [one for one in dense if one.plan.direction == "append"]


def test_they_run_on_a_gpu_alone_and_are_no_attention() -> None:
    prepared = [one for one in prepare_unrendered(load_spec_text(SPEC)) if one.plan.direction == "append"]
    verdicts = list(try_interpreted(prepared, 0, 1, lambda name, total: None))
    assert [verdict.status for verdict in verdicts] == ["not run"] * 2
    assert reason_against(prepared[0].plan, 90) == "only dense calls are measured"


def test_they_are_explained(tmp_path: Path) -> None:
    path = tmp_path / "appending.yaml"
    path.write_text(SPEC)
    actual = [one for one in explain_helpers(path) if one.plan.direction == "append"]
    assert [one.plan.name for one in actual] == ["append_sm90a_bf16", "append_sm90a_fp16"]
    assert dict(actual[0].facts())["head_dim"].endswith("up to 192 for q and k, 128 for v")
    assert explain_spec(path, "append_sm90a_fp16") == []
    assert [one.plan.name for one in explain_helpers(path, "append_sm90a_fp16")] == ["append_sm90a_fp16"]
    assert all(one.plan.direction == "forward" for one in explain_spec(path, seqlens=[64]))
