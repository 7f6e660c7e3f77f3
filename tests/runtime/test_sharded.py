"""Training with the parameters sharded over processes (FSDP), and activations recomputed, on the reference."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from attngen.resources import root
from attngen.schema import preset
from tests import forked
from tests.runtime import sharded


@pytest.mark.exhaustive
def test_two_processes_train_as_one(tmp_path: Path) -> None:
    whole = tmp_path / "whole.pt"
    arguments = (2, "cpu", str(tmp_path / "meeting"), [], str(whole))
    program = (
        "import torch.multiprocessing\nfrom tests.runtime import sharded\n"
        f"torch.multiprocessing.start_processes(sharded.run, {arguments!r}, nprocs=2, start_method='fork')\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(root())}
    done = forked.preload().run([sys.executable, "-c", program], env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    alone = sharded.model(preset("causal"), "cpu")
    before = [parameter.detach().clone() for parameter in alone.parameters()]
    sharded.train(alone, slice(None))
    for trained, wanted, start in zip(torch.load(whole), alone.parameters(), before, strict=True):
        torch.testing.assert_close(trained, wanted.detach(), rtol=1e-4, atol=1e-5)
        assert not torch.equal(trained, start)
