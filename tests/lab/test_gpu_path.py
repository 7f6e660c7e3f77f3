"""The GPU's way through verify, on a driver that decodes each launch and computes it with the reference."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from attngen.build.pipeline import BuiltKernel, Failure, Prepared, plans, prepare_unrendered
from attngen.compile.parameters import triton_parameters
from attngen.errors import CompileError, NoKernelError
from attngen.inspect.cases import Case
from attngen.lab.verify import gpu as verify_gpu
from attngen.lab.verify.gpu import Gpu, try_on_gpu
from attngen.lab.verify.inputs import Element, make_inputs
from attngen.lab.verify.interpreter import kernel_of
from attngen.lab.verify.poison import poisoned
from attngen.lab.verify.trial import Launch, Trial
from attngen.lab.verify.verdict import Verdict, VerifyReport
from attngen.plan import Plan
from attngen.runtime.device import driver as drivers
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.launch.pinned import Buffers, Pinned
from attngen.schema import load_spec
from attngen.store.jobs import Job, JobResult
from tests.runtime.support import FakeDriver, main_of

SPEC = """
schema: 1
package: mine
kernels:
  - variant: [causal, sliding_window, relative_bias, allowed]
    arch: sm90a
    head_dim: 32
    dtype: fp16
    tile: {m: 16, n: 16}
    layout: [dense, varlen]
    backend: triton
  - variant: full
    arch: [sm80, sm120a]
    head_dim: 48
    dtype: fp32
    loads: pointer
    alignment: element
"""


def loadable(plan: Plan) -> Kernel:
    """Return a kernel whose image is its manifest, which the driver reads."""
    manifest = dict(kernel_of(plan).manifest)
    metadata = [{"block_size": argument.box, "swizzle": 0} for argument in plan.arguments if argument.box]
    main_of(manifest)["parameters"] = [row.to_dict() for row in triton_parameters(plan.arguments, metadata)]
    image = json.dumps(manifest).encode()
    return Kernel(manifest, lambda: image, origin=plan.name)


@pytest.fixture
def driver() -> Iterator[FakeDriver]:
    fake = FakeDriver()
    with drivers.use(fake):
        yield fake


@pytest.fixture
def kernels(tmp_path: Path) -> list[Prepared]:
    path = tmp_path / "mine.yaml"
    path.write_text(SPEC)
    return prepare_unrendered(load_spec(path))


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plans: dict[str, Plan] = {}

    def compile_kernels(prepared: Sequence[Prepared], **_: Any) -> tuple[dict[str, BuiltKernel], tuple[Failure, ...]]:
        plans.update({kernel.plan.name: kernel.plan for kernel in prepared})
        wrong = tuple(Failure(name, CompileError(f"{name}: no")) for name in plans if "relative_bias_varlen" in name)
        failed = {failure.name for failure in wrong}
        return {name: BuiltKernel(name, name, "built", {}) for name in plans if name not in failed}, wrong

    monkeypatch.setenv("ATTNGEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(verify_gpu, "compile_kernels", compile_kernels)
    monkeypatch.setattr(verify_gpu, "read_kernel", lambda folder: loadable(plans[folder.name]))

    def quickly(kernel: Kernel, launch: Launch, device: torch.device, seed: int, *, small: bool) -> Trial:
        assert not small
        return try_kernel(kernel, launch, device, seed, small=True)

    try_kernel = verify_gpu.try_kernel
    monkeypatch.setattr(verify_gpu, "try_kernel", quickly)


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in for a driver is here, and in no worker."""

    def run_jobs(jobs: Sequence[Job], workers: int) -> Iterator[JobResult]:
        assert workers == 1
        for index, job in enumerate(jobs):
            folder, device, seed = job.arguments
            yield JobResult(index, verify_gpu.try_pinned(loadable_of(folder), device, seed, small=False))

    def loadable_of(folder: str) -> Kernel:
        return verify_gpu.read_kernel(Path(folder))

    monkeypatch.setattr(verify_gpu, "run_jobs", run_jobs)


def verdicts(kernels: Sequence[Prepared], *, retargeted: bool) -> dict[str, Verdict]:
    gpu = Gpu(torch.device("cpu"), 90, "a stand-in")
    seen: list[str] = []
    actual = list(try_on_gpu(kernels, gpu, 3, None, lambda name, total: seen.append(name), retargeted=retargeted))
    assert set(seen) >= {verdict.plan.name for verdict in actual if verdict.status != "not run"}
    assert len(actual) == len(kernels)
    return {verdict.plan.name: verdict for verdict in actual}


@pytest.mark.usefixtures("in_this_process")
def test_kernels_of_this_gpu_are_run_and_others_are_not(driver: FakeDriver, kernels: list[Prepared]) -> None:
    results = verdicts(kernels, retargeted=False)
    for name, verdict in results.items():
        if "sm90a" not in name:
            assert verdict.status == "not run"
            assert "built for sm" in str(verdict.reason)
            assert "this GPU is sm90; --retarget" in str(verdict.reason)
        elif "relative_bias_varlen" in name:
            assert verdict.problems == (f"{name}: no",)
        else:
            assert verdict.problems == ()
            assert verdict.trial is not None
            assert len(verdict.trial.results) >= 5
            assert verdict.trial.tally.dead_rows > 0
    assert any("classify" in launch.symbol for launch in driver.launches)


