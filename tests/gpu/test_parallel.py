"""Context parallelism on the GPUs of one host, through NCCL."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attngen.schema.writing import spec_text
from tests.gpu.family import arch_here
from tests.parallel import gpus


#: What segments call: the variants themselves, which are built for packed sequences too.
_PLAIN = ["full", "causal", "sliding_window", "alibi", "sliding_window_sink", "softcap"]


@pytest.mark.parametrize("world", [2, 4])
def test_gpus_compute_as_one(world: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")  # before NCCL is loaded
    made = gpus.variants(world)
    entry = {"arch": arch_here().name, "head_dim": gpus.HEAD_DIM, "dtype": "bf16", "passes": ["forward", "backward"]}
    spec = tmp_path / "parallel.yaml"
    spec.write_text(
        spec_text({name: one.fields for name, one in made.items()}, [{"variant": [*made], **entry}, {"variant": _PLAIN, "layout": ["dense", "varlen"], **entry}])
    )
    built = subprocess.run(
        [sys.executable, "-m", "attngen", "build", str(spec)], capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stdout + built.stderr
    torch.multiprocessing.spawn(gpus.run, args=(world, str(tmp_path / "meeting")), nprocs=world)
