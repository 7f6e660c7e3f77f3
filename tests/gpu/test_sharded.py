"""Training with the parameters sharded over GPUs (FSDP), in bf16, and activations recomputed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from attngen.schema import preset
from tests.gpu.packages import package
from tests.runtime import sharded


@pytest.mark.parametrize("world", [1, 2])
def test_processes_train_as_the_reference_does(world: int, tmp_path: Path) -> None:
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    folders = [
        kernel.origin
        for kernel in package("flash_attn").kernels("causal")
        if (kernel.dtype, kernel.head_dim_qk, kernel.layout) == ("bf16", sharded.HEAD_DIM, "dense")
        and not kernel.ordered
    ]
    assert len(folders) == 2  # forward and backward
    whole = tmp_path / "whole.pt"
    arguments = (world, "cuda", str(tmp_path / "meeting"), folders, str(whole))
    torch.multiprocessing.spawn(sharded.run, args=arguments, nprocs=world)
    alone = sharded.model(preset("causal"), "cpu")
    before = [parameter.detach().clone() for parameter in alone.parameters()]
    sharded.train(alone, slice(None))
    for trained, wanted, start in zip(torch.load(whole), alone.parameters(), before, strict=True):
        step, error = (wanted.detach() - start).norm(), (trained - wanted.detach()).norm()
        assert 0 < float(error) <= 0.1 * float(step)  # parameters, activations and gradients are in bf16
