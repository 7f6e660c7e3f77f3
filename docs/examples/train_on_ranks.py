"""A small GPT on packed documents, trained on several ranks with the losses of one.

    torchrun --nproc-per-node 2 docs/examples/train_on_ranks.py
    python docs/examples/train_on_ranks.py --ranks 2 --steps 3

The first line trains as torchrun says; the second one starts its own processes, trains on one rank and on several, and
compares the losses.

Documents of random lengths are packed into one sequence, which the ranks share; every second layer sees a window. Ranks
are processes of this host: on its GPUs if there are enough, through NCCL, else on the CPU, through gloo.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from itertools import accumulate
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import attngen

TOKENS, WINDOW, VOCABULARY, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 1024, 64, 64, 4, 2, 64, 2
WIDTH = HEADS * HEAD_DIM


class Block(nn.Module):
    """Attention and a feed-forward network."""

    def __init__(self, variant: str) -> None:
        super().__init__()
        self.variant = variant
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor, plan: attngen.parallel.Plan) -> Tensor:
        qkv = self.qkv(self.norms[0](x)).unflatten(1, (-1, HEAD_DIM))
        q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        x = x + self.out(plan.attention(q, k, v, variant=self.variant).flatten(1))
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    """Tokens of a rank, (tokens,), to logits."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList([Block(("causal", "sliding_window")[n % 2]) for n in range(LAYERS)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, plan: attngen.parallel.Plan) -> Tensor:
        x = self.words(tokens) + self.places(plan.positions(device=tokens.device))
        for block in self.blocks:
            x = block(x, plan)
        return self.head(x)


def packed(step: int) -> tuple[Tensor, list[int]]:
    """The tokens of a step, and the offsets of its documents: each repeats a few words."""
    generator = torch.Generator().manual_seed(step)
    lengths: list[int] = []
    while sum(lengths) < TOKENS:
        lengths.append(min(int(torch.randint(20, 400, (), generator=generator)), TOKENS - sum(lengths)))
    words = [torch.randint(0, VOCABULARY, (7,), generator=generator).repeat(n // 7 + 1)[:n] for n in lengths]
    return torch.cat(words), [0, *accumulate(lengths)]


def train(rank: int, ranks: int, steps: int, meeting: str, losses: str | None) -> None:
    """Train as one of ``ranks`` processes; the first one writes the losses to a file, or prints them."""
    on_gpu = torch.cuda.device_count() >= ranks
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    dtype = torch.bfloat16 if on_gpu else torch.float32
    if on_gpu:
        torch.cuda.set_device(device)
        attngen.jit()  # compiles the kernels on the first call
    else:
        torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Model().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)  # imports torch's compiler, which would hold a group
    dist.init_process_group("nccl" if on_gpu else "gloo", init_method=meeting, rank=rank, world_size=ranks)
    seen = []
    for step in range(steps):
        tokens, offsets = packed(step)
        targets = tokens.roll(-1)
        targets[torch.tensor(offsets[1:]) - 1] = -100  # no document tells the first token of the next one
        plan = attngen.parallel.plan(["causal", "sliding_window"], TOKENS, cu_seqlens=offsets, window=WINDOW)
        own, wanted = (plan.shard(x, 0).to(device) for x in (tokens, targets))
        with torch.autocast(device.type, dtype, enabled=on_gpu):
            logits = model(own, plan)
        loss = functional.cross_entropy(logits.float(), wanted, reduction="sum") / int((targets >= 0).sum())
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        seen.append(float(total))
        if rank == 0 and losses is None:
            print(f"step {step}: {seen[-1]:.5f}")
    if rank == 0 and losses is not None:
        Path(losses).write_text(" ".join(map(str, seen)))
    dist.barrier()  # a rank that ends earlier would take its connections with it
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    arguments = parser.parse_args()
    if "RANK" in os.environ:  # a process of torchrun
        train(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), arguments.steps, "env://", None)
        return
    results = []
    for ranks in (1, arguments.ranks):
        with tempfile.TemporaryDirectory() as folder:
            passed = ranks, arguments.steps, f"file://{folder}/meeting", f"{folder}/losses"
            torch.multiprocessing.spawn(train, passed, nprocs=ranks)
            results.append([float(loss) for loss in Path(folder, "losses").read_text().split()])
            print(f"{ranks} rank{'s' if ranks > 1 else ''}: {', '.join(f'{loss:.5f}' for loss in results[-1])}")
    tolerance = 2e-2 if torch.cuda.device_count() >= arguments.ranks else 1e-4
    assert all(abs(a - b) < tolerance for a, b in zip(*results, strict=True)), "the losses differ"


if __name__ == "__main__":
    main()