@pytest.mark.usefixtures("in_this_process")
def test_kernels_of_other_gpus_are_retargeted(driver: FakeDriver, kernels: list[Prepared]) -> None:
    others = [kernel for kernel in kernels if kernel.plan.arch_name != "sm90a"]
    results = verdicts(others, retargeted=True)
    assert len(results) == 2
    for verdict in results.values():
        assert verdict.status == "passed"
        assert str(verdict.remark).startswith("retargeted: ran as fwd_sm90a_ptr_fp32_d48_full")


def test_a_kernel_that_crashes_is_named_and_the_rest_run_in_fresh_processes(
    kernels: list[Prepared], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One ends its process, one breaks what its process holds, one does nothing wrong: each costs itself."""
    monkeypatch.setattr(verify_gpu, "TRIER", "tests.lab.crashing:try_one")
    chosen = [kernel for kernel in kernels if kernel.plan.arch_name == "sm90a" and "relative" not in kernel.plan.name]
    assert len(chosen) == 6
    results = verdicts(chosen, retargeted=False)
    assert [verdict.plan.name for verdict in results.values()] == [kernel.plan.name for kernel in chosen]
    processes = []
    for name, verdict in results.items():
        if "sliding_window" in name:
            assert (verdict.status, verdict.crashed) == ("failed", True)
            (problem,) = verdict.problems
            assert problem.startswith(f"{name}: crashed: its process died of SIGABRT")
            assert "CUDA error: misaligned address" in problem
        elif "allowed" in name:
            assert (verdict.status, verdict.crashed) == ("failed", True)
            assert verdict.problems == ("ragged (seed 3): crashed: RuntimeError: CUDA error: launch failure",)
        else:
            assert (verdict.status, verdict.crashed) == ("not run" if verdict.trial is None else "passed", False)
            assert verdict.trial is not None
            processes.append(verdict.trial.results[0].case)
    assert len(processes) == 2
    report = VerifyReport("mine.yaml", "mine", "a GPU", 3, tuple(results.values())).to_dict()
    assert (report["passed"], report["failed"]) == (2, 4)
    assert [row["crashed"] for row in report["kernels"]].count(True) == 4


@pytest.mark.usefixtures("in_this_process")
def test_a_kernel_that_breaks_the_device_fails_with_the_case_that_did(
    driver: FakeDriver, kernels: list[Prepared], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later cases would fail as well, whatever they launch."""
    launches = iter(range(2))

    def launch(*_: Any) -> None:
        if next(launches) == 1:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(driver, "launch", launch)
    (results,) = verdicts([k for k in kernels if "d32_causal" in k.plan.name][:1], retargeted=False).values()
    assert (results.status, results.crashed) == ("failed", True)
    assert results.trial is not None
    assert [result.broken for result in results.trial.results] == [False, True]
    assert any(
        line.endswith("RuntimeError: CUDA error: an illegal memory access was encountered") for line in results.problems
    )


def test_a_pinned_kernel_refuses_what_it_does_not_take(driver: FakeDriver, kernels: list[Prepared]) -> None:
    plan = kernels[0].plan
    kernel = loadable(plan)
    inputs = make_inputs(plan.variant, Case("wide", (20,), (20,)), plan.layout, Element("fp16", 64, 64), "cpu", 0)
    call = inputs.bind(plan.variant)
    buffers = poisoned(kernel, call, inputs.q, inputs.k, inputs.v).buffers
    with pytest.raises(NoKernelError, match="head_dim of q and k is 32, the call has 64"):
        Pinned(kernel, call, buffers)


def test_a_pinned_kernel_writes_where_it_is_told(driver: FakeDriver, kernels: list[Prepared]) -> None:
    plan = kernels[0].plan
    kernel = loadable(plan)
    inputs = make_inputs(
        plan.variant, Case("strided", (20,) * 2, (30,) * 2), plan.layout, Element("fp16", 32, 32), "cpu", 0
    )
    call = inputs.bind(plan.variant)
    memory = poisoned(kernel, call, inputs.q, inputs.k, inputs.v)
    Pinned(kernel, call, memory.buffers)()
    around = torch.full((2, 22, 4, 48), 9.0, dtype=torch.float16)
    inner = around[:, 1:21, 1:3, 8:40]
    lse = torch.empty(call.lse_shape())
    launch = Pinned(kernel, call, Buffers(inputs.q, inputs.k, inputs.v, inner, lse))
    launch()
    launch()
    assert torch.equal(inner, memory.buffers.out)
    inner.fill_(9.0)
    assert (around == 9).all()


@pytest.mark.exhaustive
def test_the_gpu_tests_name_kernels_that_their_spec_has() -> None:
    from tests.gpu import family, sanitized, test_calls, test_memory

    known = family.labels()
    assert len(known) == len(plans(load_spec(family.SPEC)))
    assert {*sanitized.SUBJECTS, *test_memory.RACES} <= set(known)
    assert test_calls.DENSE
