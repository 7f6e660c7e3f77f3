"""Tests marked ``gpu`` run where torch finds one, and are skipped elsewhere. Workers share the cores.

Those of ``tests/gpu`` are thousands, which take long to collect and skip: without a GPU they are looked at only where a
path or ``-m gpu`` asks for them, and ``tests/test_gpu_suite.py`` imports them.
"""

from __future__ import annotations

import atexit
import gc
import os
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from attngen.store import jobs, limits
from attngen.store.spare import spare
from tests import forked, host_compiler, sampling

_GPU = Path(__file__).parent / "gpu"


def _share_cores() -> None:
    """Give each worker, and the processes that it starts, its part of the cores.

    Otherwise torch of every worker has a thread for each core, and threads that wait for one another burn most of the
    time. It reads the variable when it is imported, which is after this file. A build has as many processes as it has
    cores, each of which takes longer to start than most kernels of tests to compile.
    """
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:
        cores = limits.available_cores
        limits.available_cores = lambda: max(1, cores() // workers)
        os.environ.setdefault("OMP_NUM_THREADS", str(limits.available_cores()))


gc.disable()  # until all is collected: what is imported and collected lives to the end
_share_cores()
forked.hold_nvrtc()

#: Workers of jobs start as forks of a process that has imported what they need; tests of the workers have fresh ones.
jobs.subprocess = forked.starting(forked.ATTNGEN)  # type: ignore[assignment]


def pytest_configure(config: pytest.Config) -> None:
    sampling.ask(str(config.option.markexpr))
    host_compiler.share()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Neighbouring tests share kernels and plans, and so a worker."""
    if config.option.dist != "load":
        return None
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


def pytest_sessionfinish() -> None:
    spare.close()
    forked.close()


@pytest.fixture
def fresh_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of jobs start as they do outside of tests."""
    monkeypatch.setattr(jobs, "subprocess", subprocess)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    paths = [Path(argument.split("::")[0]).resolve() for argument in config.args]
    asked = "gpu" in str(config.option.markexpr) or any(path.is_relative_to(_GPU) for path in paths)
    if collection_path != _GPU or asked:
        return None
    if find_spec("torch") is None:
        return True
    import torch

    return None if torch.cuda.is_available() else True


def pytest_pycollect_makeitem(obj: object) -> list[pytest.Item] | None:
    """Collect no function that the run leaves out."""
    marks = getattr(obj, "pytestmark", ())
    return [] if isinstance(marks, list) and sampling.left_out(mark.name for mark in marks) else None


def pytest_collection_finish() -> None:
    """Look for garbage seldom, and never among what lives to the end: modules and thousands of collected tests.

    Python frees them after pytest's own last collections; nanobind, in Triton's libraries, reports what is not freed.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    atexit.register(gc.unfreeze)


def pytest_runtestloop() -> None:
    gc.enable()  # in the process that collects nothing, too


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
