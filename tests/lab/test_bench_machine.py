"""Properties of a machine, as the benchmark reads them."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from attngen.lab.bench import machine as bench_machine
from attngen.lab.bench.machine import Memory, Monitor, Reading, parse_reading
from attngen.lab.verify.gpu import Gpu
from tests.lab.bench_support import TickClock


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
    monkeypatch.setattr(bench_machine, "_ask", lambda gpu, fields: None)
    began = time.monotonic()
    with Monitor(None) as monitor:  # type: ignore[arg-type]
        while len(monitor._readings) < 3 and time.monotonic() < began + 600:
            time.sleep(0.01)
        assert monitor.since(began) == Reading(1100, 400, 51)
        assert monitor.since(time.monotonic()) is None
    assert monitor._process is not None
    assert monitor._process.poll() is not None


def test_without_nvidia_smi_nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_machine.shutil, "which", lambda name: None)
    with Monitor(None) as monitor:  # type: ignore[arg-type]
        assert monitor.since(0.0) is None


def test_versions_name_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_machine, "DISTRIBUTIONS", ("torch", "no-such-distribution"))
    versions = bench_machine.versions()
    assert versions["torch"] == torch.__version__
    assert versions["no-such-distribution"] is None


def test_poisoned_memory_holds_nan_and_tells_it() -> None:
    memory = Memory([(3, 4), (5,)], torch.bfloat16, torch.device("cpu"))
    assert [new().shape for new in memory._new] == [(3, 4), (5,)]
    assert all(bool(new().isnan().all()) for new in memory._new)
    assert memory._new[0]().dtype == torch.bfloat16
    out = torch.zeros(3, 4)
    assert memory.intact(out)
    assert memory.intact((out, out[0]))
    out[2, 3] = torch.nan
    assert not memory.intact(out)
    assert not memory.intact((out[0], out))


def test_ceilings_count_operations_and_bytes_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_machine, "MATRIX", 16)
    monkeypatch.setattr(bench_machine, "COPY_BYTES", 1024)
    reached = bench_machine.ceilings(Gpu(torch.device("cpu"), 90, "a stand-in"), TickClock(), 2)  # 10 ms a call
    assert reached.matrix_tflops == pytest.approx(2 * 16**3 / 10e-3 / 1e12)
    assert reached.copy_gbps == pytest.approx(2 * 1024 / 10e-3 / 1e9)


@pytest.mark.parametrize("answers", [True, False])
def test_facts_are_those_of_this_very_card(answers: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        f"#!{sys.executable}\nimport sys\n"
        "assert sys.argv[1] == '--id=GPU-1234', sys.argv\n"
        "assert sys.argv[2].startswith('--query-gpu=driver_version'), sys.argv\n"
        f"print('580.159.04, 700.00, [N/A]')\nsys.exit({0 if answers else 9})\n"
    )
    tool.chmod(0o755)
    properties = SimpleNamespace(uuid="1234", multi_processor_count=132, L2_cache_size=2**26, total_memory=2**37)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(bench_machine.shutil, "which", lambda name: str(tool))
    assert bench_machine.gpu_facts(Gpu(torch.device("cpu"), 90, "a stand-in")) == {
        "name": "a stand-in", "capability": 90, "multiprocessors": 132, "l2_bytes": 2**26, "memory_bytes": 2**37,
        "driver": "580.159.04" if answers else None, "power_limit_watts": 700.0 if answers else None,
        "max_sm_mhz": None,
    }  # fmt: skip
