"""Training with the parameters sharded over processes (FSDP), and activations recomputed, on the reference."""

from __future__ import annotations

from pathlib import Path

import torch

from attngen.schema import preset
from tests.runtime import sharded


def test_two_processes_train_as_one(tmp_path: Path) -> None:
    whole = tmp_path / "whole.pt"
    arguments = (2, "cpu", str(tmp_path / "meeting"), [], str(whole))
    torch.multiprocessing.spawn(sharded.run, args=arguments, nprocs=2)
    alone = sharded.model(preset("causal"), "cpu")
    before = [parameter.detach().clone() for parameter in alone.parameters()]
    sharded.train(alone, slice(None))
    for found, wanted, start in zip(torch.load(whole), alone.parameters(), before, strict=True):
        torch.testing.assert_close(found, wanted.detach(), rtol=1e-4, atol=1e-5)
        assert not torch.equal(found, start)
