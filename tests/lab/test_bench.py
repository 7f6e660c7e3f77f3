"""A whole benchmark but the GPU: kernels compiled, cases in turn, a report after each, and a lost GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from attngen.lab.bench import grid as tool
from attngen.lab.bench.grid import GridReport, GridSuite, steps
from attngen.lab.bench.ladder import RUNGS
from attngen.lab.bench.machine import Ceilings, Reading
from attngen.lab.bench.runner import BenchOptions, bench, dry_run
from attngen.lab.verify.gpu import Gpu
from tests.lab.bench_support import SPEC, StubPeer, compute_on_the_cpu


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clean_registry: None) -> Path:
    """A spec, and a GPU whose calls the CPU computes; one of its kernels does not compile."""
    compute_on_the_cpu(monkeypatch, refused="alibi")
    monkeypatch.setenv("ATTNGEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tool, "peers", lambda: (StubPeer("good"),))
    monkeypatch.setattr(tool, "workspace", lambda device, call: 4711)
    path = tmp_path / "mine.yaml"
    path.write_text(SPEC)
    return path


def run(spec: Path, seen: list[GridReport] | None = None, **options: Any) -> GridReport:
    def observe(so_far: GridReport, line: str) -> None:
        if seen is not None:
            seen.append(so_far)

    return bench(GridSuite(spec, BenchOptions(**options), 90), observe)


@pytest.mark.exhaustive
def test_a_whole_run(spec: Path) -> None:
    seen: list[GridReport] = []
    report = run(spec, seen, tokens=64, seqlens=(32,), rounds=2)
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
    assert sorted(report.left_out.values()) == ["built for sm80, this GPU is sm90", "only dense calls are measured"]
    assert [len(so_far.rows) for so_far in seen] == [1, 2, 3, 4]
    assert report.rows[0].reading == Reading(1500.0, 690.0, 60.0)
    assert report.ceilings == Ceilings(750.0, 4300.0)
    assert report.versions["torch"] == torch.__version__
    assert not report.ok
    assert seen[2].ok
    good = run(spec, variants=("full",), tokens=64, seqlens=(32,), rounds=2)
    assert good.ok
    assert good.seed != report.seed


def test_backward_passes_follow_forward_passes(spec: Path) -> None:
    spec.write_text(SPEC.replace("head_dim: {qk: 32, v: 16}, dtype: fp16,",
                                 "head_dim: {qk: 32, v: 16}, dtype: fp16, passes: [forward, backward],"))  # fmt: skip
    sizes: dict[str, Any] = {"variants": ("full",), "tokens": 64, "seqlens": (32,), "rounds": 2}
    planned = dry_run(GridSuite(spec, BenchOptions(**sizes), 90))
    assert [row.case.name for row in planned.rows] == ["full d32x16 fp16 32", "full d32x16 fp16 backward 32"]
    alone = run(spec, **sizes, directions=("backward",))
    assert [row.case.name for row in alone.rows] == ["full d32x16 fp16 backward 32"]
    assert alone.ok
    assert [(result.status, result.workspace) for result in alone.results] == [("measured", 4711)] * 2
    assert len(alone.resources) == 2  # its forward was compiled as well


def test_a_lost_gpu_ends_the_run(spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gpu, "answers", lambda self: False)
    seen: list[GridReport] = []
    report = run(spec, seen, tokens=64, seqlens=(32,), rounds=1)
    assert len(report.rows) == 1
    assert report.stopped == f"the GPU has not responded since {report.rows[0].case.name}"
    assert seen == [report]
    assert not report.ok


def test_rungs_are_timed_side_by_side(spec: Path) -> None:
    entries = (
        "  - {variant: causal, head_dim: 256, backend: cuda}\n  - {variant: full, head_dim: 256, backend: triton}\n"
    )
    spec.write_text(f"schema: 1\npackage: mine\narch: [sm90a]\nkernels:\n{entries}")
    report = run(spec, tokens=32, seqlens=(32,), rounds=1, ladder=True)
    assert report.ok
    (row,), (ladder,) = report.rows, report.ladders
    assert row.case.suite == "grid"  # and not among the variants, too
    assert [(result.contender, result.status) for result in row.results] == [(name, "measured") for name in RUNGS]
    assert [step.to_last is None for step in steps(ladder, row)] == [False] * len(RUNGS)
    assert set(report.resources) == {rung.plan.name for rung in ladder.rungs if rung.plan}
    assert list(report.left_out.values()) == ["only CUDA kernels have a ladder"]
