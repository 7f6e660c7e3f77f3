"""Operators on DTensors: sharded over batch and heads with the results of whole tensors, and refused otherwise."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from attngen.resources import root
from tests import forked
from tests.sampling import some


@pytest.mark.exhaustive
@pytest.mark.parametrize("compiled", some([False, True], [False]))
def test_two_processes_compute_as_one(compiled: bool, tmp_path: Path) -> None:
    program = (
        "import torch._dynamo, torch.multiprocessing\nfrom tests.runtime.operations.shared import distributed\n"
        f"arguments = (2, {str(tmp_path / 'meeting')!r}, {compiled})\n"
        "torch.multiprocessing.start_processes(distributed.run, arguments, nprocs=2, start_method='fork')\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(root())}
    done = forked.preload().run([sys.executable, "-c", program], env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
