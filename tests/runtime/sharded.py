"""A small model whose attention is attngen's, trained by several processes that each hold a shard of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import attngen
from attngen.runtime.kernels.module import read_kernel
from attngen.runtime.registry.lookup import package_of_kernels, registry
from attngen.schema import preset

HEADS, KV_HEADS, HEAD_DIM, WIDTH = 4, 2, 64, 96
STEPS, ROWS, LENGTH = 3, 4, 70


class Block(nn.Module):
    """Causal attention with grouped heads, and a projection on either side; recomputed in the backward if asked for."""

    def __init__(self, variant: Any) -> None:
        super().__init__()
        self.variant = variant
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.out = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)
        self.recompute = False

    def forward(self, x: Tensor) -> Tensor:
        """Return x (batch, seqlen, WIDTH) and what attention adds to it."""
        return x + (checkpoint(self.attend, x, use_reentrant=False) if self.recompute else self.attend(x))

    def attend(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (-1, HEAD_DIM))
        q, k, v = heads.split((HEADS, KV_HEADS, KV_HEADS), dim=2)
        return self.out(attngen.attention(q, k, v, variant=self.variant).flatten(2))


def model(variant: Any, device: str) -> nn.Module:
    """Return two blocks; the same weights in each process."""
    torch.manual_seed(0)
    return nn.Sequential(Block(variant), Block(variant)).to(device)


def batches(device: str) -> list[Tensor]:
    """Return the batch of each step; the same in each process."""
    chance = torch.Generator().manual_seed(1)
    return [torch.randn(ROWS, LENGTH, WIDTH, generator=chance).to(device) for _ in range(STEPS)]


def train(net: nn.Module, part: slice) -> None:
    """Take ``STEPS`` steps on a part of each batch."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    device = next(net.parameters()).device
    for x in batches(str(device)):
        net(x[part]).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def run(rank: int, world: int, device_type: str, meeting: str, folders: Sequence[str], out: str) -> None:
    """Train a sharded model as process ``rank`` of ``world``; the first one saves its whole parameters to ``out``.

    ``folders`` hold kernels of ``causal``; without any the reference computes.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.set_num_threads(1)
    device = device_type
    if device_type == "cuda":
        torch.cuda.set_device(rank)
        device = f"cuda:{rank}"
    backend = {"cpu": "gloo", "cuda": "nccl"}[device_type]
    dist.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=world)
    try:
        net = model(variant_of(folders), device)
        mesh = dist.device_mesh.init_device_mesh(device_type, (world,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if folders else MixedPrecisionPolicy()
        for block in net:
            block.recompute = True
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(net, mesh=mesh, mp_policy=policy)
        share = ROWS // world
        train(net, slice(rank * share, (rank + 1) * share))
        whole = [parameter.full_tensor().cpu() for parameter in net.parameters()]  # type: ignore[attr-defined]
        if rank == 0:
            torch.save(whole, out)
    finally:
        dist.destroy_process_group()


def variant_of(folders: Sequence[str]) -> Any:
    """Name of the kernels of these folders, which are made known, or the variant that needs none."""
    if not folders:
        return preset("causal")
    package = package_of_kernels([read_kernel(Path(folder)) for folder in folders], "tests/runtime/sharded")
    registry.add(package)
    return f"{package.name}/causal"
