"""Context parallelism on two GPUs of one host, through NCCL."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attngen.schema.writing import spec_text
from tests.gpu.family import arch_here
from tests.parallel import gpus


def test_two_gpus_compute_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")  # before NCCL is loaded
    made = gpus.variants(2)
    entry = {"arch": arch_here().name, "head_dim": gpus.HEAD_DIM, "dtype": "bf16", "passes": ["forward", "backward"]}
    spec = tmp_path / "parallel.yaml"
    spec.write_text(
        spec_text({name: one.fields for name, one in made.items()}, [{"variant": [*made, "causal"], **entry}])
    )
    built = subprocess.run(
        [sys.executable, "-m", "attngen", "build", str(spec)], capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stdout + built.stderr
    torch.multiprocessing.spawn(gpus.run, args=(2, str(tmp_path / "meeting")), nprocs=2)
