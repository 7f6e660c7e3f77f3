"""Worker processes: a bad job fails alone, and says why."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from attngen.errors import CompileError, DiskFullError, InternalError, SpecError
from attngen.store import limits
from attngen.store.jobs import Job, JobResult, run_jobs, worker_processes
from attngen.store.spare import SpareWorkers
from tests.sampling import few
from tests.store import fakes

FAKES = "tests.store.fakes"

pytestmark = pytest.mark.usefixtures("fresh_workers")


def job(name: str, *arguments: Any) -> Job:
    return Job(name, f"{FAKES}:{name}", arguments)


def run(jobs: list[Job], workers: int = 2, **options: Any) -> list[JobResult]:
    return sorted(run_jobs(jobs, workers, **options), key=lambda result: result.index)


def test_results_come_with_their_position() -> None:
    results = run([job("add", i, 1) for i in range(6)])
    assert [(result.index, result.value, result.error) for result in results] == [(i, i + 1, None) for i in range(6)]
    assert list(run_jobs([], 2)) == []


def test_workers_are_reused_and_bounded() -> None:
    started: list[int] = []
    results = run([job("process") for _ in range(8)], on_start=started.append)
    assert sorted(started) == list(range(8))
    assert len({result.value for result in results}) <= 2
    assert os.getpid() not in {result.value for result in results}


def test_workers_may_serve_several_calls() -> None:
    with worker_processes() as workers:
        first, again = (run([job("process")], shared=workers)[0].value for _ in "ab")
        assert first == again
        assert run([job("crash")], shared=workers)[0].error is not None
        assert run([job("process")], shared=workers)[0].value != first
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)


def test_workers_fork_from_a_process_that_has_loaded_what_jobs_need() -> None:
    with worker_processes(f"{FAKES}:load") as workers:
        workers.prepare()
        results = run([job("loaded")] * 3 + [job("crash"), job("loaded")], shared=workers)
    loaders = {result.value for result in results if result.error is None}
    assert len(loaders) == 1
    assert not loaders & {os.getpid(), None}
    with worker_processes("attngen.no_such_module:load") as workers:
        assert run([job("add", 1, 2)], shared=workers)[0].value == 3


@few(("load", "modules"), [("load_of_build", ["cupy", "numpy", "triton"]), ("load_of_jit", ["cupy", "numpy"])])
def test_compilers_are_loaded_without_torch_and_without_a_thread(load: str, modules: list[str]) -> None:
    """CuPy loads OpenBLAS, which starts threads: a fork has none of them, but every lock that they hold."""
    with worker_processes(f"{FAKES}:{load}") as workers:
        assert run([job("loaded_compilers")], shared=workers)[0].value == (1, modules)


def test_workers_start_again_where_the_process_that_forks_was_killed() -> None:
    with worker_processes() as workers:
        first = run([job("process")], shared=workers)[0].value
        parent = run([job("parent")], shared=workers)[0].value
        assert parent not in (first, os.getpid())
        run([job("last_of_its_process")], shared=workers)
        os.kill(parent, signal.SIGKILL)
        os.waitid(os.P_PID, parent, os.WEXITED | os.WNOWAIT)
        results = run([job("process"), job("parent")], shared=workers)
        assert results[0].value != first
        assert results[1].value not in (parent, os.getpid())


def test_a_worker_takes_a_long_job_before_it_unpickles_it(tmp_path: Path) -> None:
    """Unpickling may import much, and the next worker would start only after it."""
    results = run([job("met", fakes.Meeting(tmp_path)) for _ in range(2)])
    assert [result.value for result in results] == [2, 2]


def test_jobs_may_be_added_while_others_run() -> None:
    jobs = [job("add", 1, 1)]
    values = []
    for result in run_jobs(jobs, 2):
        values.append(result.value)
        if result.value < 6:
            jobs.append(job("add", result.value, 1))
    assert values == [2, 3, 4, 5, 6]


def test_spare_workers_wait_for_the_next_job_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    spare, load = SpareWorkers(), "attngen.no_such_module:load"
    with spare.given(load, ahead=True) as workers:
        first = run([job("process")], shared=workers)[0].value
    with spare.given(load, ahead=False) as workers:
        assert run([job("process")], shared=workers)[0].value == first
        os.kill(first, signal.SIGKILL)
        workers.idle[0].process.wait()
    monkeypatch.setattr("attngen.store.spare.SECONDS", 0.01)
    with spare.given(load, ahead=True) as workers:
        second = run([job("process")], shared=workers)[0].value
        assert second != first
        scratch = Path(workers.scratch)
    deadline = time.monotonic() + 20
    while scratch.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not scratch.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(second, 0)


def test_output_of_a_job_does_not_disturb_its_answer() -> None:
    assert [len(result.value) for result in run([job("chatty")] * 2)] == [300_000] * 2


def test_a_crash_costs_one_job() -> None:
    results = run([job("add", 1, 2), job("crash"), job("leave"), job("add", 3, 4)], workers=1)
    assert [result.value for result in results] == [3, None, None, 7]
    assert isinstance(results[1].error, CompileError)
    assert str(results[1].error).startswith("crash: its compiler process died of SIGABRT")
    assert "LLVM ERROR: out of ideas" in str(results[1].error)
    assert "exited with 3" in str(results[2].error)


def test_a_job_may_end_its_process_with_an_answer() -> None:
    """The process left behind harms no other job, and is no crash."""
    results = run([job("last_of_its_process"), job("last_of_its_process"), job("process"), job("process")], workers=1)
    assert [result.error for result in results] == [None] * 4
    first, second, third, fourth = (result.value for result in results)
    assert len({first, second, third}) == 3
    assert third == fourth


def test_a_hanging_job_is_stopped() -> None:
    # One worker, and jobs that never end: the second only starts, and the run only ends, if the first is stopped.
    results = run([job("hang"), job("hang")], workers=1, timeout=1.0)
    assert ["took longer than 1 s" in str(result.error) for result in results] == [True, True]


def test_errors_arrive_whole() -> None:
    refused, blundered, chatted = run([job("refuse"), job("blunder"), job("add", 1, 1)])
    assert isinstance(refused.error, SpecError)
    assert (str(refused.error), refused.error.field) == ("a.yaml:3: mask: no", "mask")
    assert isinstance(blundered.error, InternalError)
    assert "ZeroDivisionError: oops at fakes.py:" in str(blundered.error)
    assert chatted.value == 2


def test_a_job_that_is_not_ready_is_asked_again_at_the_end() -> None:
    jobs = [job("not_yet", "a"), job("add", 1, 2), job("not_yet", "b"), job("add", 3, 4)]
    results = list(run_jobs(jobs, 1))
    assert [result.index for result in results] == [1, 3, 0, 2]
    assert [result.value for result in results] == [3, 7, "a", "b"]


def test_stopping_early_stops_the_workers() -> None:
    results = run_jobs([job("process"), job("hang")], 2)
    worker = next(results).value
    results.close()
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)


def test_nothing_is_left_in_the_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run([job("crash"), job("add", 1, 2)])
    assert os.listdir(tmp_path) == []


def test_a_script_without_a_main_guard_can_run_jobs(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from attngen.store.jobs import Job, run_jobs\n"
        f"print([r.value for r in run_jobs([Job('add', '{FAKES}:add', (1, 2))], 1)])\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, check=False)
    assert (done.stdout, done.returncode) == ("[3]\n", 0), done.stderr


def test_variables_that_compilers_read_do_not_reach_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("ATTNGEN_KEPT", "1")
    calls = [Job("getenv", f"{FAKES}:environment", (name,)) for name in ("TRITON_INTERPRET", "ATTNGEN_KEPT")]
    assert [result.value for result in run(calls)] == ["absent", "1"]


def test_memory_bounds_the_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "available_cores", lambda: 8)
    monkeypatch.setattr(limits, "available_bytes", lambda: 3 * limits.BYTES_PER_JOB + 1)
    assert limits.job_limit() == 3
    assert limits.job_limit(2) == 2
    assert limits.job_limit(20) == 3
    monkeypatch.setattr(limits, "available_bytes", lambda: 0)
    assert limits.job_limit() == 1
    monkeypatch.setattr(limits, "available_bytes", lambda: None)
    assert limits.job_limit() == 8


def test_a_container_bounds_cores_and_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(limits, "_CGROUP", tmp_path)
    assert limits.available_cores() >= 1
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("2000\n")
    assert limits.available_cores() == 1
    assert limits.available_bytes() == 3000
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert (limits.available_bytes() or 0) > 3000


def test_jobs_that_are_stopped_fail() -> None:
    with worker_processes() as workers:
        timer = threading.Timer(0.5, workers.stop)
        timer.start()
        result = run([job("hang")], shared=workers)[0]
    assert "SIGKILL" in str(result.error)
    assert not workers.busy


@pytest.mark.parametrize("wrapped", ["plain", "wrapped", "printed"])
def test_a_full_disk_is_no_fault_of_a_job(wrapped: str) -> None:
    (result,) = run([job("fill", wrapped)])
    assert isinstance(result.error, DiskFullError)
    place = tempfile.gettempdir() if wrapped == "printed" else "/a/file"
    assert str(result.error).startswith(f"cannot write to {place}")
    temporary = ", or set TMPDIR to a folder with more" if wrapped == "printed" else ""
    assert str(result.error).endswith(f"the disk is full; free some space{temporary}")
