"""Context parallelism on the GPUs of one host, through NCCL."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from attngen.build.pipeline import Prepared, prepare
from attngen.cli import group
from attngen.schema import load_spec_text
from tests.gpu.family import arch_here
from tests.parallel import gpus, programs

#: Functions that write the spec of a test, and the numbers of GPUs that it takes.
_SPECS = ((gpus.spec, 2), (gpus.spec, 4), (programs.spec, 2))


def to_build() -> list[Prepared]:
    known = [(spec, world) for spec, world in _SPECS if world <= torch.cuda.device_count()]
    return [kernel for spec, world in known for kernel in prepare(load_spec_text(spec(world, arch_here().name)))]


def test_a_lost_rank_ends_the_others(tmp_path: Path) -> None:
    """Under NCCL they wait for the timeout of their group; where torch's watchdog hangs, its monitor ends them.

    How long they may wait counts from the loss: on a host that is busy with other tests, ranks take minutes to begin.
    """
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    environment = {**os.environ, "NCCL_NVLS_ENABLE": "0", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "8"}
    program = f"import sys; from tests.parallel import gpus; gpus.lost(int(sys.argv[1]), {str(tmp_path / 'meeting')!r})"
    printed = [tmp_path / f"rank{rank}.txt" for rank in range(2)]  # a pipe that nobody reads would stop them
    started = []
    for rank in range(2):
        with printed[rank].open("w") as file:
            command = [sys.executable, "-c", program, str(rank)]
            started.append(subprocess.Popen(command, env=environment, stderr=file))
    try:
        assert started[1].wait(150) == 3, printed[1].read_text()
        assert started[0].wait(80) not in (0, 3), printed[0].read_text()
    except subprocess.TimeoutExpired as error:
        pytest.fail("\n".join([str(error), *(file.read_text() for file in printed)]))
    finally:
        for process in started:
            process.kill()


@pytest.mark.parametrize("world", [2, 4])
def test_gpus_compute_as_one(world: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _run_on(world, gpus.run, gpus.spec, tmp_path, monkeypatch)


def test_plans_in_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _run_on(2, gpus.run_programs, programs.spec, tmp_path, monkeypatch)


def _run_on(
    world: int, run: Callable[[int, int, str], None], spec: Callable[[int, str], str], folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Build a spec, and run a process on each of some GPUs."""
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")  # before NCCL is loaded
    path = folder / "parallel.yaml"
    path.write_text(spec(world, arch_here().name))
    built = CliRunner().invoke(group, ["build", str(path)])
    assert built.exit_code == 0, built.output
    torch.multiprocessing.spawn(run, args=(world, str(folder / "meeting")), nprocs=world)
