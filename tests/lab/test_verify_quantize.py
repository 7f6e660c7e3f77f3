"""``attngen verify`` and ``attngen explain`` of kernels that quantize, on the host, and which specs bring them."""

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
from tests.runtime.host_kernels import SPEC_OF_8_BITS, HostDriver, prepared_quantizers, quantizing_kernels
from tests.sampling import few

GENERAL = ["quantize_sm90a_bf16", "quantize_sm90a_fp16"]
NAMES = [*GENERAL, *(f"{name}_d{dim}" for name in GENERAL for dim in (64, 128))]


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
@few("number", [0, 1], always=0, often=(0,), ids=GENERAL)
def test_kernels_give_the_numbers_of_plain_torch_in_all_cases(number: int) -> None:
    """The same bits, but for matrix products: these add up in another order, and sums of fp16 are seldom exact."""
    with drivers.use(HostDriver()):
        trial = try_pinned(quantizing_kernels()[number], "cpu", 5, small=True)  # type: ignore[arg-type]
    assert not trial.problems, "\n".join(trial.problems)
    assert len(trial.results) == 45
    others = [one.case for one in trial.results if one.deviation is None or one.deviation.max_error]
    assert all(number == 1 and "transformed" in case and "rotated" not in case for case in others), others


class Idle(HostDriver):
    """Launches nothing: what results held before stays there."""

    def launch(self, kernels: Sequence[Launch], device: int) -> None:
        pass


class Once(HostDriver):
    """Leaves out all launches but the last."""

    def launch(self, kernels: Sequence[Launch], device: int) -> None:
        super().launch(kernels[-1:], device)


@pytest.mark.exhaustive
@pytest.mark.skipif(COMPILER is None, reason="needs g++")
@few("driver", [Idle, Once])
def test_what_is_not_written_is_told(driver: type[HostDriver]) -> None:
    with drivers.use(driver()):
        trial = try_pinned(quantizing_kernels()[0], "cpu", 5, small=True)  # type: ignore[arg-type]
    assert Verdict(prepared_quantizers()[0].plan, trial).status == "failed"
    assert any("other numbers than plain torch" in line for line in trial.problems)


def test_a_spec_of_8_bits_gets_kernels_for_each_dtype_that_is_quantized() -> None:
    prepared = [
        one.plan for one in prepare_unrendered(load_spec_text(SPEC_OF_8_BITS)) if one.plan.direction == "quantize"
    ]
    assert [one.name for one in prepared] == NAMES
    assert {(one.head_dim_qk, one.head_dim_v) for one in prepared[:2]} == {(128, 128)}
    assert [(one.head_dim_qk, one.head_dim_v) for one in prepared[2:]] == [(64, 64), (128, 128)] * 2
    others = prepare_unrendered(load_spec_text(SPEC_OF_8_BITS.replace("fp8_e4m3", "bf16")))
    assert not [one for one in others if one.plan.direction == "quantize"]


def test_they_run_on_a_gpu_alone_and_are_no_attention() -> None:
    prepared = [one for one in prepare_unrendered(load_spec_text(SPEC_OF_8_BITS)) if one.plan.direction == "quantize"]
    verdicts = list(try_interpreted(prepared, 0, 1, lambda name, total: None))
    assert [verdict.status for verdict in verdicts] == ["not run"] * len(NAMES)
    assert reason_against(prepared[0].plan, 90) == "only forward and backward kernels are measured"


def test_they_are_explained(tmp_path: Path) -> None:
    path = tmp_path / "eight.yaml"
    path.write_text(SPEC_OF_8_BITS)
    assert [one.plan.name for one in explain_helpers(path)] == NAMES
    assert "up to 256" in dict(explain_helpers(path)[0].facts())["head_dim"]
    assert explain_spec(path, NAMES[1]) == []
    assert [one.plan.name for one in explain_helpers(path, "fp16")] == [one for one in NAMES if "fp16" in one]
    assert dict(explain_helpers(path)[-1].facts())["head_dim"] == "128"
