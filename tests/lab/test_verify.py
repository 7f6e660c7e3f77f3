"""``attngen verify`` without a GPU: good kernels pass, a broken template fails, and nothing is passed over silently."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from attngen import cli
from attngen.arch import ARCHES, arch_of
from attngen.build.pipeline import Prepared
from attngen.errors import CallError
from attngen.lab.verify import run as tool
from attngen.lab.verify.interpreted import interpretable
from attngen.lab.verify.retarget import retarget
from attngen.lab.verify.run import verify
from attngen.lab.verify.trial import CaseResult, Trial
from attngen.lab.verify.verdict import Verdict, VerifyReport
from attngen.plan import plan
from attngen.render import render
from attngen.schema import expand, load_spec, load_spec_text

SPEC = """
schema: 1
package: mine
arch: [sm90a]
variants:
  near:
    mask: "0 <= q_pos - kv and q_pos - kv < width"
    score: "cap * tanh(s / cap)"
    scalars: {width: {type: int32, min: 1}, cap: {type: float32, min: 0.5}}
kernels:
  - variant: [causal, near]
    head_dim: 32
    dtype: [fp16, bf16]
    tile: {m: 16, n: 16}
    backend: triton
"""


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(SPEC)
    return path


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(cli.group, ["verify", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.exhaustive
def test_good_kernels_pass_and_what_was_not_run_is_said(spec: Path) -> None:
    code, output, _ = run(spec, "--seed", 7)
    assert code == 0
    assert output.count("passed") == 3  # two rows, and the sum
    told = "bf16 products are wrong in Triton's interpreter; a copy of the spec with 'dtype: fp16' verifies the same"
    assert f"not run: 2 kernels: {told} mask and score without a GPU" in output
    assert "with exact functions: the interpreter has no inline assembly" in output
    assert "2 passed, 0 failed, 2 not run; seed 7" in output


def test_the_interpreter_asks_for_numpy(spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attngen.lab.verify.interpreted.find_spec", lambda name: None)
    code, _, error = run(spec)
    assert code == 1
    assert "needs numpy: pip install numpy" in error


@pytest.mark.exhaustive
def test_what_runs_only_on_a_gpu_names_the_spec_that_needs_none(tmp_path: Path) -> None:
    spec = tmp_path / "hopper.yaml"
    spec.write_text(
        "schema: 1\narch: sm90a\nkernels:\n  - {variant: causal, head_dim: 64, dtype: bf16}\n"
        "  - {variant: full, head_dim: 64, dtype: bf16, layout: paged}\n"
    )
    code, output, _ = run(spec)
    assert code == 1
    told = "cuda kernels run only on a GPU; a copy of the spec with 'backend: triton'"
    assert f"{told} and 'dtype: fp16' verifies the same mask and score without a GPU" in output
    assert f"{told}, 'dtype: fp16' and 'layout: dense' verifies the same mask and score without a GPU" in output
    assert "not run: 2 kernels: cuda kernels run only on a GPU\n" in output  # those that append and merge: no mask
    spec.write_text(
        "schema: 1\narch: sm90a\nkernels: [{variant: causal, head_dim: 64, dtype: fp16, backend: triton}]\n"
    )
    assert run(spec)[0] == 0


@pytest.mark.exhaustive
def test_json_tells_everything_about_each_case_and_the_same_seed_repeats_it(spec: Path) -> None:
    code, output, _ = run(spec, "--json", "--only", "fp16_d32_near", "--seed", 5)
    actual = json.loads(output)
    assert code == 0
    assert actual["ok"]
    assert (actual["passed"], actual["failed"], actual["not_run"]) == (1, 0, 0)
    (kernel,) = actual["kernels"]
    assert kernel["status"] == "passed"
    assert kernel["facts"] == ["width >= 1", "cap >= 0.5"]
    assert 0 < kernel["max_error"] <= kernel["max_error_allowed"]
    assert 0 < kernel["rmse"] <= kernel["rmse_allowed"]
    assert kernel["dead_rows"] > 0
    assert len(kernel["cases"]) >= 5
    for case in kernel["cases"]:
        assert case["ok"]
        assert case["lse_error"] <= case["lse_error_allowed"]
    assert json.loads(json.dumps(verify(spec, only="fp16_d32_near", seed=5).to_dict())) == actual


def test_each_run_has_a_seed_of_its_own(spec: Path) -> None:
    assert verify(spec, only="bf16").seed != verify(spec, only="bf16").seed


def test_a_name_that_no_kernel_has_is_refused(spec: Path) -> None:
    with pytest.raises(CallError, match="no kernel 'causl'"):
        verify(spec, only="causl")
    assert run(spec, "--only", "causl")[0] == cli.EXIT_USAGE


def test_running_nothing_is_a_failure(spec: Path) -> None:
    code, output, errors = run(spec, "--only", "bf16")
    assert code == cli.EXIT_FAILURE
    assert "0 passed, 0 failed, 2 not run" in output
    assert "nothing was verified" in errors


BREAKS = {
    "a mask that is one off": ("q_pos[:, None] >= kv_index[None, :]", "q_pos[:, None] > kv_index[None, :]"),
    "a forgotten rescale": ("row_sum * alpha", "row_sum"),
    "a wrong logarithm": ("* LN2", "* 1.0"),
    "dead rows without a test": ("dead = row_sum == 0.0", "dead = row_sum == -1.0"),
    "an unmasked store": ("mask=q_index < seqlen_q", "mask=q_index < seqlen_q + 1000"),
    "a scale that is ignored": ("scale_log2e = softmax_scale * LOG2E", "scale_log2e = LOG2E"),
}


def broken(kernel: Prepared, name: str, text: str) -> Prepared:
    """Return a kernel under another name and with another source."""
    source = replace(kernel.source, name=name, text=text.replace(kernel.plan.name, name))
    (launch,) = kernel.plan.launches
    plan = replace(kernel.plan, name=name).with_launches(replace(launch, symbol=name))
    return replace(kernel, plan=plan, given=source)


def test_broken_kernels_fail(spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (kernel, *_) = tool.prepare_unrendered(load_spec(spec))
    kernels = [broken(kernel, "unimportable", "import nonsense_that_is_not_there\n")]
    for number, (before, after) in enumerate(BREAKS.values()):
        assert before in kernel.source.text
        kernels.append(broken(kernel, f"break_{number}", kernel.source.text.replace(before, after)))
    monkeypatch.setattr(tool, "prepare_unrendered", lambda loaded: [*kernels, kernel])
    code, output, errors = run(spec, "--seed", 1)
    assert code == cli.EXIT_FAILURE
    assert f"1 passed, {len(kernels)} failed" in output
    assert "unimportable: the source is not a valid module: No module named 'nonsense_that_is_not_there'" in errors
    for number, what in enumerate(BREAKS):
        lines = [line for line in errors.splitlines() if line.startswith(f"break_{number}: ")]
        assert lines, what
        assert any("(seed " in line for line in lines), what
    (overrun,) = (number for number, what in enumerate(BREAKS) if "store" in what)
    assert f"break_{overrun}: ragged (seed 1): " in errors
    assert "bytes around the log-sum-exp were written" in errors


def test_a_variant_whose_loads_cannot_be_made_legal_fails_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "wild.yaml"
    path.write_text(
        SPEC.replace("0 <= q_pos - kv and q_pos - kv < width", "flags[kv + 100000]").replace(
            "scalars:", "tensors: {flags: {dtype: bool, shape: [seqlen_k]}}\n    scalars:"
        )
    )
    code, _, errors = run(path, "--only", "fp16_d32_near")
    assert code == cli.EXIT_FAILURE
    assert "no case is a legal call: tensor 'flags': index" in errors


def test_a_retargeted_kernel_keeps_its_tile() -> None:
    (blackwell,) = [
        kernel
        for kernel in tool.prepare_unrendered(load_spec("specs/blackwell.yaml"))
        if "sm100a_tma_bf16_d128_causal_m" in kernel.plan.name
    ]
    moved = retarget(blackwell, ARCHES["sm90a"])
    before, after = blackwell.plan, moved.plan
    assert after.arch_name == "sm90a"
    assert (after.tile_m, after.tile_n, after.stages, after.num_warps, after.loads) == (
        before.tile_m,
        before.tile_n,
        before.stages,
        before.num_warps,
        before.loads,
    )
    assert moved.source.text.replace("sm90a", "sm100a") == blackwell.source.text


def test_a_helper_is_retargeted_without_a_tile() -> None:
    """Kernels of other operations have no choices to keep."""
    text = "schema: 1\npackage: t\narch: [sm80]\nkernels:\n  - {variant: causal, head_dim: 64, layout: paged}\n"
    (append,) = (
        kernel for kernel in tool.prepare_unrendered(load_spec_text(text)) if kernel.plan.direction == "append"
    )
    assert retarget(append, ARCHES["sm90a"]).plan.arch_name == "sm90a"


def test_a_tile_that_does_not_fit_is_chosen_again() -> None:
    text = "schema: 1\npackage: t\narch: [sm100a]\nkernels:\n  - variant: causal\n    head_dim: 256\n"
    (kernel,) = expand(load_spec_text(text))
    prepared = Prepared(kernel, plan(kernel), render(plan(kernel)))
    assert retarget(prepared, ARCHES["sm120a"]).plan.arch_name == "sm120a"


@pytest.mark.parametrize(
    ("capability", "name"),
    [
        (80, "sm80"),
        (86, "sm86"),
        (87, "sm86"),
        (89, "sm89"),
        (90, "sm90a"),
        (100, "sm100a"),
        (120, "sm120a"),
        (75, None),
    ],
)
def test_the_arch_of_a_device(capability: int, name: str | None) -> None:
    actual = arch_of(capability)
    assert (actual.name if actual else None) == name


def test_only_sources_with_inline_assembly_are_rendered_again(spec: Path) -> None:
    for kernel in tool.prepare_unrendered(load_spec(spec)):
        text, remark = interpretable(kernel)
        assert "inline_asm" not in text
        assert (remark is None) == (text == kernel.source.text)


def test_verdicts_of_a_report_count(spec: Path) -> None:
    (kernel, *_) = tool.prepare_unrendered(load_spec(spec))
    crashed = Trial((CaseResult("ragged", 3, error="RuntimeError: an illegal memory access"),))
    report = VerifyReport("mine.yaml", "mine", "a GPU", 1, (Verdict(kernel.plan, crashed),))
    assert not report.ok
    assert report.verdicts[0].problems == ("ragged (seed 3): RuntimeError: an illegal memory access",)
    assert json.loads(json.dumps(report.to_dict()))["failed"] == 1
