"""Context parallelism on the GPUs of one host, through NCCL."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.family import arch_here
from tests.parallel import gpus


@pytest.mark.parametrize("world", [2, 4])
def test_gpus_compute_as_one(world: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")  # before NCCL is loaded
    spec = tmp_path / "parallel.yaml"
    spec.write_text(gpus.spec(world, arch_here().name))
    built = subprocess.run(
        [sys.executable, "-m", "attngen", "build", str(spec)], capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stdout + built.stderr
    torch.multiprocessing.spawn(gpus.run, args=(world, str(tmp_path / "meeting")), nprocs=world)
