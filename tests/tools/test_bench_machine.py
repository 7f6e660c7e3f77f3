"""What is read of a machine."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from attngen.errors import CallError, NoKernelError
from attngen.runtime.module import Kernel
from attngen.runtime.registry import registry
from attngen.spec import load_spec_text, preset
from attngen.tools import bench_kernels, bench_machine, bench_peers, bench_race
from attngen.tools.bench_cases import BenchCase, bench_cases
from attngen.tools.bench_check import Oracle
from attngen.tools.bench_kernels import Team, chosen, teams
from attngen.tools.bench_machine import Memory, Monitor, Reading, parse_reading
from attngen.tools.bench_peers import Peer, Tensors, reason_against
from attngen.tools.bench_race import Track, foresee
from attngen.tools.bench_report import Result
from attngen.tools.bench_timing import Contestant, race
from attngen.tools.bench_workloads import Terms, Workload, terms_of, workload
from attngen.tools.build import Prepared, prepare
from attngen.tools.interpreter import kernel_of

def test_readings_of_nvidia_smi() -> None:
    assert parse_reading("1980, 698.31, 61\n") == Reading(1980, 698.31, 61)
    for line in ("", "[N/A], 698.31, 61", "1980, 698", "1, 2, 3, 4"):
        assert parse_reading(line) is None


def test_a_monitor_reads_medians_and_ends_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "smi.py"
    script.write_text(
        "import time\n"
        "for line in ('1000, 300, 50', 'nonsense', '1200, 500, 52', '1100, 400, 51'):\n    print(line, flush=True)\n"
        "time.sleep(600)\n"
    )
    monkeypatch.setattr(bench_machine, "_command", lambda gpu, fields: [sys.executable, str(script)])
    began = time.monotonic()
    with Monitor(None) as monitor:  # type: ignore[arg-type]
        while len(monitor._readings) < 3 and time.monotonic() < began + 30:
            time.sleep(0.01)
        assert monitor.since(began) == Reading(1100, 400, 51)
        assert monitor.since(time.monotonic()) is None
    assert monitor._process is not None
    assert monitor._process.poll() is not None


def test_without_nvidia_smi_nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_machine.shutil, "which", lambda name: None)
    with Monitor(None) as monitor:  # type: ignore[arg-type]
        assert monitor.since(0.0) is None


def test_versions_name_what_is_missing() -> None:
    found = bench_machine.versions()
    assert found["torch"] == torch.__version__
    assert found["fa3-fwd"] is None
