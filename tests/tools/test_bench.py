"""All of a race but the GPU: kernels found and compiled, cases in turn, a report after each, and a lost GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from attngen.errors import CompileError
from attngen.tools.bench import kernels as bench_kernels
from attngen.tools.bench import run as tool
from attngen.tools.bench.ladder import RUNGS
from attngen.tools.bench.machine import Ceilings, Reading
from attngen.tools.bench.report import BenchReport, steps
from attngen.tools.bench.run import Options, bench, dry_run
from attngen.tools.build.pipeline import BuiltKernel, Failure, Prepared
from attngen.tools.verify.gpu import Gpu
from attngen.tools.verify.interpreter import kernel_of
from tests.tools.bench_support import SPEC, StubPeer, TickClock


class FakeMonitor:
    def __init__(self, gpu: Gpu) -> None:
        pass

    def __enter__(self) -> FakeMonitor:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def since(self, moment: float) -> Reading:
        return Reading(1500.0, 690.0, 60.0)


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clean_registry: None) -> Path:
    """A spec, and a GPU whose calls the CPU computes; one of its kernels does not compile."""
    plans: dict[str, Any] = {}

    def compile_kernels(prepared: Sequence[Prepared], **_: Any) -> tuple[dict[str, BuiltKernel], tuple[Failure, ...]]:
        plans.update({kernel.plan.name: kernel.plan for kernel in prepared})
        wrong = tuple(Failure(name, CompileError(f"{name}: no")) for name in plans if "alibi" in name)
        return {name: BuiltKernel(name, name, "built", {}) for name in plans if "alibi" not in name}, wrong

    monkeypatch.setenv("ATTNGEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(Gpu, "current", lambda: Gpu(torch.device("cpu"), 90, "a stand-in"))
    monkeypatch.setattr(Gpu, "answers", lambda self: True)
    monkeypatch.setattr(bench_kernels, "compile_kernels", compile_kernels)
    monkeypatch.setattr(bench_kernels, "read_kernel", lambda folder: kernel_of(plans[folder.name]))
    for name, value in {
        "gpu_facts": lambda gpu: {"name": gpu.name, "l2_bytes": 1},
        "ceilings": lambda gpu, clock, rounds: Ceilings(750.0, 4300.0),
        "peers": lambda: (StubPeer("good"),),
        "workspace": lambda device, call: 4711,
        "CudaClock": TickClock,
        "Monitor": FakeMonitor,
    }.items():
        monkeypatch.setattr(tool, name, value)
    path = tmp_path / "mine.yaml"
    path.write_text(SPEC)
    return path


def test_a_whole_race(spec: Path) -> None:
    seen: list[BenchReport] = []
    report = bench(spec, Options(tokens=64, seqlens=(32,), rounds=2), lambda so_far, total: seen.append(so_far))
    assert [row.case.group for row in report.rows] == [
        "causal d32 fp16",
        "full d32x16 fp16",
        "causal d32 fp16 h128/32",
        "alibi d32x16 fp16 h128/32",
    ]
    statuses = {row.case.variant: [result.status for result in row.results] for row in report.rows}
    assert statuses == {
        "causal": ["measured"] * 3, "full": ["measured"] * 2, "alibi": ["unsupported", "failed"],
    }  # fmt: skip
    (failed,) = [result for result in report.results if result.status == "failed"]
    assert failed.reason == f"{failed.kernel}: no"
    assert sorted(report.left_out.values()) == ["built for sm80, this GPU is sm90", "only dense calls are raced"]
    assert [len(so_far.rows) for so_far in seen] == [1, 2, 3, 4]
    assert report.rows[0].reading == Reading(1500.0, 690.0, 60.0)
    assert report.ceilings == Ceilings(750.0, 4300.0)
    assert report.versions["torch"] == torch.__version__
    assert not report.ok
    assert seen[2].ok
    good = bench(spec, Options(variants=("full",), tokens=64, seqlens=(32,), rounds=2), lambda so_far, total: None)
    assert good.ok
    assert good.seed != report.seed


def test_backwards_follow_forwards(spec: Path) -> None:
    spec.write_text(SPEC.replace("head_dim: {qk: 32, v: 16}, dtype: fp16,",
                                 "head_dim: {qk: 32, v: 16}, dtype: fp16, passes: [forward, backward],"))  # fmt: skip
    sizes: dict[str, Any] = {"variants": ("full",), "tokens": 64, "seqlens": (32,), "rounds": 2}
    planned = dry_run(spec, Options(**sizes))
    assert [row.case.name for row in planned.rows] == ["full d32x16 fp16 32", "full d32x16 fp16 backward 32"]
    alone = bench(spec, Options(**sizes, directions=("backward",)), lambda so_far, total: None)
    assert [row.case.name for row in alone.rows] == ["full d32x16 fp16 backward 32"]
    assert alone.ok
    assert [(result.status, result.workspace) for result in alone.results] == [("measured", 4711)] * 2
    assert len(alone.resources) == 2  # its forward was compiled as well


def test_a_lost_gpu_ends_the_race(spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gpu, "answers", lambda self: False)
    seen: list[BenchReport] = []
    report = bench(spec, Options(tokens=64, seqlens=(32,), rounds=1), lambda so_far, total: seen.append(so_far))
    assert len(report.rows) == 1
    assert report.stopped == f"the GPU does not answer since {report.rows[0].case.name}"
    assert seen == [report]
    assert not report.ok


def test_a_race_of_rungs(spec: Path) -> None:
    entries = (
        "  - {variant: causal, head_dim: 256, backend: cuda}\n  - {variant: full, head_dim: 256, backend: triton}\n"
    )
    spec.write_text(f"schema: 1\npackage: mine\narch: [sm90a]\nkernels:\n{entries}")
    report = bench(spec, Options(tokens=32, seqlens=(32,), rounds=1, ladder=True), lambda so_far, total: None)
    assert report.ok
    (row,), (ladder,) = report.rows, report.ladders
    assert row.case.suite == "grid"  # and not among the variants, too
    assert [(result.contestant, result.status) for result in row.results] == [(name, "measured") for name in RUNGS]
    assert [step.to_last is None for step in steps(ladder, row)] == [False] * len(RUNGS)
    assert set(report.resources) == {rung.plan.name for rung in ladder.rungs if rung.plan}
    assert list(report.left_out.values()) == ["only CUDA kernels have a ladder"]
